"""What failed ranks leave behind, shown after their pods are gone: from the claim, and from the status without one."""

from __future__ import annotations

import os
import re
import signal

import pytest

from meshwright_cli.demo import setup
from meshwright_local.kube.resources import PODS
from tests.e2e.local_stack import NAMESPACE, eventually, tiny
from tests.e2e.test_command_line import manifest, run

pytestmark = pytest.mark.long

SCRIPT = """
import os, sys, time
print("rank", os.environ["RANK"], "uses token", os.environ["HF_TOKEN"], flush=True)
if os.environ["RANK"] == "2" and os.environ["MESHWRIGHT_GENERATION"] == "1":
    time.sleep(3)
    raise LookupError("no such shard")
time.sleep(600)
"""


def command(name, claim=True, **changes):
    body = {
        "model": None, "data": None, "training": None, "parallelism": {"microBatches": None},
        "runtime": {"command": ["python", "-c", SCRIPT]},
        "workers": {"env": [{"name": "HF_TOKEN", "value": "hidden-value"}], "terminationGracePeriodSeconds": 2},
        "checkpoint": {"everySteps": None, "keep": None} if claim else None, **changes,
    }  # fmt: skip
    return name, body


async def failed_first(stage, name):
    return (await run(stage, "logs", name, "--failed-first")).out


@pytest.mark.parametrize("claim", [True, False])
async def test_a_rank_that_raised_is_shown_after_the_job_has_failed(stage, tmp_path, claim):
    name, body = command(f"raises-{'claim' if claim else 'bare'}", claim, recovery={"maxRestarts": 0})
    file = manifest(tmp_path / "job.yaml", name, **body)
    done = await run(stage, "submit", file, "--wait", "--timeout", "10m", code=1)
    assert "LookupError: no such shard" in done.err
    failure = (await stage.status(name)).last_failure
    assert (failure.cause, failure.worker, failure.rank, failure.generation) == ("RankFailure", 1, 2, 1)
    assert failure.pod == f"{name}-w1-0"
    assert "LookupError: no such shard" in failure.log
    assert "hidden-value" not in failure.log
    assert "uses token ***" in failure.log

    async def pods_are_gone():
        return not await stage.pods(name)

    await eventually("the pods of the failed job are deleted", pods_are_gone)
    shown = await failed_first(stage, name)
    assert "[rank 2] LookupError: no such shard" in shown
    assert "[rank 2] rank 2 uses token ***" in shown
    assert f"pod {name}-w1-0 no longer exists" in shown
    assert ("from claim" in shown) is claim, shown
    assert "hidden-value" not in shown
    pods = (await stage.client.list(PODS, NAMESPACE)).items
    assert not [
        pod for pod in pods if "read" in pod["metadata"]["name"] and not pod["metadata"].get("deletionTimestamp")
    ]
    for verb in ("status", "explain"):
        assert f"logs {name} --failed-first" in " ".join((await run(stage, verb, name)).out.split())


async def started(stage, name, rank, worker, generation=1):
    found = re.findall(
        rf"rank started rank={rank} generation={generation} pid=(\d+)", await stage.log(f"{name}-w{worker}-0")
    )
    return int(found[0])


async def test_ranks_that_were_killed_or_hung_are_shown_after_their_pod_was_replaced(stage):
    name = "hangs"
    await stage.apply(tiny(name, training={"steps": 100000}, recovery={"hangTimeoutSeconds": 30}))
    reached = await stage.trained(name, 5)
    os.kill(await started(stage, name, 3, 1), signal.SIGKILL)
    await stage.until(name, lambda s: s.last_failure is not None and s.last_failure.path, "recorded", 150)
    killed = (await stage.status(name)).last_failure
    assert (killed.rank, killed.cause) == (3, "RankFailure")
    assert "killed by SIGKILL" in killed.message

    await stage.until(name, lambda s: s.mesh.generation == 2 and s.ready_ranks == "4/4", "again", 150)
    await stage.trained(name, reached + 15)  # in this generation: before its first step, ranks may take longer
    os.kill(await started(stage, name, 2, 1, 2), signal.SIGSTOP)
    await stage.until(name, lambda s: s.last_failure.cause == "Hang" and s.last_failure.path, "recorded", 150)
    hung = (await stage.status(name)).last_failure
    assert (hung.rank, hung.generation) == (2, 2)
    # The others wait for it, in a collective.
    await stage.until(name, lambda s: s.mesh.generation == 3 and s.ready_ranks == "4/4", "trains again", 150)
    await stage.delete_pod(name, 1)
    await stage.until(name, lambda s: s.mesh.generation == 4 and s.ready_ranks == "4/4", "replaced", 150)
    shown = await failed_first(stage, name)
    assert f"pod {name}-w1-0 no longer exists" in shown
    assert "phase load:" in shown
    assert "from claim hangs" in shown
    root = await setup.local_checkpoint_path(stage.client, NAMESPACE, name, hung.path)
    root = root.parent
    waiting = sorted(path for path in root.glob("generation-00000002-rank-*") if path.name[-1] in "01")
    assert any("in train" in (path / "stacks.txt").read_text() for path in waiting), list(root.iterdir())
    await stage.delete(name)
