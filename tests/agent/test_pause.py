"""Real agents whose generation is paused: ranks save and stop, and the same pods take part in the next generation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.protocol.messages import AgentState, MeshDocument, MeshRequest
from meshwright_worker.agent import coordinator_link
from meshwright_worker.agent.coordinator_client import SupersededError
from meshwright_worker.agent.coordinator_link import MeshPoll
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.manifest import MANIFEST
from meshwright_worker.data.mixture import open_stream
from meshwright_worker.data.sample_order import SampleDigest
from tests.agent.support import AgentProcess, Coordinator, alive, mesh, training_run, until
from tests.agent.test_agent_commands import SLEEP, reported, start_generation
from tests.agent.test_agent_runtime import LONG, resumed_after, step_of

StartAgent = Callable[..., AgentProcess]

SAVES = f"""
import signal, sys
def save(*_):
    print("saved", flush=True); sys.exit(143)
signal.signal(signal.SIGTERM, save)
{SLEEP}"""


async def start_training(coordinator: Coordinator, generation: int, workers: int, steps: int = LONG) -> None:
    hellos = await coordinator.gang(workers, above=generation - 1)
    coordinator.announce(mesh(generation, training_run(steps, tensor=2, data_parallel=workers), hellos, 2))


async def paused(coordinator: Coordinator, agents: list[AgentProcess], generation: int) -> None:
    """Pause a generation, and wait until its ranks have stopped."""
    coordinator.pause_ranks(generation)
    for agent in agents:
        await reported(coordinator, AgentState.IDLE, generation, agent.worker)
        report = coordinator.last(agent.worker)
        assert report is not None
        assert (report.paused, report.failure) == (True, None)
        started = [pid for _, number, pid in agent.ranks_started() if number == generation]
        assert started
        assert not any(map(alive, started))


def saved_state(directory: Path) -> dict[str, Any]:
    """The training state in the manifest of the newest checkpoint."""
    checkpoints = CheckpointDirectory(directory / "checkpoints")
    manifest = json.loads((checkpoints.path(checkpoints.steps()[0]) / MANIFEST).read_text())
    return dict(manifest["state"])


def digest_of_steps(steps: int) -> int:
    """The digest of the samples of the first steps, each once."""
    run = training_run(LONG)
    stream = open_stream(run.data, None, run.training.sequence_length, run.training.seed)
    numbers, digest = range(steps * run.training.global_batch_size), SampleDigest()
    digest.add(numbers, stream.rows(numbers))
    return digest.value


@pytest.mark.long
@pytest.mark.slow
async def test_the_same_pods_train_on_with_another_world_size(
    coordinator: Coordinator, start_agent: StartAgent, tmp_path: Path
) -> None:
    """By default, `tests/e2e/test_elastic.py` has this with an operator: a job is scaled up and down."""
    agents = [start_agent(worker, torch=True) for worker in range(2)]
    await start_training(coordinator, 1, workers=2)
    await until(lambda: step_of(coordinator, 1) >= 3, 150, lambda: agents[0].log)
    await paused(coordinator, agents, 1)
    first = saved_state(tmp_path)
    report = coordinator.last(0)
    assert report is not None
    assert report.checkpoint is not None
    assert report.checkpoint.step == first["step"] >= 3, "the ranks agreed on a step and saved it"
    assert AgentState.DRAINING not in coordinator.states(0) + coordinator.states(1)

    # Only worker 0 takes part; the agent of worker 1 waits, for as long as its pod lives.
    await start_training(coordinator, 2, workers=1)
    await until(lambda: step_of(coordinator, 2) > first["step"], 150, lambda: agents[0].log)
    assert resumed_after(agents[0], 2) == dict.fromkeys(range(2), first["step"])
    await paused(coordinator, agents[:1], 2)
    second = saved_state(tmp_path)["step"]
    assert second > first["step"]

    await start_training(coordinator, 3, workers=2, steps=second + 3)
    assert await asyncio.gather(*(agent.exit_code(120) for agent in agents)) == [0, 0]
    resumed = resumed_after(agents[0], 3) | resumed_after(agents[1], 3)
    assert resumed == dict.fromkeys(range(4), second)
    last = saved_state(tmp_path)
    assert (last["step"], last["samples"]) == (second + 3, 4 * (second + 3))
    assert last["digest"] == digest_of_steps(second + 3), "no sample was lost or repeated"
    assert all(agent.log.count("torch imported") == 1 for agent in agents), "one fork server for all generations"


@pytest.mark.long
@pytest.mark.slow
async def test_a_pause_stops_ranks_that_wait_for_their_peers(coordinator: Coordinator, start_agent: StartAgent) -> None:
    """By default, `test_pause_decisions` has that ranks without a step are killed."""
    agent = start_agent(torch=True)
    hellos = await coordinator.gang(1)
    # Worker 1 never comes, so the ranks of worker 0 wait in the rendezvous.
    absent = hellos[0].model_copy(update={"worker": 1, "address": "127.0.0.2"})
    coordinator.announce(mesh(1, training_run(LONG, tensor=2, data_parallel=2), [hellos[0], absent], 2))
    await reported(coordinator, AgentState.STARTING, 1)
    await until(lambda: len(agent.ranks_started()) == 2, 60, lambda: agent.log)
    await paused(coordinator, [agent], 1)
    await start_training(coordinator, 2, workers=1, steps=2)
    assert await agent.exit_code(60) == 0


async def test_a_paused_command_stops_and_the_next_generation_resumes_it(
    coordinator: Coordinator, start_agent: StartAgent
) -> None:
    agent = start_agent()
    await start_generation(coordinator, 1, SAVES)
    await until(lambda: agent.log.count("asleep") == 2, 60)
    coordinator.pause_ranks(7)  # the pause of another generation
    heard = len(coordinator.reports)
    await until(lambda: len(coordinator.reports) > heard + 2, 30)
    assert coordinator.states(0)[-1] is AgentState.RUNNING
    await paused(coordinator, [agent], 1)
    assert agent.log.count("saved") == 2
    heard = len(coordinator.reports)
    await until(lambda: len(coordinator.reports) > heard + 2, 30)  # each reply has the pause
    assert agent.log.count("saved") == 2
    await start_generation(coordinator, 2, "print('resumed')", ranks_each=3)
    assert await agent.exit_code() == 0
    assert agent.log.count("resumed") == 3
    assert coordinator.states(0)[-1] is AgentState.COMPLETE


@pytest.mark.long
async def test_a_command_that_does_not_stop_is_killed_after_the_drain_time(
    coordinator: Coordinator, start_agent: StartAgent
) -> None:
    """By default, `test_agent_commands` has such a command in a drain."""
    agent = start_agent(MESHWRIGHT_GRACE_SECONDS="6")
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
    await start_generation(coordinator, 1, deaf, ranks_each=1)
    await until(lambda: "asleep" in agent.log, 60)
    await paused(coordinator, [agent], 1)
    agent.terminate()
    assert await agent.exit_code(5) == 143


class Answers:
    """A coordinator's client that answers each poll as given: at once, or when the time is up."""

    def __init__(self, *at_once: bool) -> None:
        self._at_once = list(at_once)

    async def mesh(self, request: MeshRequest) -> MeshDocument | None:
        if not self._at_once:
            raise SupersededError
        if not self._at_once.pop(0):
            await asyncio.sleep(request.wait_seconds * 0.75)
        return None


