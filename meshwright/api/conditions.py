"""Conditions: their names, and functions to read and change a list of them."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.api.status import Condition

READY = "Ready"
RECONCILING = "Reconciling"
STALLED = "Stalled"
PLACED = "Placed"
COMPLETE = "Complete"
FAILED = "Failed"
SUSPENDED = "Suspended"
RESCALING = "Rescaling"
PREFLIGHT_PASSED = "PreflightPassed"
CHECKPOINT_HEALTHY = "CheckpointHealthy"

ALL = (READY, RECONCILING, STALLED, PLACED, COMPLETE, FAILED, SUSPENDED)
"""The conditions of every job."""
KNOWN = (*ALL, RESCALING, PREFLIGHT_PASSED, CHECKPOINT_HEALTHY)
"""All conditions. Only elastic jobs have `Rescaling`, jobs whose workers check their pods `PreflightPassed`, and those
of which a checkpoint was not saved `CheckpointHealthy`."""

NO_LAYOUT = "NoLayout"
"""Reason of `Placed` of a job for which no layout fits the cluster's nodes."""


def find(conditions: Sequence[Condition], kind: str) -> Condition | None:
    """The condition of this type, or None."""
    return next((c for c in conditions if c.type == kind), None)


def is_true(conditions: Sequence[Condition], kind: str) -> bool:
    """Whether the condition of this type is True."""
    condition = find(conditions, kind)
    return condition is not None and condition.status == "True"


def state(conditions: Sequence[Condition]) -> str:
    """The state in one word: the reason of the condition `Ready`, as `kubectl get` shows it."""
    ready = find(conditions, READY)
    return ready.reason if ready is not None else "Pending"


def message(conditions: Sequence[Condition]) -> str:
    """The message of the condition `Ready`."""
    ready = find(conditions, READY)
    return ready.message if ready is not None else ""


def with_condition(conditions: Sequence[Condition], new: Condition) -> list[Condition]:
    """The list with `new` in place of the condition of its type.

    `lastTransitionTime` moves only when `status` changes (Kubernetes API conventions), so repeating an
    observation gives the same list, and nothing is written.
    """
    old = find(conditions, new.type)
    if old is None:
        return [*conditions, new]
    if old.status == new.status:
        new = new.model_copy(update={"last_transition_time": old.last_transition_time})
    return [new if c.type == new.type else c for c in conditions]
