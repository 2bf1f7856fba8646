"""Names of child objects: pure functions of job, worker and incarnation, so that create can be repeated."""

from __future__ import annotations

# A pod is `<job>-w<index>-<incarnation>`, and hostname, label and DNS label limits are 63 characters.
MAX_JOB_NAME = 43


def pod_name(job: str, worker: int, incarnation: int) -> str:
    """The worker pod's name. It does not change with the mesh generation."""
    return f"{job}-w{worker}-{incarnation}"


def service_name(job: str) -> str:
    """The headless Service that gives worker pods DNS names."""
    return job


def token_secret_name(job: str) -> str:
    """The Secret with the job's coordinator token."""
    return f"{job}-coordinator"
