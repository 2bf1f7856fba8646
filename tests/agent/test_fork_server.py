"""The fork server as a real process that forks real ranks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from meshwright.protocol.messages import FailureKind
from meshwright_worker.agent.events import Event, EventQueue, RankExited, RankMessageReceived
from meshwright_worker.agent.fork_client import ForkServerClient, ForkServerError
from meshwright_worker.agent.rank_process import RankHandle, supervise
from meshwright_worker.agent.server_process import ServerProcess
from meshwright_worker.rank import messages
from meshwright_worker.rank.task import Outcome, RankTask
from tests.agent.support import ROOT, alive, training_run, until
from tests.patience import patient

ENVIRONMENT = {"PYTHONPATH": f"{ROOT}:{ROOT / 'worker'}", "PATH": os.environ["PATH"]}
MODULE = "tests.agent.scripted_runtime"


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ForkServerClient]:
    fork_server = ForkServerClient(ENVIRONMENT, MODULE)
    await fork_server.start()
    yield fork_server
    await fork_server.stop()


def task(what: str, rank: int = 0) -> RankTask:
    return RankTask(training_run(5), 1, rank, 4, rank, 4, 0, "127.0.0.1", 20000, "127.0.0.1", None, what)


async def fork(server: ForkServerClient, what: str, rank: int = 0) -> RankHandle:
    return await server.fork(task(what, rank), {"RANK": str(rank)})


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Life:
    """A supervised rank: what it told, how it ended, what it printed."""

    def __init__(self, live: RankHandle) -> None:
        self.live = live
        self.inbox: EventQueue = asyncio.Queue()
        self.lines: list[str] = []
        self._task = asyncio.create_task(supervise(live, 1, self.inbox, self.lines.append))

    async def events(self) -> list[Event]:
        await asyncio.wait_for(self._task, patient(60))
        return [self.inbox.get_nowait() for _ in range(self.inbox.qsize())]

    async def told(self) -> list[messages.RankMessage]:
        return [event.message for event in await self.events() if isinstance(event, RankMessageReceived)]


async def test_events_come_in_order_and_the_end_comes_last(server: ForkServerClient) -> None:
    life = Life(await fork(server, "complete"))
    *told, end = await life.events()
    kinds = [event.message.kind for event in told if isinstance(event, RankMessageReceived)]
    assert kinds == ["phase", "running", *["step"] * 200, "finished"]
    assert end == RankExited(1, 0, 0, ("printed by 0 preloaded by parent True",), end.pid)
    assert life.lines == ["[rank 0] printed by 0 preloaded by parent True"]


async def test_garbage_is_collected_in_ranks_but_not_while_torch_is_imported(server: ForkServerClient) -> None:
    life = Life(await fork(server, "garbage"))
    await life.events()
    assert life.lines == ["[rank 0] collected: in preload False in rank True frozen True"]


async def test_what_a_run_needs_is_imported_before_its_ranks_are_forked(server: ForkServerClient) -> None:
    life = Life(await fork(server, "preloaded-for"))
    await life.events()
    assert life.lines == ["[rank 0] preloaded for [(True, 5)]"]


async def test_a_server_that_was_started_before_is_used() -> None:
    started = ServerProcess.start(ENVIRONMENT, MODULE)
    client = ForkServerClient(ENVIRONMENT, MODULE, started)
    await client.start()
    try:
        live = await fork(client, "run")
        assert parent_of(live.pid) == started.pid
        await client.start()
        assert started.running
    finally:
        await client.stop()
    assert not started.running


def test_the_server_is_started_before_anything_large_is_imported() -> None:
    code = (
        "import meshwright_worker.agent.server_process, sys; print(*sorted({n.partition('.')[0] for n in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert not {"aiohttp", "pydantic", "torch"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("what", "message"),
    [
        pytest.param("raise", "rank 2: LookupError: no such weight", marks=pytest.mark.long),
        ("base-exception", "rank 2: KeyboardInterrupt"),
    ],
)
async def test_an_exception_is_reported(server: ForkServerClient, what: str, message: str) -> None:
    life = Life(await fork(server, what, rank=2))
    *told, end = await life.events()
    assert [event.message for event in told if isinstance(event, RankMessageReceived)] == [
        messages.RankFailed(FailureKind.ERROR, message)
    ]
    assert isinstance(end, RankExited)
    assert end.code == 1
    assert any("Traceback" in line for line in life.lines)


async def test_sigterm_stops_but_never_kills(server: ForkServerClient) -> None:
    # Sent the very moment the process exists: it must neither be lost nor end the process.
    lives = [Life(await fork(server, "until-stopped", rank)) for rank in range(4)]
    for life in lives:
        life.live.terminate()
    for life in lives:
        *told, end = await life.events()
        assert isinstance(end, RankExited)
        assert end.code == 0
        assert isinstance(told[-1], RankMessageReceived)
        assert told[-1].message == messages.Finished(Outcome.STOPPED)


async def test_kill_and_silent_exit_are_reported_by_their_codes(server: ForkServerClient) -> None:
    killed = Life(await fork(server, "until-stopped"))
    killed.live.kill()
    end = (await killed.events())[-1]
    assert isinstance(end, RankExited)
    assert end.code == -signal.SIGKILL
    silent = Life(await fork(server, "exit"))
    assert await silent.told() == []


async def test_a_child_that_keeps_the_pipes_does_not_hold_up_the_end(server: ForkServerClient) -> None:
    life = Life(await fork(server, "leave-a-child"))
    assert (await life.told())[-1] == messages.Finished(Outcome.COMPLETE)
    child = int(life.lines[0].rpartition(" ")[2])
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


async def test_a_server_that_cannot_load_the_runtime_says_why() -> None:
    broken = ForkServerClient(ENVIRONMENT, "tests.agent.broken_runtime")
    with pytest.raises(ForkServerError, match=r"the fork server exited: OSError: libcudart\.so\.12: cannot open"):
        await broken.ready()
    await broken.stop()


async def test_a_server_that_never_begins_says_how_it_ended() -> None:
    unable = ForkServerClient({**ENVIRONMENT, "PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere"}, MODULE)
    with pytest.raises(ForkServerError, match="the fork server exited: exit code 1"):
        await unable.ready()
    await unable.stop()


async def test_ranks_die_with_a_killed_server_and_the_next_one_works(server: ForkServerClient) -> None:
    lives = [Life(await fork(server, "until-stopped", rank)) for rank in range(2)]
    os.kill(parent_of(lives[0].live.pid), signal.SIGKILL)
    for life in lives:
        end = (await life.events())[-1]
        assert isinstance(end, RankExited)
        assert end.code == -signal.SIGKILL
    await until(lambda: not any(alive(life.live.pid) for life in lives), 60)
    assert (await Life(await fork(server, "complete")).told())[-1] == messages.Finished(Outcome.COMPLETE)


async def test_a_stopped_server_leaves_nothing(server: ForkServerClient) -> None:
    lives = [Life(await fork(server, "until-stopped", rank)) for rank in range(2)]
    await server.stop()
    await until(lambda: not any(alive(life.live.pid) for life in lives), 60)


async def test_everything_dies_with_a_killed_owner(tmp_path: Path) -> None:
    """The owner is killed, so nothing runs in it; only the kernel is left to clean up."""
    script = f"""
import asyncio
from meshwright_worker.agent.fork_client import ForkServerClient
from tests.agent.test_fork_server import ENVIRONMENT, MODULE, task
async def main():
    server = ForkServerClient(ENVIRONMENT, MODULE)
    lives = [await server.fork(task("until-stopped", rank), {{}}) for rank in range(2)]
    open({str(tmp_path / "pids")!r} + ".part", "w").write(" ".join(str(live.pid) for live in lives))
    __import__("os").rename({str(tmp_path / "pids")!r} + ".part", {str(tmp_path / "pids")!r})
    await asyncio.sleep(600)
asyncio.run(main())
"""
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", script, env=ENVIRONMENT, cwd=ROOT)
    await until((tmp_path / "pids").exists, 60)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(alive(pid) for pid in pids)
    owner.kill()
    await owner.wait()
    await until(lambda: not any(alive(pid) for pid in pids), 60)
