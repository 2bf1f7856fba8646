"""A job whose checkpoints are in an object store: a server of the S3 API, with credentials in a Secret.

It loses a pod and resumes from the store, where its checkpoints are also listed, verified, copied and exported.
"""

from __future__ import annotations

import base64

import pytest

from tests.e2e.local_stack import tiny
from tests.e2e.test_command_line import run
from tests.s3_server import serving

pytest.importorskip("s3fs", reason="pip install s3fs 'moto[server]'")
pytest.importorskip("moto.server", reason="pip install s3fs 'moto[server]'")
pytestmark = pytest.mark.long
NAME = "in-store"
STEPS = 300  # enough that the job still trains when the pod is deleted after its first checkpoint


@pytest.fixture(scope="module")
def store():
    """The address of the server, which has the bucket `runs`."""
    with serving("runs") as url:
        yield url


def secret():
    data = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    encoded = {name: base64.b64encode(value.encode()).decode() for name, value in data.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s3"}, "data": encoded}


async def test_a_job_resumes_from_the_store_and_its_checkpoints_are_read_there(stage, store, tmp_path):
    _, job = tiny(
        NAME,
        training={"steps": STEPS},
        checkpoint={
            "claimName": None, "everySteps": 20, "keep": 2, "uri": "s3://runs/team",
            "store": {"secretName": "s3", "endpoint": store, "region": "us-east-1"},
        },
    )  # fmt: skip
    await stage.apply([secret(), job])
    await stage.until(NAME, lambda status: status.checkpoint is not None, "a checkpoint is in the store")
    await stage.delete_pod(NAME, 1, grace_seconds=0)
    status = await stage.complete(NAME)
    assert status.restart_count == 1
    assert status.mesh.generation == 2
    assert status.checkpoint.step == STEPS
    assert status.checkpoint.path.startswith(f"s3://runs/team/{NAME}-")
    events = (await run(stage, "events", NAME)).out
    assert "Restarting from the checkpoint of step" in events

    listed = (await run(stage, "checkpoint", "list", NAME)).out
    assert "complete" in listed
    assert status.checkpoint.path.rpartition("/")[0] in listed
    assert "intact" in (await run(stage, "checkpoint", "verify", NAME, "--step", str(STEPS))).out
    chain = (await run(stage, "lineage", NAME)).out
    assert f"job default/{NAME}, Meshwright " in chain
    assert "began with random weights" in chain
    local = tmp_path / "copies"
    done = await run(stage, "checkpoint", "copy", NAME, str(local))
    assert f"copied the checkpoint of step {STEPS}" in done.out
    assert [entry.name for entry in local.iterdir()] == [f"step-{STEPS:08}"]
    assert "intact" in (await run(stage, "checkpoint", "verify", str(local))).out
    await run(stage, "checkpoint", "copy", NAME, "s3://runs/archive", "--step", str(STEPS))
    await another_job_begins_there(stage, store, status.checkpoint.path)
    await run(stage, "export", NAME, "-d", str(tmp_path / "model"))
    assert (tmp_path / "model" / "config.json").is_file()


async def another_job_begins_there(stage, store, source):
    """It saves on a claim. For the store, it only has the source, the Secret and the address."""
    name = "from-store"
    options = {"secretName": "s3", "endpoint": store, "region": "us-east-1"}
    changes = {
        "replicas": 1,
        "workers": {"gpusPerWorker": 1},
        "parallelism": {"tensor": 1},
        "training": {"steps": STEPS + 10},
    }
    await stage.apply(tiny(name, checkpoint={"resumeFrom": source, "store": options}, **changes))
    status = await stage.complete(name)
    assert (status.resumed_from.step, status.resumed_from.path) == (STEPS, source)
    assert status.checkpoint.step == STEPS + 10
    assert f"resumed from {source} (step {STEPS})" in (await run(stage, "lineage", name)).out
    assert f"Resumed from {source} step {STEPS}" in (await run(stage, "events", name)).out
    assert "intact" in (await run(stage, "checkpoint", "verify", NAME, "--step", str(STEPS))).out
