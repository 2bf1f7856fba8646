"""Real agents that run a user's command, against a real coordinator."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.protocol.messages import AgentState, FailureKind
from tests.agent.support import AgentProcess, Coordinator, alive, mesh, until
from tests.patience import patient
from tests.runs import command_run

StartAgent = Callable[..., AgentProcess]

ALL_REDUCE = """
import os, sys
sys.modules.pop("torch", None)  # the agents have none, which makes them begin sooner
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((4,), float(os.environ["RANK"]))
dist.all_reduce(x)
print("sum", x[0].item(), "coordinates", os.environ["MESHWRIGHT_DATA_PARALLEL_RANK"])
assert "MESHWRIGHT_TOKEN" not in os.environ
dist.destroy_process_group()
"""
SLEEP = "import time, sys; print('asleep', flush=True); time.sleep(600)"


def python(source: str) -> list[str]:
    return [sys.executable, "-c", source]


async def start_generation(
    coordinator: Coordinator, number: int, source: str, *, workers: int = 1, ranks_each: int = 2
) -> None:
    hellos = await coordinator.gang(workers, above=number - 1)
    coordinator.announce(mesh(number, command_run(python(source), workers * ranks_each), hellos, ranks_each))


async def reported(coordinator: Coordinator, state: AgentState, generation: int, worker: int = 0) -> None:
    def there() -> bool:
        report = coordinator.last(worker)
        return report is not None and report.state is state and report.generation == generation

    await until(there, 30, lambda: f"{coordinator.last(worker)}")


@pytest.mark.slow
async def test_two_pods_start_and_complete(coordinator: Coordinator, start_agent: StartAgent) -> None:
    agents = [start_agent(worker) for worker in range(2)]
    await start_generation(coordinator, 1, ALL_REDUCE, workers=2, ranks_each=1)
    assert [await agent.exit_code(60) for agent in agents] == [0, 0]
    for rank, agent in enumerate(agents):
        assert f"[rank {rank}] sum 1.0 coordinates {rank}" in agent.log
        assert coordinator.states(agent.worker)[-1] is AgentState.COMPLETE


async def test_a_killed_rank_fails_the_generation_and_the_next_one_works(
    coordinator: Coordinator, start_agent: StartAgent
) -> None:
    agent = start_agent()
    await start_generation(coordinator, 1, SLEEP)
    await reported(coordinator, AgentState.RUNNING, 1)
    (_, _, first), (_, _, second) = agent.ranks_started()
    below = agent.processes()
    os.kill(second, signal.SIGKILL)
    await reported(coordinator, AgentState.FAILED, 1)
    report = coordinator.last(0)
    assert report is not None
    assert report.failure is FailureKind.ERROR
    assert "rank 1 was killed by SIGKILL" in report.message
    assert {process.rank for process in report.ranks} == {0, 1}
    assert all(process.exit_code is not None for process in report.ranks)
    await until(lambda: not any(alive(pid) for pid in below - {agent.process.pid}), 60)
    assert not alive(first)

    await start_generation(coordinator, 2, "print('done')")
    assert await agent.exit_code() == 0
    assert [(rank, generation) for rank, generation, _ in agent.ranks_started()] == [(0, 1), (1, 1), (0, 2), (1, 2)]


async def test_the_message_is_the_exception(coordinator: Coordinator, start_agent: StartAgent) -> None:
    start_agent()
    await start_generation(coordinator, 1, "raise KeyError('weights')", ranks_each=1)
    await reported(coordinator, AgentState.FAILED, 1)
    report = coordinator.last(0)
    assert report is not None
    assert report.message == "rank 0 exited with code 1: KeyError: 'weights'"


RECORDS = """
import json, os, sys
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    json.dump({"message": {"message": "KeyError: 'rank " + os.environ["RANK"] + "'", "extraInfo": {}}}, file)
sys.exit(1)
"""
TORCH_RECORDS = """
import os, sys
from torch.distributed.elastic.multiprocessing.errors import record
sys.excepthook = lambda *_: None
@record
def main():
    raise KeyError("rank " + os.environ["RANK"])
