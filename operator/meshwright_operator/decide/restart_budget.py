"""The budget of restarts: how many count toward `recovery.maxRestarts`, of all time or of the last while."""

from __future__ import annotations

from datetime import datetime, timedelta

from meshwright.api.spec import RecoverySpec
from meshwright.api.status import MAX_RESTART_TIMES, MeshStatus, ParallelTrainingJobStatus
from meshwright_operator.timestamps import format_time, parse_time, seconds_since

FAILURE_RESET_SECONDS = 600.0
"""Training for so long ends a row of failures."""


def drop_expired(status: ParallelTrainingJobStatus, recovery: RecoverySpec, now: datetime) -> None:
    """Forgets the restarts that the window has left behind; without a window nothing is forgotten."""
    if recovery.restart_window_seconds is None:
        status.restart_times = []
        return
    begin = now - timedelta(seconds=recovery.restart_window_seconds)
    in_window = [text for text in status.restart_times if (moment := parse_time(text)) is not None and moment >= begin]
    # A window that is set later counts from then on.
    status.restart_times = in_window
    status.restarts_toward_limit = len(in_window)


def count(status: ParallelTrainingJobStatus, recovery: RecoverySpec, now: datetime) -> None:
    """One more restart that counts."""
    status.restarts_toward_limit += 1
    if recovery.restart_window_seconds is not None:
        status.restart_times = [*status.restart_times, format_time(now)][-MAX_RESTART_TIMES:]


def record_failure(mesh: MeshStatus, now: datetime) -> None:
    """One more failure in a row, or the first of another row: before it the generation trained for long enough."""
    trained = 0.0 if mesh.pending_cause else seconds_since(mesh.started_time, now)
    mesh.failures = 1 if trained >= FAILURE_RESET_SECONDS else mesh.failures + 1


def exhausted(status: ParallelTrainingJobStatus, recovery: RecoverySpec) -> bool:
    """Whether one more restart that counts would be one too many."""
    return status.restarts_toward_limit + 1 > recovery.max_restarts
