"""Names of child objects: pure functions of job, worker and incarnation, so that a repeated create is harmless."""

from __future__ import annotations

# A pod is `<job>-w<index>-<incarnation>`, and hostname, label and DNS label limits are 63 characters.
MAX_JOB_NAME = 43


def pod_name(job: str, worker: int, incarnation: int) -> str:
    """The worker pod's name. Stable while the pod lives, whatever mesh generations it passes through."""
    return f"{job}-w{worker}-{incarnation}"


def service_name(job: str) -> str:
    """The headless service that gives worker pods DNS names."""
    return job


def token_secret_name(job: str) -> str:
    """The secret that carries the job's coordinator token into its pods."""
    return f"{job}-coordinator"
