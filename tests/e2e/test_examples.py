"""Examples that are cheap to run, run."""

import pytest

from meshwright.api import conditions
from meshwright.api.labels import KIND
from meshwright_cli import manifest
from meshwright_local.nodeagent.volumes import claim_directory
from tests.e2e.local_stack import EXAMPLES, NAMESPACE, eventually, holds


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


@pytest.mark.long  # commands, and the loss of one: tests/agent/test_agent_commands.py
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


@pytest.mark.long
async def test_own_text_trains_on_files_of_a_claim(stage):
    """As its README says, except for the size: the job starts without files, and goes on once they are there.

    By default, `test_mistakes` has a job whose pattern matches no file of its claim.
    """
    items = manifest.read(EXAMPLES / "own-text" / "job.yaml")
    spec = next(item["spec"] for item in items if item["kind"] == KIND)
    spec["training"] |= {"steps": 20, "globalBatchSize": 4, "sequenceLength": 32}
    spec["replicas"] = 1
    await stage.apply(items)
    status = await stage.until("own-text", holds(conditions.STALLED), "Stalled without text")
    ready = conditions.find(status.conditions, conditions.READY)
    assert ready is not None
    assert ready.reason == "InvalidInput"
    assert "`data.pattern: **/*.txt` matches no file" in ready.message
    directory = await claim_directory(stage.client, NAMESPACE, "own-text")
    (directory / "books").mkdir()
    for number in range(20):
        (directory / "books" / f"{number}.txt").write_text(f"chapter {number}: once upon a time\n" * 100)
    status = await stage.complete("own-text")
    assert (status.step, status.restart_count) == (20, 0)
    await stage.delete("own-text")


@pytest.mark.long
async def test_fine_tuning_names_weights_that_are_not_there(stage):
    """The published model is too large for a test: the job is accepted, and says what is missing.

    By default, `tests/worker/trainer/test_run_inputs.py` has weights that are not there.
    """
    items = manifest.read(EXAMPLES / "fine-tune" / "job.yaml")
    spec = next(item["spec"] for item in items if item["kind"] == KIND)
    # The nodes of a test have no memory for it, and it is not needed to find out.
    spec["model"] = {"layers": 2, "hiddenSize": 32, "intermediateSize": 64, "heads": 2, "vocabSize": 260}
    spec["training"]["precision"] = "fp32"
    await stage.apply(items)
    status = await stage.until("fine-tune", holds(conditions.STALLED), "Stalled without weights")
    ready = conditions.find(status.conditions, conditions.READY)
    assert ready is not None
    assert "`data.tokenizerFile`" in ready.message
    await stage.delete("fine-tune")
