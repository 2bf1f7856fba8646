"""What the agent reads of a process: long events, and pipes that others keep open."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from meshwright_worker.agent.events import Event, RankExited, RankMessageReceived
from meshwright_worker.agent.rank_process import RankHandle, open_pipe, supervise
from meshwright_worker.rank import messages
from meshwright_worker.rank.task import ExpertLoad, Outcome, StepReport

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
