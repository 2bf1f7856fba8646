"""Random kills while replicas continue without lost ones: of ranks, of replicas, of both, while one joins again, while
a checkpoint is written, and in the last step. What is left keeps its processes, and every loss, weight and moment is
that of runs with so many replicas.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from meshwright.protocol.run_config import NativeRun
from meshwright_worker.agent.fork_client import ForkServerClient
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.in_memory.generation import PATIENCE_SECONDS
from tests.distributed.configs import small_run
from tests.distributed.fatal_runtime import JOINING, POINTS, SAVING
from tests.distributed.memory_gang import Gang, rank_server
from tests.distributed.memory_kills import assert_same, poison
from tests.patience import patient
from tests.randomness import first_seed, runs

pytestmark = [pytest.mark.long, pytest.mark.chaos]

LAYOUTS: list[Any] = [
    pytest.param({"data": 2}, id="2 replicas"),
    pytest.param({"data": 4}, id="4 replicas"),
    pytest.param({"data": 2, "tensor": 2}, id="tensor"),
    pytest.param({"data": 2, "pipeline": 2}, id="pipeline"),
]
BATCH = 12
EVENTS = 20
"""Events of all layouts together, unless others are asked for."""
STEPS_OF_EVENT = 10
"""Steps that an event takes at most."""
EVERY = 4
"""Steps between two checkpoints. The first one is behind the steps of a generation's kill."""


@dataclass(frozen=True)
class Loss:
    """What is lost, and where in the generation that begins after the event before."""

    kind: str
    """`rank`: a process in a pod that lives. `replica`: all its processes, with their pods. `both`: a replica, and a
    rank of another one. `joining`: a replica, and a rank of it again while it joins.
    """
    replica: int
    rank: int
    """The rank of `rank` and `both`."""
    point: str
    later: int
    """Steps after the one from which the generation goes on. In the first one all ranks say that they train."""

    def fatal(self, run: NativeRun) -> Callable[[int], dict[int, str]]:
        """Rank -> where it dies, given the step from which its generation goes on."""
        size = run.layout.replica_size
        lost = set(range(self.replica * size, (self.replica + 1) * size)) if self.kind != "rank" else set()
        if self.kind in ("rank", "both"):
            lost.add(self.rank)

        def where(step: int) -> dict[int, str]:
            at = step + self.later
            if self.point == SAVING:  # every checkpoint is written by all ranks
                at += -at % EVERY
            return dict.fromkeys(lost, f"{at}:{self.point}:1")

        return where


