"""Recovery in memory: ranks are killed, the others keep their processes and state, and the result is the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.precision import Precision
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.agent.events import RankExited
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.manifest import MANIFEST, read_manifest
from meshwright_worker.rank.task import Outcome
from tests.distributed.configs import small_run
from tests.distributed.fatal_runtime import JOINING, POINTS
from tests.distributed.memory_gang import Gang, gang_of
from tests.distributed.test_recovery import tensors_of

pytestmark = pytest.mark.long

STEPS = 24


def run_of(**options: Any) -> NativeRun:
    return small_run(steps=STEPS, every=1000, **options)


async def undisturbed(run: NativeRun, root: Path, text: Path) -> dict[str, torch.Tensor]:
    async with gang_of(run, root, text) as gang:
        await gang.start()
        await gang.finish()
    return tensors_of(root, STEPS)


def poison(root: Path) -> Path:
    """A checkpoint that nobody can read: whoever tries sets it aside."""
    path = CheckpointDirectory(root).path(0)
    path.mkdir(parents=True)
    (path / MANIFEST).write_text("not a manifest")
    return path


async def disturbed(gang: Gang, points: list[tuple[int, str]], dice: random.Random) -> list[int]:
    """Run to the end, while the rank of each point dies there. Returns who died."""
    world = gang.run.layout.world_size
    victims = [dice.randrange(world) for _ in points]
    deaths = [{victim: f"{step}:{point}"} for victim, (step, point) in zip(victims, points, strict=True)]
    await gang.start(fatal=deaths[0])
    await gang.trains()
    unreadable = poison(gang.checkpoints)
    pids: dict[int, int] = dict(gang.pids)
    for victim, following in zip(victims, [*deaths[1:], {}], strict=True):
        await gang.recover(following)
        survivors = {rank: pid for rank, pid in gang.pids.items() if rank != victim}
        assert survivors == {rank: pid for rank, pid in pids.items() if rank != victim}, "survivors keep processes"
        pids = dict(gang.pids)
    await gang.finish()
    assert unreadable.exists(), "nobody has read checkpoints"
    return victims


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"data": 4}, id="replicas"),
        pytest.param({"data": 2, "tensor": 2}, id="tensor"),
        pytest.param({"data": 2, "pipeline": 2}, id="pipeline"),
        pytest.param({"data": 4, "zero": 3, "replicas": {"shard_size": 2}}, id="hsdp"),
        pytest.param({"data": 4, "zero": 1, "replicas": {"shard_size": 2}}, id="flat"),
        pytest.param(
            {
                "data": 4,
                "zero": 1,
                "replicas": {"shard_size": 2, "strategy": "ZeRO", "bucket_elements": 4000},
                "precision": Precision.BF16,
                "training": {"sharded_masters": {}},
            },
            id="sharded masters",
        ),
    ],
)
async def test_kills_at_every_point_of_a_step_change_no_bit(
    options: dict[str, Any], tmp_path: Path, text: Path
) -> None:
    run = run_of(**options)
    expected = await undisturbed(run, tmp_path / "undisturbed", text)
    dice = random.Random(1)
    root = tmp_path / "disturbed"
    async with gang_of(run, root, text) as gang:
        points = [(2 + 3 * index, point) for index, point in enumerate(POINTS)]
        await disturbed(gang, points, dice)
        assert set(gang.outcomes.values()) == {Outcome.COMPLETE}
    actual = tensors_of(root, STEPS)
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []
    states = [read_manifest(CheckpointDirectory(path).path(STEPS)).state for path in (root, tmp_path / "undisturbed")]
    assert states[0] == states[1], "also the data digest"


async def test_a_new_rank_that_dies_while_it_joins_costs_no_step_either(tmp_path: Path, text: Path) -> None:
    run = run_of(data=4)
    expected = await undisturbed(run, tmp_path / "undisturbed", text)
    root = tmp_path / "disturbed"
    async with gang_of(run, root, text) as gang:
        await gang.start(fatal={1: "5:reduced"})
        pids = dict(gang.pids)
        await gang.recover({1: f"2:{JOINING}"})
        await gang.recover()
        assert {rank: pid for rank, pid in gang.pids.items() if rank != 1} == {
            rank: pid for rank, pid in pids.items() if rank != 1
        }
        await gang.finish()
        assert [memory.ranks for memory in gang.memories] == ["0,2-3", "0,2-3"]
        assert gang.memories[0].step == gang.memories[1].step
    actual = tensors_of(root, STEPS)
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


async def test_a_rank_that_has_nothing_yet_ends_instead_of_holding(tmp_path: Path, text: Path) -> None:
    async with gang_of(run_of(data=2), tmp_path, text) as gang:
        await gang.start(fatal={0: f"1:{JOINING}"})
        await gang.until(lambda event: isinstance(event, RankExited))
        assert await gang.leave() == {}
        assert gang.ranks == {}
