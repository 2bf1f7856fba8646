"""A typed client for jobs, with the verbs of the command line, for notebooks and pipelines.

    from meshwright_cli.client import Client

    with Client(namespace="research") as client:
        client.submit("job.yaml")
        job = client.wait("my-job", "complete", timeout=3600)

`AsyncClient` has the same methods as coroutines.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_MODULES = {
    "AsyncClient": "async_client",
    "Client": "sync_client",
    "ConfigurationError": "errors",
    "Connection": "kubeconfig",
    "DefinitionMissingError": "errors",
    "ExitCode": "errors",
    "Export": "checkpoints.programs",
    "ForbiddenError": "errors",
    "Generation": "checkpoints.programs",
    "Job": "objects",
    "JobEvent": "objects",
    "JobFailedError": "errors",
    "LogLine": "objects",
    "LogSource": "log_stream",
    "ManifestError": "errors",
    "MeshwrightError": "errors",
    "NotFoundError": "errors",
    "PodOptions": "checkpoints.programs",
    "Profile": "profiling",
    "RejectedError": "errors",
    "Target": "waiting",
    "UnauthorizedError": "errors",
    "UnreachableError": "errors",
    "WaitTimeoutError": "errors",
    "WorkerPod": "objects",
}
"""Module of each name. It is imported when the name is used: commands that reach no cluster use only some classes."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
