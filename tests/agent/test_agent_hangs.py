"""A rank that is stopped in the middle of training: how it shows in reports, and that it does not last."""

from __future__ import annotations

import os
import signal

import pytest

from meshwright.protocol.messages import RankProcess, WorkerReport
from tests.agent.support import Coordinator, alive, until
from tests.agent.test_agent_runtime import LONG, StartAgent, announce, step_of

pytestmark = pytest.mark.slow


def ranks_of(coordinator: Coordinator, generation: int) -> dict[int, RankProcess]:
    """Every rank as its agent told last."""
    reports = [r for w in (0, 1) if (r := coordinator.last(w)) is not None and r.generation == generation]
    return {process.rank: process for report in reports for process in report.ranks}


@pytest.mark.long
async def test_a_stopped_rank_shows_and_is_replaced(coordinator: Coordinator, start_agent: StartAgent) -> None:
    agents = [start_agent(worker, torch=True) for worker in range(2)]
    await announce(coordinator, 1, LONG)
    await until(lambda: step_of(coordinator, 1) >= 2, 150, lambda: agents[0].log)
    await until(lambda: len(ranks_of(coordinator, 1)) == 4, 60)
    assert all(process.idle_seconds < 5 and not process.state for process in ranks_of(coordinator, 1).values())
    victim = next(pid for rank, _, pid in agents[1].ranks_started() if rank == 3)
    os.kill(victim, signal.SIGSTOP)

    def hangs() -> bool:
        ranks = ranks_of(coordinator, 1)
        return len(ranks) == 4 and all(process.idle_seconds >= 6 for process in ranks.values())

    await until(hangs, 60, lambda: str(ranks_of(coordinator, 1)))
    await until(lambda: ranks_of(coordinator, 1)[3].state == "T", 60, lambda: str(ranks_of(coordinator, 1)))
    ranks = ranks_of(coordinator, 1)
    assert [process.rank for process in ranks.values() if process.state == "T"] == [3]
    assert all(process.step is not None for process in ranks.values())
    assert len({process.step for process in ranks.values()}) <= 2

    before = {pid for agent in agents for _, _, pid in agent.ranks_started()}
    await announce(coordinator, 2, LONG)
    await until(lambda: step_of(coordinator, 2) >= 1, 150, lambda: agents[0].log)
    assert not any(alive(pid) for pid in before), "SIGKILL also ends a process that is stopped"
    last = coordinator.last(1)
    assert isinstance(last, WorkerReport)
    assert {process.rank for process in last.ranks} == {2, 3}
