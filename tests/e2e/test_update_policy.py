"""`spec.updatePolicy` with real ranks: when an edit that restarts the gang takes effect. No step is repeated."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_local.kube.resources import JOBS
from tests.e2e.local_stack import NAMESPACE, Stage, Test, tiny
from tests.e2e.test_drains import RARE, nothing_repeated
from tests.e2e.test_elastic import CONSTANT, finish

MICRO_BATCHES = 4
"""Of the edit. Before it, they are 2."""


def job(name: str, policy: str, every_steps: int) -> list[dict[str, Any]]:
    """A job that trains until `finish`."""
    training = {"steps": 100_000, "optimizer": CONSTANT}
    return tiny(name, updatePolicy=policy, training=training, checkpoint={"everySteps": every_steps})


async def trains(stage: Stage, name: str) -> None:
    await stage.until(name, lambda s: s.ready_ranks == "4/4", "4/4 ranks")
    await stage.trained(name, 5)


async def edit(stage: Stage, name: str) -> None:
    change = {"spec": {"parallelism": {"microBatches": MICRO_BATCHES}}}
    await stage.client.patch(JOBS, name, change, NAMESPACE)


def runs_generation(number: int) -> Test:
    """The test that all ranks train in this mesh generation."""
    return lambda s: s.mesh is not None and s.mesh.generation == number and s.ready_ranks == "4/4"


async def edited(stage: Stage, name: str) -> ParallelTrainingJobStatus:
    """Wait until the ranks train with the edit."""
    status = await stage.until(name, runs_generation(2), "training in generation 2")
    assert status.plan is not None
    assert status.plan.micro_batches == MICRO_BATCHES
    assert status.waiting_edit is None
    return status


async def waits(stage: Stage, name: str, waits_for: str) -> None:
    """Wait until the edit waits, and check that the ranks train on meanwhile."""
    status = await stage.until(name, lambda s: s.waiting_edit is not None, "an edit that waits")
    assert status.waiting_edit is not None
    assert status.waiting_edit.waits_for == waits_for
    step = await stage.trained(name, 1)
    await stage.trained(name, step + 5)
    status = await stage.status(name)
    assert status.mesh is not None
    assert (status.mesh.generation, status.ready_ranks) == (1, "4/4")


async def end(stage: Stage, name: str) -> dict[str, Any]:
    """Let the job end soon, by an edit that does not wait, and return the state that it ends with."""
    await stage.client.patch(JOBS, name, {"spec": {"updatePolicy": "Now"}}, NAMESPACE)
    return await finish(stage, name)


@pytest.mark.long
async def test_an_edit_takes_effect_now_after_the_ranks_have_saved(stage: Stage) -> None:
    body = job("now", "Now", RARE["everySteps"])
    await stage.apply(body)
    await trains(stage, "now")
    await edit(stage, "now")
    status = await edited(stage, "now")
    assert [(entry.cause, entry.count) for entry in status.restarts] == [("SpecChanged", 1)]
    await nothing_repeated(body, status, await finish(stage, "now"))


@pytest.mark.long
async def test_an_edit_waits_for_the_next_periodic_checkpoint(stage: Stage) -> None:
    every = 400
    body = job("later", "AtCheckpoint", every)
    await stage.apply(body)
    await trains(stage, "later")
    await edit(stage, "later")
    await waits(stage, "later", "Checkpoint")
    status = await edited(stage, "later")
    assert status.checkpoint is not None
    assert status.checkpoint.step >= every
    assert [(entry.cause, entry.count) for entry in status.restarts] == [("SpecChanged", 1)]
    await nothing_repeated(body, status, await end(stage, "later"))


@pytest.mark.long
async def test_an_edit_waits_for_a_restart_of_another_cause(stage: Stage) -> None:
    body = job("lazy", "OnRestart", 10)
    await stage.apply(body)
    await trains(stage, "lazy")
    await edit(stage, "lazy")
    await waits(stage, "lazy", "Restart")
    await stage.delete_pod("lazy", 1, grace_seconds=0)
    status = await edited(stage, "lazy")
    assert [(entry.cause, entry.count) for entry in status.restarts] == [("PodLost", 1)]
    saved = await end(stage, "lazy")
    assert saved["samples"] == saved["step"] * 8
