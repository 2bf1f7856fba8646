"""A run that began from another run's checkpoint (`checkpoint.resumeFrom`) and recovers in memory.

The other run is read while nothing else has the state: its ranks go on from memory once they have theirs, and read it
again if they do not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.memory_recovery import plan_recovery
from meshwright.protocol.messages import MemoryCopies
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.agent.events import RankExited, RankMessageReceived
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.manifest import read_manifest
from meshwright_worker.rank import messages
from tests.distributed.fatal_runtime import COPYING, JOINING
from tests.distributed.memory_gang import JOB, Gang, rank_server
from tests.distributed.memory_kills import assert_same, run_of

BEGUN, LENGTH = 4, 9
COPIES = MemoryCopies(every_steps=2, shift=1)


def lengths(options: dict[str, Any]) -> tuple[NativeRun, NativeRun, NativeRun]:
    """The run to begin from, the one that begins from it, and the one that does both."""
    options = {"optimizer": {"decay": "Constant"}, "keep": 9, **options}
    base, straight = run_of(BEGUN, **options), run_of(LENGTH, **options)
    assert straight.checkpoint is not None
    resumed = straight.checkpoint.model_copy(update={"resume_from": "base-0a1b2c3d"})
    return base, straight.model_copy(update={"checkpoint": resumed}), straight


async def continued(
    options: dict[str, Any], root: Path, text: Path, disturb: Callable[[Gang], Any], copies: MemoryCopies | None = None
) -> Gang:
    """The gang of the run that begins from another one, after `disturb` has started it. It must end as one run does."""
    base, resumed, straight = lengths(options)
    async with rank_server() as server:
        for run, name in ((base, "base-0a1b2c3d"), (straight, "straight-0a1b2c3d")):
            gang = Gang(server, run, root / name, text)
            try:
                await gang.start()
                await gang.finish()
            finally:
                gang.end()
        gang = Gang(server, resumed, root / "own-0a1b2c3d", text, copies)
        try:
            await disturb(gang)
            await gang.finish()
        finally:
            gang.end()
    assert_same(root / "own-0a1b2c3d", root / "straight-0a1b2c3d", LENGTH)
    return gang


async def began(gang: Gang) -> list[tuple[int, str]]:
    """Of each rank in the generation that starts: the step that it goes on from, and the checkpoint of another run."""
    found: dict[int, tuple[int, str]] = {}
    while len(found) < gang.run.layout.world_size:
        event = await gang.until(lambda event: isinstance(event, RankMessageReceived))
        if isinstance(event, RankMessageReceived) and isinstance(event.message, messages.Running):
            found[event.rank] = event.message.step, event.message.source
    return [found[rank] for rank in sorted(found)]


@pytest.mark.long
@pytest.mark.slow
async def test_ranks_go_on_from_memory_and_keep_what_the_run_began_from(tmp_path: Path, text: Path) -> None:
    source = tmp_path / "base-0a1b2c3d"

    async def disturb(gang: Gang) -> None:
        await gang.start(fatal={0: "6:backward:1"})
        assert await began(gang) == [(BEGUN, str(source / "step-00000004"))] * 2
        source.rename(tmp_path / "away")
        await gang.recover(fatal={1: "8:backward:1"})
        assert await began(gang) == [(gang.memories[0].step, "")] * 2
        await gang.recover()

    gang = await continued({"data": 2}, tmp_path, text, disturb)
    assert [memory.step for memory in gang.memories] == [5, 7]
    record = read_manifest(CheckpointDirectory(gang.checkpoints).path(LENGTH)).provenance
    assert record is not None
    assert record.parent is not None
    assert (record.job, record.parent.step, record.parent.path) == (JOB, BEGUN, str(source / "step-00000004"))


async def lose_everything(gang: Gang) -> None:
    """A rank is lost, and what the others hold is of no use: all processes end."""
    await gang.until_lost()
    held = await gang.leave()
    found = plan_recovery(gang.run, gang.generation, held)
    assert isinstance(found, str), found
    for rank, handle in [*gang.ranks.items()]:
        handle.kill()
        await gang.until(lambda event, rank=rank: isinstance(event, RankExited) and event.rank == rank)  # type: ignore[misc]


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "where", "copies"),
    [
        pytest.param({"data": 2}, f"1:{JOINING}", None, id="before-the-state"),
        pytest.param({"data": 2, "zero": 3}, f"{BEGUN}:{COPYING}:1", COPIES, id="before-the-first-copy"),
    ],
)
async def test_a_loss_before_anything_is_held_reads_the_other_run_or_the_own_checkpoint(
    options: dict[str, Any], where: str, copies: MemoryCopies | None, tmp_path: Path, text: Path
) -> None:
    async def disturb(gang: Gang) -> None:
        await gang.start(fatal={1: where})
        await lose_everything(gang)
        saved = CheckpointDirectory(gang.checkpoints).steps()
        assert set(saved) <= {BEGUN}
        await gang.start(fatal={1: "7:backward:1"})
        source = "" if saved else str(tmp_path / "base-0a1b2c3d" / "step-00000004")
        assert await began(gang) == [(BEGUN, source)] * 2
        await gang.recover()

    await continued(options, tmp_path, text, disturb, copies)
