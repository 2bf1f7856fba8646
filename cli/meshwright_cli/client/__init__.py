"""A typed client for jobs, with the verbs of the command line, for notebooks and pipelines.

from meshwright_cli.client import Client

with Client(namespace="research") as client:
client.submit("job.yaml")
job = client.wait("my-job", "complete", timeout=3600)
"""

from meshwright_cli.client.async_client import AsyncClient
from meshwright_cli.client.checkpoints.programs import Export, Generation, PodOptions
from meshwright_cli.client.errors import (
    ConfigurationError,
    DefinitionMissingError,
    ExitCode,
    ForbiddenError,
    JobFailedError,
    ManifestError,
    MeshwrightError,
    NotFoundError,
    RejectedError,
    UnauthorizedError,
    UnreachableError,
    WaitTimeoutError,
)
from meshwright_cli.client.kubeconfig import Connection
from meshwright_cli.client.log_stream import LogSource
from meshwright_cli.client.objects import Job, JobEvent, LogLine, WorkerPod
from meshwright_cli.client.profiling import Profile
from meshwright_cli.client.sync_client import Client
from meshwright_cli.client.waiting import Target

__all__ = [
    "AsyncClient",
    "Client",
    "ConfigurationError",
    "Connection",
    "DefinitionMissingError",
    "ExitCode",
    "Export",
    "ForbiddenError",
    "Generation",
    "Job",
    "JobEvent",
    "JobFailedError",
    "LogLine",
    "LogSource",
    "ManifestError",
    "MeshwrightError",
    "NotFoundError",
    "PodOptions",
    "Profile",
    "RejectedError",
    "Target",
    "UnauthorizedError",
    "UnreachableError",
    "WaitTimeoutError",
    "WorkerPod",
]
