"""What the agent reads of a process: long events, and pipes that others keep open."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from meshwright_worker.agent.events import Event, OutputWritten, RankExited, RankMessageReceived
from meshwright_worker.agent.rank_process import OutputPump, RankHandle, command_state, open_pipe, supervise
from meshwright_worker.rank import messages
from meshwright_worker.rank.task import ExpertLoad, Outcome, StepReport
from tests.patience import patient

THIRD = 1 / 3


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def nothing() -> None:
    """What is not asked for here."""


async def test_a_step_of_a_thousand_mixtures_is_read() -> None:
    loads = tuple(ExpertLoad(layer, 1 + THIRD, THIRD / 100, 1 + THIRD, THIRD) for layer in range(1024))
    report = StepReport(1, 2 + THIRD, 1 + THIRD, 3e-4, 4096, 8, THIRD, THIRD, experts=loads)
    said = [messages.StepDone(report), messages.Finished(Outcome.COMPLETE)]
    inbox: asyncio.Queue[Event] = asyncio.Queue()
    output, output_write = await open_pipe()
    events, events_write = await open_pipe()
    os.close(output_write)

    def write() -> None:
        with os.fdopen(events_write, "wb") as pipe:
            pipe.writelines(messages.encode(message) for message in said)

    written = asyncio.create_task(asyncio.to_thread(write))

    async def wait() -> int:
        await written
        return 0

    await supervise(RankHandle(0, 1, wait, nothing, nothing, output, events), 1, inbox, lambda _: None)
    told = [inbox.get_nowait() for _ in range(3)]
    assert told[:2] == [RankMessageReceived(1, 0, message) for message in said]
    assert isinstance(told[2], RankExited)


async def test_a_child_that_keeps_the_output_open_keeps_no_descriptor_of_ours() -> None:
    before = descriptors()
    inbox: asyncio.Queue[Event] = asyncio.Queue()
    lines: list[str] = []
    output, write = await open_pipe()
    process = await asyncio.create_subprocess_exec("sh", "-c", "sleep 5 & echo left", stdout=write, stderr=write)
    os.close(write)
    await supervise(RankHandle(0, process.pid, process.wait, nothing, nothing, output, None), 1, inbox, lines.append)
    await asyncio.sleep(0)
    assert any("left" in line for line in lines)
    assert descriptors() <= before


async def test_output_of_a_command_is_an_event() -> None:
    inbox: asyncio.Queue[Event] = asyncio.Queue()
    output, write = await open_pipe()
    process = await asyncio.create_subprocess_exec("sh", "-c", "echo one; echo two", stdout=write, stderr=write)
    os.close(write)
    await supervise(RankHandle(3, process.pid, process.wait, nothing, nothing, output, None), 7, inbox, lambda _: None)
    assert inbox.get_nowait() == OutputWritten(7, 3)


def test_a_thousand_lines_are_one_event() -> None:
    events: list[str] = []
    pump = OutputPump(0, lambda _: None, lambda: events.append("output"))
    for _ in range(1000):
        pump.feed(b"x\n")
    assert len(events) < 1000


def test_the_state_of_a_command_is_that_of_the_child_of_its_guard() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 600; true"]) as guard:
        children = Path(f"/proc/{guard.pid}/task/{guard.pid}/children")
        wait_for(lambda: bool(children.read_text().split()))
        child = int(children.read_text().split()[0])
        os.kill(child, signal.SIGSTOP)
        wait_for(lambda: command_state(guard.pid) == "T")
        os.kill(child, signal.SIGKILL)
    assert command_state(guard.pid) == ""


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patient(60)
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)
