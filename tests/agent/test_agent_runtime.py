"""Real agents that run Meshwright's own training runtime."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from meshwright.api.checkpoint import Staging, Writer
from meshwright.api.data import DataSource, DataSpec
from meshwright.protocol.messages import AgentState, FailureKind, MeshDocument
from meshwright_local.nodeagent.network.ports import free_port
from tests.agent.support import AgentProcess, Coordinator, alive, mesh, training_run, until

StartAgent = Callable[..., AgentProcess]

pytestmark = pytest.mark.slow

LONG = 100_000


async def announce(coordinator: Coordinator, generation: int, steps: int, *, every_steps: int = 1000) -> MeshDocument:
    run = training_run(steps, tensor=2, data_parallel=2, every_steps=every_steps)
    document = mesh(generation, run, await coordinator.gang(2, above=generation - 1), 2)
    coordinator.announce(document)
    return document


def step_of(coordinator: Coordinator, generation: int) -> int:
    """The last step that this generation reported; 0 before its first."""
    report = coordinator.last(0)
    if report is None or report.generation != generation or report.progress is None:
        return 0
    return report.progress.step


def resumed_after(agent: AgentProcess, generation: int) -> dict[int, int]:
    """By rank, the step after which this generation began to train."""
    lines = re.findall(rf"rank trains rank=(\d+) generation={generation} after-step=(\d+)", agent.log)
    return {int(rank): int(step) for rank, step in lines}


@pytest.mark.long
async def test_a_run_that_cannot_be_executed_is_reported_as_refused(
    coordinator: Coordinator, start_agent: StartAgent
) -> None:
    """By default, `test_parts` has whose fault an error is, and `tests/e2e/test_mistakes.py` what ranks report."""
    agent = start_agent(0, torch=True)
    run = training_run(LONG, tensor=2)
    small = run.architecture.model_copy(update={"vocab_size": 130})
    hellos = await coordinator.gang(1)
    coordinator.announce(mesh(1, run.model_copy(update={"architecture": small}), hellos, 2))
    await until(lambda: coordinator.states(0)[-1:] == [AgentState.FAILED], 60, lambda: agent.log)
    report = coordinator.last(0)
    assert report is not None
    assert report.failure is FailureKind.REJECTED
    assert "`model.vocabSize: 130`" in report.message


def children_of(process: int) -> list[int]:
    """The processes that a rank has forked."""
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.long
async def test_writer_processes_save_and_end_with_their_ranks(
    coordinator: Coordinator, start_agent: StartAgent
) -> None:
    agent = start_agent(0, torch=True)
    run = training_run(LONG, tensor=2, every_steps=5)
    assert run.checkpoint is not None
    spec = run.checkpoint.model_copy(update={"staging": Staging.OVERLAPPED, "writer": Writer.PROCESS})
    coordinator.announce(mesh(1, run.model_copy(update={"checkpoint": spec}), await coordinator.gang(1), 2))

    def saved() -> int:
        report = coordinator.last(0)
        return report.checkpoint.step if report is not None and report.checkpoint is not None else 0

    await until(lambda: saved() > 0, 150, lambda: agent.log)
    ranks = [pid for _, _, pid in sorted(agent.ranks_started())]
    writers = [child for pid in ranks for child in children_of(pid)]
    assert len(writers) == 2

    # Training goes on without a writer.
    os.kill(writers[0], signal.SIGKILL)
    before = saved()
    await until(lambda: saved() > before + 10, 60, lambda: agent.log)
    assert "was killed by signal 9: this rank writes them in a thread from now on" in agent.log
    assert children_of(ranks[0]) == []

    # No writer outlives its rank, however that ends, and none is left as a zombie.
    os.kill(ranks[1], signal.SIGKILL)
    await until(lambda: coordinator.states(0)[-1] is AgentState.FAILED, 60, lambda: agent.log)
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in writers), 60)


@pytest.mark.long
async def test_train_lose_a_rank_drain_and_complete(coordinator: Coordinator, start_agent: StartAgent) -> None:
    port = free_port()
    first, second = start_agent(0, torch=True, MESHWRIGHT_METRICS_PORT=str(port)), start_agent(1, torch=True)
    await announce(coordinator, 1, LONG, every_steps=5)
    await until(lambda: step_of(coordinator, 1) >= 5, 150, lambda: first.log)
    for worker in (0, 1):
        await until(lambda w=worker: coordinator.states(w)[-1] is AgentState.RUNNING, 60)
        assert AgentState.STARTING in coordinator.states(worker)
    await until(lambda: (report := coordinator.last(0)) is not None and report.checkpoint is not None, 60)
    await check_report_and_metrics(coordinator, port)

    # A killed rank: its own pod tells the cause, and either pod stops; the next generation starts from a checkpoint.
    victim = next(pid for rank, _, pid in second.ranks_started() if rank == 3)
    os.kill(victim, signal.SIGKILL)
    for worker in (0, 1):
        await until(lambda w=worker: coordinator.states(w)[-1] is AgentState.FAILED, 60, lambda: first.log)
    report = coordinator.last(1)
    assert report is not None
    assert "rank 3 was killed by SIGKILL" in report.message
    before = (report := coordinator.last(0)) and report.checkpoint and report.checkpoint.step
    assert before
    await announce(coordinator, 2, LONG, every_steps=5)
    await until(lambda: step_of(coordinator, 2) > before, 120, lambda: first.log)
    steps = set(resumed_after(first, 2).values())
    assert len(steps) == 1
    assert steps.pop() >= before, "a checkpoint may be durable before its commit is told"

    # One pod drains: all ranks of both pods stop after the same step, which is saved.
    second.terminate()
    assert await second.exit_code() == 143
    await until(lambda: coordinator.states(0)[-1] is AgentState.IDLE, 60, lambda: first.log)
    saved = (report := coordinator.last(0)) and report.checkpoint and report.checkpoint.step
    assert saved == step_of(coordinator, 2)

    replacement = start_agent(1, torch=True)
    await announce(coordinator, 3, saved + 5, every_steps=5)
    codes = await asyncio.gather(first.exit_code(120), replacement.exit_code(120))
    assert codes == [0, 0]
    assert resumed_after(first, 3) | resumed_after(replacement, 3) == dict.fromkeys(range(4), saved)
    assert [coordinator.states(worker)[-1] for worker in (0, 1)] == [AgentState.COMPLETE] * 2
    assert f"step {saved + 5}/{saved + 5} loss=" in first.log


async def check_report_and_metrics(coordinator: Coordinator, port: int) -> None:
    report = coordinator.last(0)
    assert report is not None
    assert report.progress is not None
    assert 0 < report.progress.loss < 10
    assert report.progress.tokens_per_second > 0
    assert {phase.name for phase in report.phases} >= {"spawn", "rendezvous", "build", "load", "first-step"}
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/metrics") as response:
        text = await response.text()
    for name in ("ptj_step{", "ptj_loss{", "ptj_step_duration_seconds_bucket{", "ptj_rank_up{", "ptj_tokens_total{"):
        assert name in text
    other = coordinator.last(1)
    assert other is not None
    assert other.progress is None


@pytest.mark.long
async def test_a_rank_that_refuses_its_data_says_why_and_its_peers_do_not_hang(
    coordinator: Coordinator, start_agent: StartAgent, tmp_path: Path
) -> None:
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    (tmp_path / "good" / "a.py").write_text("def one():\n    return 1\n" * 20)
    agents = [
        start_agent(worker, torch=True, MESHWRIGHT_DATA_DIR=str(tmp_path / name))
        for worker, name in enumerate(("good", "bad"))
    ]
    data = DataSpec(source=DataSource.FILES, claim_name="v", pattern="**/*.py")
    run = training_run(5, data_parallel=2).model_copy(update={"data": data})
    coordinator.announce(mesh(1, run, await coordinator.gang(2), 1))
    await until(lambda: coordinator.states(1)[-1:] == [AgentState.FAILED], 150, lambda: agents[1].log)
    report = coordinator.last(1)
    assert report is not None
    assert report.failure == "InvalidInput"
    assert ": `data.pattern: **/*.py` matches no file" in report.message
    # The other one has found nothing wrong, and waits for this one; the next generation ends that.
    await until(agents[0].ranks_started, 60, lambda: agents[0].log)
    assert coordinator.states(0)[-1] is AgentState.STARTING
    (waiting,) = (pid for _, _, pid in agents[0].ranks_started())
    assert alive(waiting)
    (tmp_path / "bad" / "a.py").write_text("def one():\n    return 1\n" * 20)
    coordinator.announce(mesh(2, run, await coordinator.gang(2, above=1), 1))
    await until(lambda: not alive(waiting), 60)
    assert [await agent.exit_code(60) for agent in agents] == [0, 0]


@pytest.mark.long
async def test_nothing_survives_a_killed_agent(coordinator: Coordinator, start_agent: StartAgent) -> None:
    """By default, `test_agent_commands` kills the agent of a command, `test_fork_server` the owner of a server."""
    agents = [start_agent(worker, torch=True) for worker in range(2)]
    await announce(coordinator, 1, LONG)
    await until(lambda: step_of(coordinator, 1) >= 1, 150, lambda: agents[0].log)
    family = agents[0].processes()
    assert len(family) == 1 + 1 + 2  # the agent, the fork server, two ranks
    agents[0].process.kill()
    await until(lambda: not any(alive(pid) for pid in family), 60)
    await until(lambda: coordinator.states(1)[-1] is AgentState.FAILED, 60, lambda: agents[1].log)
    report = coordinator.last(1)
    assert report is not None
    assert report.failure == "PeerLost"
