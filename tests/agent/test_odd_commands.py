"""Commands that a user's image may have and that do what no training should: the agent takes each for what it is."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.api import labels
from meshwright_worker.agent.events import Event, ProgressLogged, RankExited, RankMessageReceived
from meshwright_worker.agent.rank_process import MAX_LINE, RankHandle, start_command, supervise
from meshwright_worker.command.error_file import VARIABLE, recorded_error
from meshwright_worker.command.log_patterns import LogPatterns
from meshwright_worker.command.report_line import ReportLineError, parse_report
from meshwright_worker.command.saved_checkpoints import LIST_NAME, SavedCheckpoints
from meshwright_worker.rank.messages import AtWork, StepDone
from meshwright_worker.rank.task import Work
from tests.patience import patient

DEEP = '{"message":' * 50_000


class Run:
    """A command, its lines in the pod's log, and how it ended."""

    def __init__(self, *command: str, **environment: str) -> None:
        self.command = command
        self.environment = {"PATH": os.environ["PATH"], **environment}
        self.lines: list[str] = []
        self.inbox: asyncio.Queue[Event] = asyncio.Queue()
        self.handle: RankHandle | None = None

    async def start(self) -> asyncio.Task[None]:
        self.handle = await start_command(3, self.command, self.environment)
        return asyncio.create_task(supervise(self.handle, 1, self.inbox, self.lines.append))

    async def end(self) -> RankExited:
        await asyncio.wait_for(await self.start(), patient(60))
        return self.exited()

    def exited(self) -> RankExited:
        events = [self.inbox.get_nowait() for _ in range(self.inbox.qsize())]
        assert isinstance(events[-1], RankExited)
        return events[-1]


def shell(script: str, **environment: str) -> Run:
    return Run("sh", "-c", script, **environment)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 3", 3),
        ("kill -SEGV $$", -signal.SIGSEGV),
        ("kill -KILL $$", -signal.SIGKILL),
        ("exec 1>&- 2>&-; sleep 0.2; exit 4", 4),
        ("cat; exit 5", 5),
        ("cd /; umask 777; unset PATH; exit 6", 6),
        ("trap '' HUP INT; kill -HUP $$; kill -INT $$; exit 7", 7),
    ],
)
async def test_a_command_ends_as_it_ended(script: str, code: int) -> None:
    before = os.getcwd(), os.umask(0o022)
    os.umask(before[1])
    assert (await shell(script).end()).code == code
    assert os.getcwd() == before[0]


async def test_a_command_that_cannot_start_says_why(tmp_path: Path) -> None:
    garbage, text = tmp_path / "garbage", tmp_path / "text"
    garbage.write_bytes(b"\x7fNOT an executable\0" * 10)
    garbage.chmod(0o755)
    text.write_text("echo hello\n")
    for command, code, told in (
        (("no-such-command", "x"), 127, "cannot start 'no-such-command': No such file or directory"),
        ((str(garbage),), 126, "Exec format error"),
        ((str(text),), 126, "Permission denied"),
        ((str(tmp_path),), 126, "Permission denied"),
    ):
        exited = await Run(*command).end()
        assert (exited.code, exited.tail[-1].endswith(told)) == (code, True), exited.tail


async def test_binary_output_and_a_line_without_an_end_are_cut_into_lines() -> None:
    program = "import os, sys; sys.stdout.buffer.write(os.urandom(1 << 20) + b'x' * (3 << 20))"
    run = Run(sys.executable, "-c", program)
    exited = await run.end()
    assert exited.code == 0
    assert len(exited.tail) == 40
    # A byte that is no UTF-8 becomes one character.
    assert max(map(len, run.lines)) <= 2 * MAX_LINE
    assert sum(line.count("x") for line in run.lines) >= 3 << 20
    assert run.handle is not None
    assert len(run.handle.written.log.text()) < 1 << 17


async def test_a_flood_of_output_stops_neither_the_command_nor_the_agent() -> None:
    program = (
        "import sys\nfor _ in range(400): sys.stdout.buffer.write((b'step without a number ' * 4 + b'\\n') * 1000)"
    )
    run = Run(sys.executable, "-c", program)
    task = await run.start()
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert run.exited().code == 0
    assert len(run.lines) == 400_000
    assert turns > 100, "the agent sends heartbeats meanwhile"


async def test_daemons_end_with_their_command(tmp_path: Path) -> None:
    left = tmp_path / "pid"
    script = f"setsid sh -c 'trap \"\" TERM HUP; echo $$ > {left}; sleep 1000' >/dev/null 2>&1 & "
    run = shell(script + f"while ! test -s {left}; do sleep 0.05; done; exit 0")
    assert (await run.end()).code == 0
    assert gone(int(left.read_text()))


