"""The heartbeat: the agent's state as the coordinator reads it. Pure."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.protocol import WorkerReport
from meshwright_worker.agent.core import Core

MAX_PHASES = 16


def build_report(core: Core, now: float = 0.0, state_of: Callable[[int], str] = lambda _: "") -> WorkerReport:
    """The report of this moment. It tells the whole state, so a lost one needs no repeating.

    Args:
        core: the agent's state.
        now: monotonic seconds.
        state_of: the state letter of a process.
    """
    current = core.current
    if current is None:
        return WorkerReport(
            worker=core.worker, incarnation=core.incarnation, generation=core.generation, state=core.state
        )
    failure = current.failure
    holds_rank_zero = current.first_rank == 0
    return WorkerReport(
        worker=core.worker,
        incarnation=core.incarnation,
        generation=current.number,
        state=core.state,
        ranks=current.processes(now, state_of),
        failure=failure.kind if failure else None,
        message=failure.message if failure else "",
        progress=current.progress,
        checkpoint=core.checkpoint if holds_rank_zero else None,
        evaluation=current.evaluation,
        phases=current.phases[:MAX_PHASES] if holds_rank_zero else [],
    )
