"""Examples that are cheap to run, run."""

import pytest

from meshwright.api import conditions
from meshwright.api.labels import KIND
from meshwright_cli import manifest
from tests.e2e.local_stack import EXAMPLES, eventually, holds


def job_name(path):
    return next(item["metadata"]["name"] for item in manifest.read(path) if item["kind"] == KIND)


@pytest.mark.long
async def test_planner_chooses_the_degrees_and_says_why(stage):
    path = EXAMPLES / "planner-chooses.yaml"
    await stage.apply(manifest.read(path))
    name = job_name(path)
    status = await stage.complete(name)
    assert status.plan is not None
    assert status.plan.data == 2
    assert status.plan.tensor * status.plan.pipeline * 2 == status.plan.world_size
    assert status.plan.reasons
    await stage.delete(name)


async def test_a_users_ddp_script_survives_the_loss_of_a_pod(stage):
    path = EXAMPLES / "torch-ddp.yaml"
    name, items = job_name(path), manifest.read(path)
    # A rank in each of two pods: every rank of a script imports torch for itself.
    spec = next(item["spec"] for item in items if item["kind"] == KIND)
    spec["replicas"], spec["workers"]["gpusPerWorker"] = 2, 1
    await stage.apply(items)
    await stage.until(name, holds(conditions.READY), "running")
    first = (await stage.pod(name, 0))["metadata"]["name"]

    async def has_saved() -> bool:
        return "saved" in await stage.log(first)

    await eventually("the script's first checkpoint", has_saved)
    lost = await stage.delete_pod(name, 1)
    status = await stage.complete(name)
    assert status.mesh is not None
    assert status.mesh.generation == 2
    assert (await stage.pod(name, 1))["metadata"]["name"] != lost
    assert "resumed after step" in await stage.log(first), "rank 0 went on from what the script itself had saved"
    await stage.delete(name)