@pytest.mark.parametrize(
    ("at_once", "reports"),
    [((True,), 1), ((False,), 0), ((False, True, False, True), 2)],
    ids=["early", "late", "both"],
)
async def test_the_agent_reports_after_a_poll_that_ended_early(
    monkeypatch: pytest.MonkeyPatch, at_once: tuple[bool, ...], reports: int
) -> None:
    monkeypatch.setattr(coordinator_link, "POLL_PAUSE_SECONDS", 0.0)
    request = MeshRequest(worker=0, incarnation=0, pod_uid="uid", address="10.0.0.1", store_port=2000, wait_seconds=1.0)
    early: list[None] = []
    client: Any = Answers(*at_once)
    await MeshPoll(client, lambda: request, asyncio.Queue(), 60.0, lambda: early.append(None)).run()
    assert len(early) == reports


class Open:
    """A coordinator's client whose first poll stays open; the second one ends the pod."""

    def __init__(self) -> None:
        self.requests: list[MeshRequest] = []
        self.cancelled = False

    async def mesh(self, request: MeshRequest) -> MeshDocument | None:
        self.requests.append(request)
        if len(self.requests) > 1:
            raise SupersededError
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return None


async def test_an_open_poll_is_sent_again_when_the_agent_is_prepared() -> None:
    preparing = True

    def request() -> MeshRequest:
        return MeshRequest(
            worker=0, incarnation=0, pod_uid="uid", address="10.0.0.1", store_port=2000, preparing=preparing
        )

    early: list[None] = []
    coordinator = Open()
    client: Any = coordinator
    poll = MeshPoll(client, request, asyncio.Queue(), 60.0, lambda: early.append(None))
    running = asyncio.create_task(poll.run())
    await until(lambda: coordinator.requests, 30)
    preparing = False
    poll.repeat()
    await asyncio.wait_for(running, 30)
    assert [one.preparing for one in coordinator.requests] == [True, False]
    assert coordinator.cancelled
    assert not early, "the coordinator has not asked for a report"


async def test_an_agent_says_when_it_has_imported_the_runtime(
    coordinator: Coordinator, start_agent: Callable[..., AgentProcess]
) -> None:
    agent = start_agent(torch=True)
    await until(lambda: 0 in coordinator.hellos, 60)
    await until(lambda: "ready to fork ranks" in agent.log, 120)
    await until(lambda: not coordinator.hellos[0].preparing, 10)
