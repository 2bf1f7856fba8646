"""A re-planning job with real ranks: it loses a stage for good, trains on without it, and returns to its layout."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshwright.api.conditions import RESCALING, is_true
from meshwright.api.goodput import TimeCause
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_local.control_socket import send
from tests.e2e.local_stack import Stage, Test, tiny
from tests.e2e.test_elastic import CONSTANT, RACK, finish, same_run, uids

FULL = (2, 2, 1)
"""TP 2 x PP 2: each stage takes a node."""
LEFT = (2, 1, 1)
"""TP 2, on the node that is left."""


def replanning(name: str, gpus_per_worker: int) -> list[dict[str, Any]]:
    """A job that trains until `finish`, at a constant learning rate: its losses do not depend on its length."""
    return tiny(
        name,
        replicas=1,
        elastic={"replan": True, "replacementSeconds": 5, "pauseSeconds": 10},
        parallelism={"tensor": 2, "pipeline": 2, "microBatches": 4},
        workers={"nodeSelector": RACK, "gpusPerWorker": gpus_per_worker},
        training={"steps": 100_000, "optimizer": CONSTANT},
    )


def degrees(status: ParallelTrainingJobStatus) -> tuple[int, int, int]:
    """Tensor, pipeline and data degree of the plan in effect."""
    assert status.plan is not None
    return status.plan.tensor, status.plan.pipeline, status.plan.data


def trains_as(layout: tuple[int, int, int]) -> Test:
    """The test that all ranks of this layout train, and that no resize is in progress."""
    ranks = layout[0] * layout[1] * layout[2]

    def holds(status: ParallelTrainingJobStatus) -> bool:
        all_train = status.ready_ranks == f"{ranks}/{ranks}"
        return all_train and not is_true(status.conditions, RESCALING) and degrees(status) == layout

    return holds


async def trains(stage: Stage, name: str, layout: tuple[int, int, int]) -> ParallelTrainingJobStatus:
    """Wait until the job trains in this layout, and has taken a step in it."""
    status = await stage.until(name, trains_as(layout), f"training in layout {layout}")
    step = status.step or 0
    return await stage.until(name, lambda s: (s.step or 0) > step, f"past step {step} in layout {layout}")


def rescales(status: ParallelTrainingJobStatus) -> bool:
    """Whether the time now is that of a resize."""
    return status.goodput is not None and status.goodput.cause == TimeCause.RESCALING


@pytest.mark.long
@pytest.mark.parametrize("gpus_per_worker", [1, 2])
async def test_a_job_loses_a_stage_and_returns_to_it(stage: Stage, gpus_per_worker: int) -> None:
    await stage.apply(replanning("planned", gpus_per_worker))
    first = await trains(stage, "planned", FULL)
    lost = (await stage.pod("planned", 0))["spec"]["nodeName"]
    survivors = {pod["metadata"]["name"] for pod in await stage.pods("planned") if pod["spec"]["nodeName"] != lost}
    control = stage.directory / "cluster"
    await asyncio.to_thread(send, control, action="power-off", node=lost)
    try:
        await stage.until("planned", rescales, "Rescaling")
        status = await trains(stage, "planned", LEFT)
        assert status.plan is not None
        assert status.mesh is not None
        assert (status.plan.replanned, status.mesh.cause, status.restarts_toward_limit) == (True, "Rescaled", 0)
        assert set(await uids(stage, "planned")) == survivors
    finally:
        await asyncio.to_thread(send, control, action="recover", node=lost)
    status = await trains(stage, "planned", FULL)
    assert first.plan is not None
    assert status.plan is not None
    changing = {"reasons", "memory_per_rank_bytes", "estimated_step_milliseconds", "estimated_tokens_per_second"}
    assert status.plan.model_dump(exclude=changing) == first.plan.model_dump(exclude=changing)
    assert survivors < set(await uids(stage, "planned"))
    await same_run(stage, await finish(stage, "planned"))