async def test_a_command_that_ignores_signals_is_killed_with_what_it_started(tmp_path: Path) -> None:
    left = tmp_path / "pid"
    run = shell(f"trap '' TERM INT HUP; sleep 1000 & echo $! > {left}; echo ready; while :; do sleep 0.1; done")
    task = await run.start()
    deadline = time.monotonic() + patient(30)
    while not run.lines:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert run.handle is not None
    run.handle.terminate()
    await asyncio.sleep(0.3)
    assert not task.done()
    run.handle.kill()
    await asyncio.wait_for(task, patient(30))
    assert run.exited().code == -signal.SIGKILL
    assert gone(int(left.read_text()))


@pytest.mark.parametrize("kind", ["deep", "pipe", "directory", "large"])
async def test_an_odd_error_file_does_not_stop_the_agent(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_text(DEEP if kind == "deep" else "x" * (2 << 20))
    found = await asyncio.wait_for(asyncio.to_thread(recorded_error, path), patient(20))
    assert found == []
    assert (await shell("echo last; exit 9", **{VARIABLE: str(path)}).end()).tail == ("last",)


async def test_a_report_file_full_of_garbage_reports_what_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "reports"
    script = f"head -c 300000 /dev/urandom > {path}; echo > {path}; echo '{{\"step\": 5}}' > {path}"
    run = shell(script, **{labels.ENV_REPORT_FILE: str(path)})
    task = await run.start()
    await asyncio.wait_for(task, patient(30))
    events = [run.inbox.get_nowait() for _ in range(run.inbox.qsize())]
    told = [event.message for event in events if isinstance(event, RankMessageReceived)]
    assert [message.report.step for message in told if isinstance(message, StepDone)] == [5]


async def test_a_load_in_the_report_file_leaves_the_search_of_the_log_on(tmp_path: Path) -> None:
    path = tmp_path / "reports"
    load = '{"work": "weights", "done": 3, "total": 9, "seconds": 2}'
    run = shell(f"echo '{load}' > {path}; sleep 0.5; echo 'step 7/9 loss=3.5'", **{labels.ENV_REPORT_FILE: str(path)})
    handle = await start_command(3, run.command, run.environment)
    await asyncio.wait_for(
        supervise(replace(handle, patterns=LogPatterns(None)), 1, run.inbox, run.lines.append), patient(30)
    )
    events = [run.inbox.get_nowait() for _ in range(run.inbox.qsize())]
    told = [event.message for event in events if isinstance(event, RankMessageReceived)]
    assert told == [AtWork(Work("weights", 3, 9, 1, 1, 2.0))]
    assert [event.report.step for event in events if isinstance(event, ProgressLogged)] == [7]


@pytest.mark.parametrize("path", ["a\0b", "a\nb", "\x1b[2J"])
def test_a_path_of_a_checkpoint_has_no_control_characters(path: str) -> None:
    with pytest.raises(ReportLineError, match="`checkpoint`"):
        parse_report(json.dumps({"step": 1, "checkpoint": path}).encode())
    assert parse_report(json.dumps({"step": 1, "checkpoint": "schöner/пут 1"}).encode()).checkpoint == "schöner/пут 1"


async def test_a_damaged_list_of_checkpoints_is_replaced_however_it_is_damaged(tmp_path: Path) -> None:
    (tmp_path / LIST_NAME).write_text("[" * 100_000)
    assert await SavedCheckpoints(tmp_path, None, 1, {}).accept(1, "one")
    assert "one" in (tmp_path / LIST_NAME).read_text()


async def test_a_verification_that_writes_much_is_not_kept_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = "import sys\nfor _ in range(64): sys.stdout.write('x' * (1 << 20))\nprint('the end'); sys.exit(1)"
    before = _memory()
    verify = [sys.executable, "-c", program]
    assert not await SavedCheckpoints(tmp_path, verify, None, dict(os.environ)).accept(1, "one")
    assert _memory() - before < 32 << 10, "KiB"
    assert caplog.records[-1].getMessage().endswith("the end")


def _memory() -> int:
    """The most memory that this process had, in KiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.long), "utf-16"])
def test_the_log_takes_every_character_whatever_the_image_says(encoding: str) -> None:
    text = "[rank 0] Verlust 1 \\u2264 2 \\ufffd \\ud800"
    program = f"from meshwright_worker.agent.launcher import write_line; write_line('{text}')"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=False, timeout=patient(60)
    )
    assert found.returncode == 0, found.stderr
    assert "[rank 0] Verlust 1 ≤ 2 \ufffd ?\n".encode() == found.stdout
