"""The heartbeat: the agent's state in the coordinator's format. Pure."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.protocol.messages import WorkerReport
from meshwright_worker.agent.state_machine import AgentStateMachine

MAX_PHASES = 16


def build_report(
    state_machine: AgentStateMachine, now: float = 0.0, read_process_state: Callable[[int], str] = lambda _: ""
) -> WorkerReport:
    """Build the current report. It contains the complete state, so a lost report need not be repeated.

    Args:
        state_machine: the agent's state.
        now: monotonic seconds.
        read_process_state: returns the state letter of a process.
    """
    current = state_machine.current
    if current is None:
        return WorkerReport(
            worker=state_machine.worker,
            incarnation=state_machine.incarnation,
            generation=state_machine.generation,
            state=state_machine.state,
        )
    failure = current.failure
    has_rank_zero = current.first_rank == 0
    return WorkerReport(
        worker=state_machine.worker,
        incarnation=state_machine.incarnation,
        generation=current.number,
        state=state_machine.state,
        ranks=current.processes(now, read_process_state),
        failure=failure.kind if failure else None,
        message=failure.message if failure else "",
        progress=current.progress,
        checkpoint=state_machine.checkpoint if has_rank_zero else None,
        evaluation=current.evaluation,
        phases=current.phases[:MAX_PHASES] if has_rank_zero else [],
    )