def draw(count: int, run: NativeRun, dice: random.Random) -> list[Loss]:
    """Draw losses after which a rank with each state is left."""
    data, size = run.layout.data, run.layout.replica_size
    kinds = ["rank", "rank", "replica", "replica", "joining"] + ["both"] * (data > 2)
    drawn = []
    for _ in range(count):
        replica, point = dice.randrange(data), dice.choice((*POINTS, SAVING))
        others = [rank for rank in range(data * size) if rank // size != replica]
        kind = dice.choice(kinds)
        rank = dice.choice(others) if kind == "both" else dice.randrange(data * size)
        drawn.append(Loss(kind, replica, rank, point, dice.randint(2, 3)))
    return drawn


@dataclass
class Driven:
    """A run with losses, and its parts with one number of replicas each."""

    gang: Gang
    full: int
    size: int
    run_of: Callable[[int], NativeRun]
    parts: list[tuple[int, int]] = field(default_factory=list)
    """Replicas, and the step after which their number changed."""
    kept: int = 0
    """Processes that went on after a change."""
    first: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Process -> its threads and descriptors when it trained for the first time with all replicas."""

    async def trains(self) -> None:
        """Wait until all ranks train."""
        await self.gang.trains()
        for pid in self.gang.pids.values():
            self.first.setdefault(pid, of_process(pid))

    async def lose(self, loss: Loss, fatal: Callable[[int], dict[int, str]] | None) -> None:
        """Wait for a loss, and go on until all replicas train again. `fatal` is the next loss."""
        if loss.kind == "rank":
            pids = dict(self.gang.pids)
            self.gang.exited.clear()
            await self.gang.recover(fatal)
            self._check(pids, {rank: rank for rank in pids if rank not in self.gang.exited})
            return
        await self.gang.until_lost()
        await self._shrink(loss.replica)
        if loss.kind == "joining":
            first = (self.full - 1) * self.size
            generation = self.gang.generation + 1
            await self._grow(lambda _: {first: f"{generation}:{JOINING}"})
            await self.gang.until_lost()
            await self._shrink(self.full - 1)
        await self._grow(fatal)

    async def _shrink(self, lost: int) -> None:
        """The last replica takes the place of the lost one. It stops before its third step."""
        data = self.gang.run.layout.data
        goes_on = {}
        for replica in set(range(data)) - {lost}:
            place = lost if replica == data - 1 else replica
            goes_on |= {replica * self.size + part: place * self.size + part for part in range(self.size)}
        await self.gang.leave()  # a rank that dies beside the replica is replaced in its pod
        await self._resize(data - 1, goes_on, stall=lambda step: {0: f"{step + 3}:forward"})

    async def _grow(self, fatal: Callable[[int], dict[int, str]] | None) -> None:
        smaller = self.gang.run.layout.data
        await self.gang.until_step(self.gang.memories[-1].step + 2)
        await self._resize(self.full, {rank: rank for rank in range(smaller * self.size)}, fatal)

    async def _resize(self, data: int, goes_on: dict[int, int], fatal: Any = None, stall: Any = None) -> None:
        before, pids = self.gang.run.layout.data, dict(self.gang.pids)
        await self.gang.resize(self.run_of(data), {old: goes_on[old] for old in pids if old in goes_on}, fatal, stall)
        self._check(pids, {old: goes_on[old] for old in pids if old in goes_on})
        self._end_part(before, self.gang.memories[-1].step)

    def _end_part(self, data: int, step: int) -> None:
        """Replicas that have lost one while another joined have taken no step together."""
        if step == (self.parts[-1][1] if self.parts else 0):
            return
        if self.parts and self.parts[-1][0] == data:
            self.parts.pop()
        self.parts.append((data, step))

    def _check(self, pids: dict[int, int], goes_on: dict[int, int]) -> None:
        """Every rank that was left has kept its process."""
        assert goes_on, "no rank was left"
        for old, new in goes_on.items():
            assert self.gang.pids[new] == pids[old], (old, new)
        self.kept += len(goes_on)


async def expect(driven: Driven, server: ForkServerClient, root: Path, text: Path) -> dict[int, str]:
    """Train each part from the checkpoint at which the one before ended, with new processes. Return all losses."""
    losses: dict[int, str] = {}
    begin, steps = 0, driven.gang.run.training.steps
    for number, (data, end) in enumerate([*driven.parts, (driven.full, steps)]):
        path = root / str(number)
        if number:
            step = CheckpointDirectory(root / str(number - 1)).path(begin)
            path.mkdir(parents=True)
            step.rename(path / step.name)
        run = driven.run_of(data)
        assert run.checkpoint is not None
        run = run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update={"every_steps": max(1, end)})})
        gang = Gang(server, run, path, text)
        try:
            await gang.start()
            if end < steps:  # the next part needs this checkpoint and no more
                await gang.until_saved(end)
            else:
                await gang.finish()
        finally:
            gang.end()
        losses |= {step: loss for step, loss in gang.losses.items() if begin < step <= end}
        begin = end
    return losses


@pytest.mark.parametrize("options", LAYOUTS)
async def test_random_losses_restart_no_process_that_is_left_and_change_no_bit(
    options: dict[str, Any], tmp_path: Path, text: Path, request: pytest.FixtureRequest
) -> None:
    index = [layout.id for layout in LAYOUTS].index(request.node.callspec.id)
    share, more = divmod(runs(EVENTS), len(LAYOUTS))
    seed, count = f"{first_seed()}:{index}", max(1, share + (index < more))

    def run_of(data: int) -> NativeRun:
        steps = STEPS_OF_EVENT * (count + 1)
        batch = {"batch": BATCH, "micro_batches": BATCH // data // 3 if data < 4 else 1}
        return small_run(**{**options, "data": data, "steps": steps, "every": EVERY, "keep": 100, **batch})

    run = run_of(options["data"])
    losses = draw(count, run, random.Random(seed))
    last = dict.fromkeys([random.Random(seed).randrange(run.layout.world_size)], f"{run.training.steps}:updated:1")
    async with rank_server() as server:
        gang = Gang(server, run, tmp_path / "run", text)
        driven = Driven(gang, options["data"], run.layout.replica_size, run_of)
        try:
            await gang.start(fatal=losses[0].fatal(run)(0))
            await driven.trains()
            unreadable = poison(gang.checkpoints)
            for loss, following in zip(losses, [*losses[1:], None], strict=True):
                await driven.lose(loss, following.fatal(run) if following is not None else lambda _: last)
                old = len(driven.first.keys() & set(gang.pids.values()))
                await driven.trains()
            await without_leaks(gang, driven.first)
            await gang.recover()
            await gang.finish()
        finally:
            gang.end()
        assert unreadable.exists(), "nobody has read checkpoints"
        expected = await expect(driven, server, tmp_path / "expected", text)
    kinds = dict(Counter(loss.kind for loss in losses))
    print(  # noqa: T201
        f"\nseed {seed}: {len(losses)} losses {kinds} and one of the last step, {gang.generation} generations;"
        f" {driven.kept} processes went on, {old} of them at the end"
    )
    assert {step: loss for step, loss in gang.losses.items() if expected[step] != loss} == {}
    # A step that ends while ranks leave is not reported.
    assert len(expected.keys() - gang.losses.keys()) <= len(gang.memories)
    number = sum(1 for _ in (tmp_path / "expected").iterdir()) - 1
    assert_same(gang.checkpoints, tmp_path / "expected" / str(number), run.training.steps)


def of_process(pid: int) -> tuple[int, int]:
    """Its threads and descriptors; none once it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0


async def without_leaks(gang: Gang, before: dict[int, tuple[int, int]]) -> None:
    """Assert that processes have no more threads and descriptors than when they first trained.

    A rank that did not come out of a collective leaves the thread behind, with its groups. A checkpoint that is just
    written takes some, too.
    """
    behind = 1 + sum(taken >= PATIENCE_SECONDS for _, taken in gang.leaving)
    for pid in gang.pids.values():
        limits = tuple(number * behind + 4 for number in before[pid])
        deadline = asyncio.get_running_loop().time() + patient(20)
        while any(now > limit for now, limit in zip(of_process(pid), limits, strict=True)):
            assert asyncio.get_running_loop().time() < deadline, (of_process(pid), limits)
            await asyncio.sleep(0.05)
