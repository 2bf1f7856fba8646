"""kstatus: how Helm, Flux and other tools read any object's state, after the published algorithm.

`sigs.k8s.io/cli-utils/pkg/kstatus/status/generic.go`: deletion, then `observedGeneration`, then the first of
`Reconciling` and `Stalled` that is True in the order of the list, then, as no kind of ours is built in, `Ready`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CURRENT = "Current"
IN_PROGRESS = "InProgress"
FAILED = "Failed"
TERMINATING = "Terminating"


def kstatus(obj: Mapping[str, Any]) -> str:
    """The state of a custom resource."""
    metadata, status = obj["metadata"], obj.get("status") or {}
    if metadata.get("deletionTimestamp"):
        return TERMINATING
    observed = status.get("observedGeneration")
    if observed is not None and observed != metadata.get("generation"):
        return IN_PROGRESS
    conditions = status.get("conditions") or []
    for condition in conditions:
        if condition["status"] == "True" and condition["type"] in ("Reconciling", "Stalled"):
            return IN_PROGRESS if condition["type"] == "Reconciling" else FAILED
    ready = next((condition["status"] for condition in conditions if condition["type"] == "Ready"), "True")
    return CURRENT if ready == "True" else IN_PROGRESS
