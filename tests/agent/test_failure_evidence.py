"""What an agent records of ranks that fail or hang: on the volume, and in its reports."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.api import labels
from meshwright.protocol.messages import AgentState, FailureEvidence
from meshwright_worker.agent.failure_evidence import MAX_HUNG_WORKER, EvidenceRecorder
from meshwright_worker.agent.fork_client import ForkServerClient
from meshwright_worker.agent.rank_process import RankOutput
from meshwright_worker.evidence.record import LOG_FILE, RECORD_FILE
from meshwright_worker.rank.messages import Running
from tests.agent.support import Coordinator, mesh, until
from tests.agent.test_agent_commands import SLEEP, StartAgent, python, reported, start_generation
from tests.agent.test_fork_server import ENVIRONMENT, MODULE, Life, fork
from tests.agent.test_parts import settings
from tests.agent.test_state_machine import Driver, document
from tests.runs import command_run

RAISES = """
import os, sys, time
if os.environ["RANK"] == "0":
    time.sleep(600)
print("connecting with", os.environ["WANDB_API_KEY"], "and", os.environ["STORE"])
for number in range(20000):
    print("line", number)
raise LookupError("no such shard in s3://user:pa55word@bucket")
"""
HANGS = """
import time
def waits_for_a_peer_that_is_gone():
    print("stuck", flush=True)
    while True:
        time.sleep(1)
waits_for_a_peer_that_is_gone()
"""


def recorded(directory: Path, generation: int, rank: int) -> dict[str, str]:
    """The files of a record, once it is complete."""
    path = directory / "checkpoints" / "failures" / f"generation-{generation:08d}-rank-{rank:05d}"
    return {file.name: file.read_text() for file in path.iterdir()} if path.is_dir() else {}


def evidence(coordinator: Coordinator) -> FailureEvidence | None:
    report = coordinator.last(0)
    return report.evidence if report is not None else None


async def test_a_rank_that_raises_leaves_its_log_without_secrets(
    coordinator: Coordinator, start_agent: StartAgent, tmp_path: Path
) -> None:
    secrets = {"WANDB_API_KEY": "0123abcd4567", "STORE": "plain-looking", labels.ENV_SECRET_VARIABLES: "STORE"}
    start_agent(**secrets)
    await start_generation(coordinator, 1, RAISES)
    await reported(coordinator, AgentState.FAILED, 1)
    await until(lambda: recorded(tmp_path, 1, 1), 30)
    assert not recorded(tmp_path, 1, 0), "only the rank that failed by itself is recorded"
    files = recorded(tmp_path, 1, 1)
    record = json.loads(files[RECORD_FILE])
    assert (record["rank"], record["worker"], record["exit_code"], record["kind"]) == (1, 0, 1, "Error")
    assert "LookupError: no such shard in s3://***@bucket" in files[LOG_FILE]
    assert "line 19999\n" in files[LOG_FILE]
    assert "line 100\n" not in files[LOG_FILE]
    assert len(files[LOG_FILE].encode()) <= 65536
    found = evidence(coordinator)
    assert found is not None
    assert (found.generation, found.rank) == (1, 1)
    assert found.log.rstrip().endswith("LookupError: no such shard in s3://***@bucket")
    assert len(found.log) <= 3072
    assert found.path.endswith("failures/generation-00000001-rank-00001")
    everything = json.dumps([report.wire() for report in coordinator.reports]) + "".join(files.values())
    for secret in ("0123abcd4567", "plain-looking", "pa55word"):
        assert secret not in everything


async def test_a_rank_that_is_killed_leaves_its_log(
    coordinator: Coordinator, start_agent: StartAgent, tmp_path: Path
) -> None:
    agent = start_agent()
    await start_generation(coordinator, 1, SLEEP)
    await until(lambda: agent.log.count("] asleep") == 2, 30, lambda: agent.log)
    os.kill(agent.ranks_started()[0][2], signal.SIGKILL)
    await until(lambda: recorded(tmp_path, 1, 0), 30, lambda: agent.log)
    files = recorded(tmp_path, 1, 0)
    assert files[LOG_FILE] == "asleep\n"
    assert json.loads(files[RECORD_FILE])["exit_code"] == -signal.SIGKILL


async def test_a_rank_that_hangs_leaves_its_stacks(
    coordinator: Coordinator, start_agent: StartAgent, tmp_path: Path
) -> None:
    agent = start_agent()
    await start_generation(coordinator, 1, HANGS)
    await until(lambda: agent.log.count("] stuck") == 2, 30, lambda: agent.log)
    hellos = await coordinator.gang(1, above=1)
    run = command_run(python("print('done')"), 2)
    coordinator.announce(mesh(2, run, hellos, 2).model_copy(update={"hung_rank": 1}))
    assert await agent.exit_code() == 0
    files = recorded(tmp_path, 1, 1)
    assert "waits_for_a_peer_that_is_gone" in files[LOG_FILE]
    assert json.loads(files[RECORD_FILE])["kind"] == "Hang"
    found = evidence(coordinator)
    assert found is not None
    assert (found.generation, found.rank, found.kind) == (1, 1, "Hang")


async def test_another_generation_records_nothing_if_no_rank_hung(
    coordinator: Coordinator, start_agent: StartAgent, tmp_path: Path
) -> None:
    agent = start_agent()
    await start_generation(coordinator, 1, HANGS)
    await until(lambda: agent.log.count("] stuck") == 2, 30, lambda: agent.log)
    await start_generation(coordinator, 2, "print('done')")
    assert await agent.exit_code() == 0
    assert not (tmp_path / "checkpoints" / "failures").exists()
    assert evidence(coordinator) is None


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGSEGV])
async def test_ranks_of_the_runtime_write_their_stacks_apart_from_their_log(number: int) -> None:
    server = ForkServerClient(ENVIRONMENT, MODULE)
    await server.start()
    try:
        handle = await fork(server, "wait")
        life = Life(handle)
        await until(lambda: not life.inbox.empty(), 30)
        if number == signal.SIGUSR2:
            handle.dump_stacks()
            await until(lambda: "in train" in handle.written.stacks.text(), 30)
            handle.terminate()
        else:
            os.kill(handle.pid, number)
        await life.events()
        assert 'scripted_runtime.py", line' in handle.written.stacks.text()
        assert handle.written.log.text() == ""
        assert any("in train" in line for line in life.lines), "the pod's log has them too"
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("worker", "named", "expected", "reported_rank"),
    [
        (0, None, [0], 0),
        (0, 1, [0, 1], 1),
        (MAX_HUNG_WORKER - 1, None, [0], 0),
        (MAX_HUNG_WORKER, None, [], None),
        (MAX_HUNG_WORKER, 1, [1], 1),
    ],
)
async def test_of_many_workers_only_the_first_record_ranks_that_wait(
    tmp_path: Path, worker: int, named: int | None, expected: list[int], reported_rank: int | None
) -> None:
    """Rank 0 has not begun to train, rank 1 has. Worker 0 has both, here under another number."""
    driver = Driver(worker=0)
    driver.start(document())
    driver.tell(1, Running(0))
    current = driver.state_machine.current
    assert current is not None
    recorder = EvidenceRecorder(replace(settings(), worker=worker, checkpoint_dir=tmp_path), {})
    recorder.ranks_hung(current, lambda rank: RankOutput(), driver.now, named)
    await recorder.flush()
    found = sorted(path.name for path in (tmp_path / "failures").glob("*")) if expected else []
    assert found == [f"generation-00000001-rank-{rank:05d}" for rank in expected]
    latest = recorder.for_report(driver.now)
    assert (latest.rank if latest is not None else None) == reported_rank
