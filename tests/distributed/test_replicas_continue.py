"""Replicas continue without a lost one, and it joins again: each part of the run is bit by bit what a run with so many
replicas does from there on.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from tests.distributed.configs import small_run
from tests.distributed.memory_gang import Gang, gang_of
from tests.distributed.memory_kills import Kill, assert_same, poison

pytestmark = pytest.mark.long

STEPS = 14
BATCH = 12


def run_of(data: int, *, every: int = 100_000, scaled: bool = False, **options: Any) -> NativeRun:
    """So many replicas with the same batch, of 1 sequence a micro-batch. `scaled`: with 3 sequences in each, and
    documents for evaluations.
    """
    batch = 3 * data if scaled else BATCH
    run = small_run(
        data=data, batch=batch, micro_batches=batch // data, steps=STEPS, every=every, keep=STEPS, **options
    )
    return run.model_copy(update={"data": run.data.model_copy(update={"held_out": 0.2})}) if scaled else run


@dataclass(frozen=True)
class Part:
    """A part of a run, up to the step after which the number of replicas changed."""

    data: int
    end: int


async def expect(parts: list[Part], root: Path, text: Path, options: dict[str, Any]) -> dict[int, str]:
    """Train each part from the checkpoint at which the one before ended, with new processes. Returns all losses."""
    losses: dict[int, str] = {}
    begin = 0
    for number, part in enumerate(parts):
        path = root / str(number)
        if number:
            step = CheckpointDirectory(root / str(number - 1)).path(begin)
            shutil.copytree(step, path / step.name)
        async with gang_of(run_of(part.data, every=1, **options), path, text) as gang:
            await gang.start()
            await gang.finish()
        losses |= {step: loss for step, loss in gang.losses.items() if begin < step <= part.end}
        begin = part.end
    return losses


async def compare(gang: Gang, parts: list[Part], tmp_path: Path, text: Path, options: dict[str, Any]) -> None:
    """Assert that the gang's run equals the parts, each trained on its own: losses, weights, moments and samples."""
    expected = await expect(parts, tmp_path / "expected", text, options)
    assert {step: loss for step, loss in gang.losses.items() if expected[step] != loss} == {}
    assert expected.keys() == set(range(1, STEPS + 1))
    # A step that ends while ranks leave is not reported.
    assert expected.keys() - gang.losses.keys() <= {part.end for part in parts[:-1]}
    assert_same(gang.checkpoints, tmp_path / "expected" / str(len(parts) - 1), STEPS)


@pytest.mark.parametrize("point", ["backward", "reduced", "updated"])
async def test_the_others_continue_with_fewer_replicas_and_the_lost_one_joins_again(
    point: str, tmp_path: Path, text: Path
) -> None:
    async with gang_of(run_of(4), tmp_path / "run", text) as gang:
        await gang.start(fatal=Kill(4, point, (1,)).fatal(1))
        await gang.trains()
        pids, unreadable = dict(gang.pids), poison(gang.checkpoints)
        await gang.until_lost()
        await gang.resize(run_of(3), {0: 0, 2: 2, 3: 1})
        assert gang.pids == {0: pids[0], 2: pids[2], 1: pids[3]}, "survivors keep their processes"
        await gang.until_step(9)
        before = dict(gang.pids)
        await gang.resize(run_of(4), {0: 0, 1: 1, 2: 2})
        assert {rank: gang.pids[rank] for rank in range(3)} == before
        await gang.finish()
        assert unreadable.exists(), "nobody has read checkpoints"
    shrunk, grown = gang.memories
    assert (shrunk.ranks, grown.ranks) == ("0-2", "0-2")
    assert shrunk.step >= 3
    await compare(gang, [Part(4, shrunk.step), Part(3, grown.step), Part(4, STEPS)], tmp_path, text, {})


async def test_the_last_replica_continues_alone_and_another_joins_it(tmp_path: Path, text: Path) -> None:
    async with gang_of(run_of(2), tmp_path / "run", text) as gang:
        await gang.start(fatal=Kill(4, "agreed", (0,)).fatal(1))
        await gang.trains()
        pid = gang.pids[1]
        await gang.until_lost()
        await gang.resize(run_of(1), {1: 0})
        await gang.until_step(8)
        await gang.resize(run_of(2), {0: 0})
        assert gang.pids[0] == pid
        await gang.finish()
    shrunk, grown = gang.memories
    await compare(gang, [Part(2, shrunk.step), Part(1, grown.step), Part(2, STEPS)], tmp_path, text, {})


async def test_a_batch_that_follows_the_replicas_continues_with_the_next_sample(tmp_path: Path, text: Path) -> None:
    """Also the evaluation, whose samples are divided over the replicas."""
    options = {"scaled": True, "training": {"evaluation": {"every_steps": 2, "samples": 9}}}
    async with gang_of(run_of(4, **options), tmp_path / "run", text) as gang:
        await gang.start(fatal=Kill(4, "backward", (3,)).fatal(1))
        await gang.trains()
        pids = dict(gang.pids)
        await gang.until_lost()
        await gang.resize(run_of(3, **options), {0: 0, 1: 1, 2: 2})
        assert gang.pids.items() < pids.items()
        await gang.finish()
    (shrunk,) = gang.memories
    await compare(gang, [Part(4, shrunk.step), Part(3, STEPS)], tmp_path, text, options)


async def test_a_replica_of_a_pipeline_fills_the_gap_of_another(tmp_path: Path, text: Path) -> None:
    """Replica 0 has lost its first stage. The first stage of replica 1 takes its place, and the others end."""
    options = {"pipeline": 2}
    async with gang_of(run_of(2, **options), tmp_path / "run", text) as gang:
        await gang.start(fatal=Kill(4, "reduction", (0,)).fatal(1))
        await gang.trains()
        pids = dict(gang.pids)
        await gang.until_lost()
        await gang.resize(run_of(1, **options), {2: 0, 1: 1})
        assert gang.pids == {0: pids[2], 1: pids[1]}
        await gang.finish()
    (shrunk,) = gang.memories
    await compare(gang, [Part(2, shrunk.step), Part(1, STEPS)], tmp_path, text, options)