main()
"""


@pytest.mark.parametrize(
    ("source", "torch"),
    [(RECORDS, False), pytest.param(TORCH_RECORDS, True, marks=[pytest.mark.slow, pytest.mark.long])],
    ids=["in torch's format", "with torch"],
)
async def test_the_message_is_the_error_that_the_script_records(
    coordinator: Coordinator, start_agent: StartAgent, source: str, *, torch: bool
) -> None:
    start_agent(torch=torch)
    await start_generation(coordinator, 1, source, ranks_each=1)
    await reported(coordinator, AgentState.FAILED, 1)
    report = coordinator.last(0)
    assert report is not None
    assert report.message == "rank 0 exited with code 1: KeyError: 'rank 0'"


@pytest.mark.long
async def test_a_command_that_does_not_exist_is_reported(coordinator: Coordinator, start_agent: StartAgent) -> None:
    start_agent()
    hellos = await coordinator.gang(1)
    coordinator.announce(mesh(1, command_run(["no-such-program"], 1), hellos, 1))
    await reported(coordinator, AgentState.FAILED, 1)
    report = coordinator.last(0)
    assert report is not None
    assert "code 127: cannot start 'no-such-program': No such file" in report.message


async def test_nothing_survives_a_killed_agent(coordinator: Coordinator, start_agent: StartAgent) -> None:
    agent = start_agent()
    # A child in a session of its own, such as a daemon has, is no reason to stay.
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}], start_new_session=True)"
    await start_generation(coordinator, 1, nested)
    await until(lambda: agent.log.count("asleep") == 2, 60, lambda: agent.log)
    family = agent.processes()
    assert len(family) == 1 + 2 * 3  # per rank: the guard, the command, the command's child
    agent.process.kill()
    await until(lambda: not any(alive(pid) for pid in family), 60)


@pytest.mark.long
async def test_what_a_finished_command_leaves_behind_is_ended(
    coordinator: Coordinator, start_agent: StartAgent
) -> None:
    agent = start_agent()
    daemon = f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)"
    await start_generation(coordinator, 1, f"import subprocess, sys; print('child', {daemon}.pid)", ranks_each=1)
    assert await agent.exit_code() == 0
    assert not alive(int(agent.log.rpartition("child ")[2].split()[0]))


async def test_a_new_generation_replaces_ranks_that_hang(coordinator: Coordinator, start_agent: StartAgent) -> None:
    agent = start_agent()
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
    await start_generation(coordinator, 1, deaf, ranks_each=1)
    await until(lambda: "asleep" in agent.log, 60)
    old = agent.processes() - {agent.process.pid}
    await start_generation(coordinator, 2, SLEEP, ranks_each=1)
    await reported(coordinator, AgentState.RUNNING, 2)
    assert not any(alive(pid) for pid in old)


async def test_sigterm_drains(coordinator: Coordinator, start_agent: StartAgent) -> None:
    agent = start_agent()
    saves = (
        """
import signal, sys, time
def save(*_):
    time.sleep(0.5); print("saved", flush=True); sys.exit(143)
