"""Kubernetes objects as JSON, and the names of a job's child objects.

The names are functions of job, worker and incarnation, so that a create request can be repeated. Names of Services and
Secrets contain the job's uid: they never collide with an object of a user, or of a deleted job with the same name.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

KubeObject = dict[str, Any]
"""One object as JSON: `apiVersion`, `kind`, `metadata`, and what its kind adds."""

# Hostname, label and DNS label limits are 63 characters. A pod is `<job>-w<index>-<incarnation>`, and the Secret
# `<job>-<uid>-<digest>`, of which 8 and 10 characters are used.
MAX_JOB_NAME = 43
UID_CHARACTERS = 8
DIGEST_CHARACTERS = 10


def is_sidecar(init_container: Mapping[str, Any]) -> bool:
    """Whether an init container runs beside the containers of its pod, until those have ended."""
    return init_container.get("restartPolicy") == "Always"


def pod_name(job: str, worker: int, incarnation: int) -> str:
    """The worker pod's name. It does not change with the mesh generation."""
    return f"{job}-w{worker}-{incarnation}"


def service_name(job: str, uid: str) -> str:
    """The headless Service that gives worker pods DNS names."""
    return f"{job}-{uid[:UID_CHARACTERS]}"


def channel_template_name(job: str, uid: str) -> str:
    """The ResourceClaimTemplate that NVIDIA's driver makes for the job's ComputeDomain."""
    return f"{job}-{uid[:UID_CHARACTERS]}-nvlink"


def secret_name(job: str, uid: str, data: Mapping[str, str]) -> str:
    """The Secret with these values, which worker pods use to reach the coordinator.

    The operator creates Secrets and may not read them, so the name depends on the contents. These include the job's
    token, so nobody else can compute the name before the Secret exists: a Secret with this name was created by the
    operator. Other contents, such as a token of a new key, are another Secret. Running pods keep theirs.
    """
    text = json.dumps(dict(data), sort_keys=True)
    digest = base64.b32encode(hashlib.sha256(text.encode()).digest()).decode().lower()
    return f"{job}-{uid[:UID_CHARACTERS]}-{digest[:DIGEST_CHARACTERS]}"
