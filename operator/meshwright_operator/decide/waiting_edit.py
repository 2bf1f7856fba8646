"""Edits that wait because of `spec.updatePolicy`: for the next checkpoint, or for a restart with another cause.

Only an edit that would interrupt ranks waits. Without a running generation it takes effect at once, unless ranks hold
their state: to restart them would cost the steps since the last checkpoint, which a recovery in memory keeps.
"""

from __future__ import annotations

from meshwright.api import conditions as names
from meshwright.api.conditions import is_true
from meshwright.api.spec import UpdatePolicy
from meshwright.api.status import WaitingEditStatus
from meshwright_operator.decide import in_memory
from meshwright_operator.decide.conditions import BlockedEdit
from meshwright_operator.decide.observed import Observed
from meshwright_operator.timestamps import format_time

EDIT_WAITS = "EditWaits"
CHECKPOINT = "Checkpoint"
NODES = "Nodes"
RESTART = "Restart"


def waiting_edit(running: Observed, edited: Observed) -> WaitingEditStatus | None:
    """The edit as it waits, or None if it takes effect now.

    Args:
        running: The job with its applied spec.
        edited: The job with the edit.
    """
    policy, mesh = edited.spec.update_policy, running.mesh
    trains = mesh.generation > 0 and (not mesh.pending_cause or _recovers_in_memory(running))
    if policy is UpdatePolicy.NOW or not trains or edited.spec.suspend:
        return None
    waits_for = CHECKPOINT if policy is UpdatePolicy.AT_CHECKPOINT else RESTART
    checkpoint, before = running.status.checkpoint, running.status.waiting_edit
    step = checkpoint.step if checkpoint is not None else None
    if before is None or before.revision != edited.revision:
        since = format_time(running.now)
        return WaitingEditStatus(revision=edited.revision, waits_for=waits_for, since=since, checkpoint_step=step)
    if waits_for == CHECKPOINT and step != before.checkpoint_step:
        return None
    return before.model_copy(update={"waits_for": waits_for})


def _recovers_in_memory(running: Observed) -> bool:
    """Whether ranks hold their state for the next generation. If that waits for nodes, the edit may be what helps."""
    mesh, held = running.mesh, bool(running.mesh.in_memory and running.spec.recovery.in_memory)
    return held and in_memory.goes_on(running, mesh.pending_cause) and is_true(running.status.conditions, names.PLACED)


def has_waited(running: Observed, edited: Observed) -> WaitingEditStatus | None:
    """The edit whose checkpoint is complete, while it does not fit: it takes effect once it does, without another one.

    Its restart repeats no step: the ranks save a checkpoint when they stop.
    """
    before = running.status.waiting_edit
    waits = edited.spec.update_policy is UpdatePolicy.AT_CHECKPOINT
    if not waits or before is None or before.revision != edited.revision:
        return None
    return before.model_copy(update={"waits_for": NODES})


def edit_waits(waiting: WaitingEditStatus) -> BlockedEdit:
    """The same for the conditions of the job, which keeps its previous revision."""
    what = "the next checkpoint" if waiting.waits_for == CHECKPOINT else "the next restart of the ranks"
    text = f"The edit waits for {what}, because of `spec.updatePolicy`"
    return BlockedEdit(EDIT_WAITS, text, retryable=True)
