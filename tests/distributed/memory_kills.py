"""Kills of ranks that recover in memory, at points of a step: the run must end as if there were none."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.precision import Precision
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.manifest import MANIFEST, read_manifest
from tests.distributed.configs import small_run
from tests.distributed.fatal_runtime import JOINING, PASSES, POINTS
from tests.distributed.memory_gang import Gang, gang_of
from tests.distributed.test_recovery import tensors_of

LAYOUTS: list[Any] = [
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
]
"""Four ranks each. Ranks 0 and 1 have the same state as ranks 2 and 3, or as each other too."""
SHARDED: list[Any] = [
    pytest.param({"data": 4, "zero": 3}, id="sharded"),
    pytest.param({"data": 2, "tensor": 2, "zero": 3}, id="sharded-tensor"),
    pytest.param({"data": 4, "zero": 2}, id="sharded-flat"),
]
"""Layouts in which no rank has the state of another."""
MICRO_BATCHES = 2
STEPS_BETWEEN = 3


@dataclass(frozen=True)
class Kill:
    """Ranks that die in one generation, and those that wait there until they leave it."""

    step: int
    point: str
    victims: tuple[int, ...]
    occurrence: int = 1
    stalled: tuple[int, ...] = ()

    def fatal(self, generation: int) -> dict[int, str]:
        """Rank -> where it dies."""
        where = f"{self.step}:{self.point}:{self.occurrence}"
        return dict.fromkeys(self.victims, f"{generation}:{JOINING}" if self.point == JOINING else where)

    @property
    def stall(self) -> dict[int, str]:
        """Rank -> where it waits: all ranks agree on the step, and these do not make its update."""
        return dict.fromkeys(self.stalled, f"{self.step}:agreed")


def draw(kills: int, dice: random.Random) -> list[Kill]:
    """Kills at random points: of one rank or of the two of a worker, of which a tenth while it joins."""
    drawn: list[Kill] = []
    for index in range(kills):
        pair = dice.choice(((0, 1), (2, 3)))
        victims = pair if dice.random() < 0.25 else (dice.choice(pair),)
        step = 2 + STEPS_BETWEEN * index + dice.randrange(STEPS_BETWEEN - 1)
        point = dice.choice(POINTS)
        # A second new rank that has nothing yet would end too.
        if drawn and drawn[-1].point != JOINING and len(drawn[-1].victims) == 1 and dice.random() < 0.15:
            drawn.append(Kill(step, JOINING, drawn[-1].victims))
            continue
        stalled: tuple[int, ...] = ()
        if point in ("agreed", "update", "updated"):
            others = [rank for rank in range(4) if rank not in victims]
            stalled = tuple(dice.sample(others, dice.randrange(len(others) + 1)))
        occurrence = dice.randint(1, MICRO_BATCHES) if point in PASSES else 1
        drawn.append(Kill(step, point, victims, occurrence, stalled))
    return drawn


def run_of(steps: int, **options: Any) -> NativeRun:
    return small_run(**{"steps": steps, "every": 100_000, "micro_batches": MICRO_BATCHES, **options})


async def undisturbed(run: NativeRun, root: Path, text: Path) -> None:
    async with gang_of(run, root, text) as gang:
        await gang.start()
        await gang.finish()


def poison(root: Path) -> Path:
    """A checkpoint that nobody can read: whoever tries sets it aside."""
    path = CheckpointDirectory(root).path(0)
    path.mkdir(parents=True)
    (path / MANIFEST).write_text("not a manifest")
    return path


async def disturbed(gang: Gang, kills: list[Kill]) -> None:
    """Run to the end through all kills, and check that only who was killed has another process."""
    first = kills[0]
    await gang.start(fatal=first.fatal(gang.generation + 1), stall=first.stall)
    await gang.trains()
    unreadable = poison(gang.checkpoints)
    for kill, following in zip(kills, [*kills[1:], None], strict=True):
        pids = dict(gang.pids)
        gang.exited.clear()
        fatal, stall = (following.fatal(gang.generation + 1), following.stall) if following else ({}, {})
        await gang.recover(fatal, stall)
        # The second rank of a worker may be interrupted by the death of the first before it comes to its own.
        assert set() < gang.exited <= set(kill.victims), kill
        assert {rank for rank, pid in gang.pids.items() if pid != pids[rank]} == gang.exited, "survivors keep processes"
    await gang.finish()
    assert unreadable.exists(), "nobody has read checkpoints"


def partly_updated(gang: Gang) -> int:
    """How often some survivors had made an update that others had not made."""
    return sum(len({held.step for held in states.values()}) > 1 for states in gang.states)


def assert_same(actual: Path, expected: Path, steps: int) -> None:
    """Assert that two runs have the same parameters, moments and samples, bit by bit."""
    tensors, others = tensors_of(expected, steps), tensors_of(actual, steps)
    assert tensors.keys() == others.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], others[name])] == []
    states = [read_manifest(CheckpointDirectory(path).path(steps)).state for path in (actual, expected)]
    assert states[0] == states[1], "also the number of samples and the data digest"