signal.signal(signal.SIGTERM, save)
"""
        + SLEEP
    )
    await start_generation(coordinator, 1, saves)
    await until(lambda: agent.log.count("asleep") == 2, 60)
    agent.terminate()
    agent.terminate()
    assert await agent.exit_code() == 143
    assert agent.log.count("saved") == 2
    assert coordinator.states(0)[-1] is AgentState.DRAINING


async def test_a_drain_ends_before_the_grace_period(coordinator: Coordinator, start_agent: StartAgent) -> None:
    agent = start_agent(MESHWRIGHT_GRACE_SECONDS="6")
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
    await start_generation(coordinator, 1, deaf, ranks_each=1)
    await until(lambda: "asleep" in agent.log, 60)
    agent.terminate()
    assert await agent.exit_code(6.0) == 143


async def test_stopped_elsewhere_means_idle(coordinator: Coordinator, start_agent: StartAgent) -> None:
    agent = start_agent()
    await start_generation(coordinator, 1, "import sys; sys.exit(143)")
    await reported(coordinator, AgentState.IDLE, 1)
    await start_generation(coordinator, 2, "print('resumed')")
    assert await agent.exit_code() == 0


async def test_ranks_continue_while_the_coordinator_is_unavailable(
    coordinator: Coordinator, start_agent: StartAgent
) -> None:
    agent = start_agent()
    ticks = "import time\nfor i in range(600): print('tick', i, flush=True); time.sleep(0.1)"
    await start_generation(coordinator, 1, ticks, ranks_each=1)
    await reported(coordinator, AgentState.RUNNING, 1)
    await coordinator.stop()
    heard, seen = len(coordinator.reports), agent.log.count("tick")
    await until(lambda: agent.log.count("tick") > seen + 10, 60, lambda: agent.log)
    await coordinator.start()
    await until(lambda: len(coordinator.reports) > heard, 60)
    assert len(agent.ranks_started()) == 1
    await start_generation(coordinator, 2, "print('done')", ranks_each=1)
    assert await agent.exit_code() == 0


@pytest.mark.parametrize("with_ranks", [pytest.param(False, marks=pytest.mark.long), True])
async def test_superseded(coordinator: Coordinator, start_agent: StartAgent, *, with_ranks: bool) -> None:
    agent = start_agent()
    await coordinator.gang(1)
    if with_ranks:
        await start_generation(coordinator, 1, SLEEP)
        await until(lambda: agent.log.count("asleep") == 2, 60)
    family = agent.processes()
    coordinator.answer_all(410)
    assert await agent.exit_code(10) == 143
    await until(lambda: not any(alive(pid) for pid in family), 60)


@pytest.mark.parametrize("status", [401, pytest.param(404, marks=pytest.mark.long)])
async def test_rejected_for_long(coordinator: Coordinator, start_agent: StartAgent, status: int) -> None:
    coordinator.answer_all(status)
    agent = start_agent(MESHWRIGHT_REJECT_SECONDS="1.5")
    assert await agent.exit_code(15) == 1
    assert f"rejected this pod for 1.5 s: {status}" in agent.log


async def test_rejected_for_a_moment(coordinator: Coordinator, start_agent: StartAgent) -> None:
    coordinator.answer_all(404)
    agent = start_agent(MESHWRIGHT_REJECT_SECONDS="600")
    await until(lambda: any(len(moments) > 2 for moments in coordinator.asked.values()), 60, lambda: agent.log)
    coordinator.answer_all(None)
    await start_generation(coordinator, 1, "print('done')")
    assert await agent.exit_code() == 0


async def test_a_report_that_was_overtaken_is_followed_by_the_newest_state(
    coordinator: Coordinator, start_agent: StartAgent
) -> None:
    """409 is what the coordinator says to a request that a later one of the same pod overtook: ranks go on."""
    agent = start_agent()
    await start_generation(coordinator, 1, SLEEP, ranks_each=1)
    await until(lambda: agent.log.count("asleep") == 1, 60)
    coordinator.answer_all(409)
    await asyncio.sleep(0.5)
    coordinator.answer_all(None)
    heard = len(coordinator.reports)
    await until(lambda: len(coordinator.reports) > heard, 60)
    assert len(agent.ranks_started()) == 1
    assert coordinator.problems == [], "and none is older than one before it"


async def test_sigterm_while_waiting_for_the_gang(coordinator: Coordinator, start_agent: StartAgent) -> None:
    agent = start_agent()
    await coordinator.gang(1)
    agent.terminate()
    assert await agent.exit_code(5) == 143


def test_a_missing_variable_is_named(coordinator: Coordinator, start_agent: StartAgent, tmp_path: Path) -> None:
    agent = start_agent(MESHWRIGHT_JOB_UID="")
    assert agent.process.wait(patient(10)) == 2
    assert agent.log == "MESHWRIGHT_JOB_UID is not set: the operator sets it in the worker pod's environment\n"


REPORTS = """
import json, os, time
with open(os.environ["MESHWRIGHT_REPORT_FILE"], "a", buffering=1) as report:
    report.write("no JSON\\n{\\n")
    report.write(json.dumps({"step": 1, "loss": 3.0, "tokens": 100, "total_steps": 9}) + "\\n")
    time.sleep(0.2)
    print("step 77 loss 1.0", flush=True)
    report.write(json.dumps({"step": 3, "loss": 2.5, "tokens": 100, "checkpoint": "/c/3"}) + "\\n")
    time.sleep(0.2)
    os.system("echo '{\\"step\\": 4}' >> $MESHWRIGHT_REPORT_FILE")
"""


async def test_a_command_reports_its_progress_in_its_file(coordinator: Coordinator, start_agent: StartAgent) -> None:
    agent = start_agent()
    await start_generation(coordinator, 1, REPORTS)
    assert await agent.exit_code() == 0
    report = coordinator.last(0)
    assert report is not None
    assert report.progress is not None
    assert (report.progress.step, report.progress.loss, report.progress.total_steps) == (4, 2.5, 9)
    assert report.progress.tokens_per_second > 0
    assert report.checkpoint is not None
    assert (report.checkpoint.step, report.checkpoint.path) == (3, "/c/3")
    assert [process.step for process in report.ranks] == [4, 4]
    assert agent.log.count("invalid line to its report file") == 2, "once for each rank"


async def test_a_loss_that_is_not_a_number_replaces_the_one_before(
    coordinator: Coordinator, start_agent: StartAgent
) -> None:
    agent = start_agent()
    lines = ('{"step": 1, "loss": 2.5}', '{"step": 2, "loss": NaN}', '{"step": 3}')
    write = "; time.sleep(0.1); ".join(f"report.write({line + chr(10)!r})" for line in lines)
    opened = "report = open(os.environ['MESHWRIGHT_REPORT_FILE'], 'a', buffering=1)"
    await start_generation(coordinator, 1, f"import os, time; {opened}; {write}")
    assert await agent.exit_code() == 0
    report = coordinator.last(0)
    assert report is not None
    assert report.progress is not None
    assert (report.progress.step, report.progress.has_loss) == (3, False)


async def test_progress_is_found_in_the_log_of_a_command(coordinator: Coordinator, start_agent: StartAgent) -> None:
    agent = start_agent()
    await start_generation(coordinator, 1, "print('step 12/100 loss 3.6'); print('step 13/100 loss 3.4')")
    assert await agent.exit_code() == 0
    report = coordinator.last(0)
    assert report is not None
    assert report.progress is not None
    assert (report.progress.step, report.progress.loss, report.progress.total_steps) == (13, 3.4, 100)
    assert [process.step for process in report.ranks] == [None, None], "the log is no proof of progress"
