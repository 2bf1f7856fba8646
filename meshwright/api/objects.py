"""Kubernetes objects as JSON, and the names of a job's child objects.

The names are functions of job, worker and incarnation, so that a create request can be repeated.
"""

from __future__ import annotations

from typing import Any

KubeObject = dict[str, Any]
"""One object as JSON: `apiVersion`, `kind`, `metadata`, and what its kind adds."""

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
