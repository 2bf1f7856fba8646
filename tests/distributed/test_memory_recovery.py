"""Recovery in memory: ranks are killed, the others keep their processes and state, and the result is the same."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.memory_recovery import plan_recovery
from meshwright.protocol.messages import MemoryCopies, MemoryRecovery
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.agent.events import RankExited
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.manifest import MANIFEST, read_manifest
from meshwright_worker.in_memory.generation import PATIENCE_SECONDS
from tests.distributed.fatal_runtime import COPYING, EVALUATING, JOINING, POINTS, SAVING
from tests.distributed.memory_gang import JOB, Gang, gang_of
from tests.distributed.memory_kills import (
    LAYOUTS,
    SHARDED,
    STEPS_BETWEEN,
    Kill,
    assert_same,
    disturbed,
    draw,
    partly_updated,
    run_of,
    undisturbed,
)
from tests.patience import patient
from tests.randomness import first_seed, runs

pytestmark = pytest.mark.long

KILLS = 20
"""Random kills of all layouts together, unless others are asked for."""


@pytest.mark.parametrize("options", LAYOUTS)
async def test_kills_at_every_point_of_a_step_change_no_bit(
    options: dict[str, Any], tmp_path: Path, text: Path
) -> None:
    dice = random.Random(1)
    kills = [Kill(2 + 3 * index, point, (dice.randrange(4),)) for index, point in enumerate(POINTS)]
    await compare(kills, options, tmp_path, text)


@pytest.mark.chaos
@pytest.mark.parametrize("options", LAYOUTS)
async def test_random_kills_change_no_bit(
    options: dict[str, Any], tmp_path: Path, text: Path, request: pytest.FixtureRequest
) -> None:
    index = [layout.id for layout in LAYOUTS].index(request.node.callspec.id)
    share, more = divmod(runs(KILLS), len(LAYOUTS))
    kills = draw(max(1, share + (index < more)), random.Random(f"{first_seed()}:{index}"))
    gang = await compare(kills, options, tmp_path, text)
    seconds = sorted(taken for _, taken in gang.leaving)
    partly = partly_updated(gang)
    left = f"{1000 * statistics.median(seconds):.1f} ms median, {1000 * seconds[int(0.95 * len(seconds))]:.1f} ms p95"
    print(f"\n{len(kills)} kills, {partly} after which some had made the update; left after {left}")  # noqa: T201
    if sum(0 < len(kill.stalled) < 4 - len(kill.victims) for kill in kills) >= 5:
        assert partly > 0


@pytest.mark.chaos
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("options", SHARDED)
async def test_sharded_state_comes_back_from_copies_in_host_memory(
    options: dict[str, Any], every: int, tmp_path: Path, text: Path, request: pytest.FixtureRequest
) -> None:
    share = max(3, runs(KILLS) // (2 * len(SHARDED)))
    kills = draw(share, random.Random(f"{first_seed()}:{request.node.callspec.id}"))
    gang = await compare(kills, options, tmp_path, text, MemoryCopies(every_steps=every, shift=2))
    assert all(memory.holders for memory in gang.memories)
    for states, memory in zip(gang.states, gang.memories, strict=True):
        assert memory.step >= max(state.step for state in states.values()) - 2 * every, "the newest copies"


async def test_between_two_copies_all_go_back_to_the_one_before(tmp_path: Path, text: Path) -> None:
    # After the first kill each rank has its copy of step 6. At the second, rank 2 has that of step 10, and nobody else.
    kills = [Kill(8, "backward", (1,)), Kill(10, COPYING, (2,))]
    gang = await compare(kills, {"data": 4, "zero": 3}, tmp_path, text, MemoryCopies(every_steps=2, shift=2))
    first, second = gang.memories
    assert (first.step in (4, 6), first.ranks, first.holders) == (True, "0,2-3", "1:3")
    assert max(state.step for state in gang.states[0].values()) == 7
    assert (second.step, second.ranks, second.holders) == (8, "0-1,3", "2:0")
    assert max(state.step for state in gang.states[1].values()) >= 10


async def test_ranks_may_go_back_behind_the_newest_checkpoint(tmp_path: Path, text: Path) -> None:
    options = {"data": 4, "zero": 3, "every": 1, "keep": 100}
    gang = await compare([Kill(8, "backward", (1,))], options, tmp_path, text, MemoryCopies(every_steps=4, shift=2))
    assert [memory.step for memory in gang.memories] == [4], "and checkpoints of steps 5 and 6 are complete"
    assert CheckpointDirectory(tmp_path / "disturbed").steps() == [*range(11, -1, -1)]


@pytest.mark.parametrize(
    ("copies", "steps", "victim"),
    [
        pytest.param(None, 4, 0, id="rank 0 in the last step"),
        pytest.param(None, 11, 1, id="another rank"),
        pytest.param(MemoryCopies(every_steps=1, shift=1), 4, 0, id="copies"),
    ],
)
async def test_what_is_left_of_a_step_after_its_update_is_done_after_a_loss(
    copies: MemoryCopies | None, steps: int, victim: int, tmp_path: Path, text: Path
) -> None:
    """Its evaluation, its report and its checkpoint were missing. The next ones may be hours away, or never come."""
    evaluation = {"every_steps": 4, "samples": 10}
    run = run_of(steps, data=2, every=4, keep=20, zero=0 if copies is None else 3, training={"evaluation": evaluation})
    run = run.model_copy(update={"data": run.data.model_copy(update={"held_out": 0.2})})
    expected = await losses_of(run, tmp_path / "expected", text)
    async with gang_of(run, tmp_path / "actual", text, copies) as gang:
        await gang.start(fatal={victim: f"4:{EVALUATING}:1"})
        await gang.recover()
        await gang.finish()
    assert copies is not None or [memory.step for memory in gang.memories] == [4]
    assert (gang.losses, gang.evaluations) == expected
    assert expected[1].keys() == {step for step in (4, 8, 11) if step <= steps}
    steps_saved = CheckpointDirectory(tmp_path / "expected").steps()
    assert CheckpointDirectory(tmp_path / "actual").steps() == steps_saved
    for step in steps_saved:
        assert_same(tmp_path / "actual", tmp_path / "expected", step)


async def losses_of(run: NativeRun, root: Path, text: Path) -> tuple[dict[int, str], dict[int, str]]:
    """Step -> its loss, and that of its evaluation, of a run without a loss of ranks."""
    async with gang_of(run, root, text) as gang:
        await gang.start()
        await gang.finish()
    return gang.losses, gang.evaluations


async def test_a_save_that_a_loss_interrupts_is_made_up_after_the_next_step(tmp_path: Path, text: Path) -> None:
    """The next one was that of the next interval, which may be hours away."""
    async with gang_of(run_of(11, data=2, every=4, keep=20), tmp_path, text) as gang:
        await gang.start(fatal={1: f"4:{SAVING}:1"})
        await gang.recover()
        await gang.finish()
    (memory,) = gang.memories
    assert memory.step >= 4
    assert CheckpointDirectory(tmp_path).steps() == [11, 8, memory.step + 1]


async def test_the_record_of_a_checkpoint_outlives_rank_0_and_a_damaged_checkpoint(tmp_path: Path, text: Path) -> None:
    async with gang_of(run_of(2, data=2), tmp_path, text) as gang:
        gang.image = "a"
        await gang.start()
        await gang.finish()
    async with gang_of(run_of(9, data=2), tmp_path, text) as gang:
        gang.image = "b"
        await gang.start(fatal={0: "5:backward:1"})
        await gang.trains()
        # Nobody who goes on from memory needs it.
        (CheckpointDirectory(tmp_path).path(2) / MANIFEST).write_text("not a manifest")
        await gang.recover(fatal={1: "7:backward:1"})
        gang.image = "c"
        await gang.recover()
        await gang.finish()
    record = read_manifest(CheckpointDirectory(tmp_path).path(9)).provenance
    assert record is not None
    assert (record.job, record.image, record.parent) == (JOB, "c", None)
    assert [(change.step, change.changes.get("image")) for change in record.history] == [
        (2, ["a", "b"]),
        (6, ["b", "c"]),
    ]
    assert record.history[0].changes.keys() == {"image", "spec.training.steps"}


async def test_the_best_checkpoints_outlive_rank_0_and_other_ranks(tmp_path: Path, text: Path) -> None:
    """A new rank 0 reads from the manifests which checkpoints are the best."""
    run = run_of(12, data=2, keep=1, training={"evaluation": {"every_steps": 2, "samples": 10}})
    assert run.checkpoint is not None
    best = run.checkpoint.model_copy(update={"keep_best": 2})
    run = run.model_copy(update={"data": run.data.model_copy(update={"held_out": 0.2}), "checkpoint": best})
    await undisturbed(run, tmp_path / "undisturbed", text)
    async with gang_of(run, tmp_path / "disturbed", text) as gang:
        await gang.start(fatal={0: "5:backward:1"})
        await gang.trains()
        await gang.recover(fatal={1: "9:backward:1"})
        await gang.recover()
        await gang.finish()
    found = [CheckpointDirectory(tmp_path / name).evaluation_losses() for name in ("undisturbed", "disturbed")]
    assert found[0] == found[1]
    assert len(found[0]) == 2, "the loss falls: the last one is the best, and then comes the one before"
    assert_same(tmp_path / "disturbed", tmp_path / "undisturbed", 12)


async def compare(
    kills: list[Kill], options: dict[str, Any], root: Path, text: Path, copies: MemoryCopies | None = None
) -> Gang:
    """Run with kills and without; both must end the same."""
    steps = kills[-1].step + STEPS_BETWEEN
    run = run_of(steps, **options)
    await undisturbed(run, root / "undisturbed", text)
    async with gang_of(run, root / "disturbed", text, copies) as gang:
        await disturbed(gang, kills)
    assert_same(root / "disturbed", root / "undisturbed", steps)
    return gang


@pytest.mark.parametrize("options", [LAYOUTS[0], LAYOUTS[3], LAYOUTS[4]])
async def test_recoveries_leave_no_thread_and_no_descriptor_behind(
    options: dict[str, Any], tmp_path: Path, text: Path
) -> None:
    recoveries = 20
    run = run_of(STEPS_BETWEEN * (recoveries + 1), **options)
    kills = [Kill(2 + STEPS_BETWEEN * index, "backward", (3,)) for index in range(recoveries)]
    async with gang_of(run, tmp_path, text) as gang:
        await gang.start(fatal=kills[0].fatal(1))
        await gang.trains()
        pids = dict(gang.pids)
        before = {rank: of_process(pid) for rank, pid in pids.items() if rank != 3}
        for following in [*kills[1:], None]:
            await gang.recover(following.fatal(gang.generation + 1) if following else {})
        await gang.trains()
        for rank, (threads, descriptors) in before.items():
            assert gang.pids[rank] == pids[rank]
            # gloo sometimes does not wake a thread: it is left behind, with its groups, until their time limit.
            behind = sum(left == rank and taken >= PATIENCE_SECONDS for left, taken in gang.leaving)
            limits = threads * (1 + behind), descriptors * (1 + behind)
            await settle(pids[rank], limits)


def of_process(pid: int) -> tuple[int, int]:
    """Its threads and descriptors."""
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))


async def settle(pid: int, limits: tuple[int, int]) -> None:
    """Wait until a process has at most so many threads and descriptors: some belong to the step that just runs."""
    deadline = time.monotonic() + patient(20)
    while any(now > limit for now, limit in zip(of_process(pid), limits, strict=True)):
        assert time.monotonic() < deadline, (of_process(pid), limits)
        await asyncio.sleep(0.05)


async def test_a_new_rank_that_dies_while_it_joins_costs_no_step_either(tmp_path: Path, text: Path) -> None:
    kills = [Kill(5, "reduced", (1,)), Kill(5, JOINING, (1,))]
    gang = await compare(kills, {"data": 4}, tmp_path, text)
    assert [memory.ranks for memory in gang.memories] == ["0,2-3", "0,2-3"]
    assert gang.memories[0].step == gang.memories[1].step


async def test_a_rank_that_has_nothing_yet_ends_instead_of_holding(tmp_path: Path, text: Path) -> None:
    async with gang_of(run_of(8, data=2), tmp_path, text) as gang:
        await gang.start(fatal={0: f"1:{JOINING}"})
        await gang.until(lambda event: isinstance(event, RankExited))
        assert await gang.leave() == {}
        assert gang.ranks == {}


async def test_ranks_that_never_got_an_interrupted_generation_go_on(tmp_path: Path, text: Path) -> None:
    run, steps = run_of(12, data=4), 12
    expected, actual = tmp_path / "expected", tmp_path / "actual"
    await undisturbed(run, expected, text)
    async with gang_of(run, actual, text) as gang:
        await gang.start(fatal=Kill(5, "reduced", (1,)).fatal(1))
        await gang.until_lost()
        memory = plan_recovery(run, 1, await gang.leave())
        assert isinstance(memory, MemoryRecovery), memory
        assert memory.ranks == "0,2-3"
        before = gang.pids
        await gang.start(memory, deaf=(2, 3))
        held = await gang.leave()
        assert sorted(held) == [0, 2, 3], gang.lines[-20:]
        again = plan_recovery(run, 1, held)
        assert again == memory
        await gang.start(memory)
        await gang.trains()
        assert {rank: gang.pids[rank] for rank in before} == before, "their processes go on"
        await gang.finish()
    assert_same(actual, expected, steps)
