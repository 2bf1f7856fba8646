"""A job's own policies with real processes: what their exit codes mean, and whose end completes the run."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.api import conditions
from meshwright.api.conditions import find, is_true
from meshwright.api.labels import API_VERSION, KIND
from meshwright_local.kube.resources import JOBS
from tests.e2e.local_stack import NAMESPACE, NO_TORCH, Stage, eventually, holds

RANK = "import os, sys, time; rank = int(os.environ['RANK'])"


def command(name: str, script: str, **spec: Any) -> dict[str, Any]:
    """A job of two pods with two ranks each that run a line of Python."""
    whole = {
        "replicas": 4,
        "runtime": {"command": ["python", "-c", f"{RANK}; {script}"]},
        "workers": {
            "image": "meshwright-worker:0.1.0",
            "gpusPerWorker": 2,
            "terminationGracePeriodSeconds": 2,
            "env": NO_TORCH,
        },
        **spec,
    }
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": whole}


async def test_an_exit_code_fails_the_job_at_once(stage: Stage) -> None:
    rules = [{"values": [64], "action": "FailJob"}]
    script = "time.sleep(1); sys.exit(64) if rank == 3 else time.sleep(600)"
    await stage.apply([command("damaged", script, recovery={"exitCodes": rules})])

    async def failed() -> bool:
        return is_true((await stage.status("damaged")).conditions, conditions.FAILED)

    await eventually("it has failed", failed, 150)
    status = await stage.status("damaged")
    condition = find(status.conditions, conditions.FAILED)
    assert condition is not None
    assert condition.reason == "FailurePolicy"
    assert "rank 3 exited with code 64" in condition.message
    assert (status.restart_count, status.mesh and status.mesh.generation) == (0, 1)
    await eventually("its pods are gone", lambda: none(stage, "damaged"), 150)


async def none(stage: Stage, name: str) -> bool:
    return not await stage.pods(name)


@pytest.mark.long
async def test_an_ignored_exit_code_is_tried_again_without_end_and_a_counted_one_is_not(stage: Stage) -> None:
    recovery = {"maxRestarts": 1, "exitCodes": [{"values": [75], "action": "Ignore"}]}
    script = "time.sleep(1); sys.exit(75 if int(os.environ['MESHWRIGHT_GENERATION']) < 4 else 1)"
    await stage.apply([command("flaky", script, recovery=recovery)])

    async def failed() -> bool:
        return is_true((await stage.status("flaky")).conditions, conditions.FAILED)

    await eventually("it has failed", failed, 150)
    status = await stage.status("flaky")
    condition = find(status.conditions, conditions.FAILED)
    assert condition is not None
    assert condition.reason == "RestartLimitReached"
    assert status.mesh is not None
    assert status.mesh.generation == 5
    assert (status.restart_count, status.restarts_toward_limit) == (4, 1)


@pytest.mark.long
async def test_the_first_worker_can_complete_the_run(stage: Stage) -> None:
    script = "time.sleep(2 if rank < 2 else 600)"
    await stage.apply([command("led", script, successPolicy="FirstWorker")])
    status = await stage.complete("led")
    assert status.restart_count == 0

    async def only_the_first() -> bool:
        return [pod["status"]["phase"] for pod in await stage.pods("led")] == ["Succeeded"]

    await eventually("the others are stopped", only_the_first, 150)


@pytest.mark.long
async def test_an_edit_restarts_ranks_and_an_impossible_one_does_not(stage: Stage) -> None:
    """By default, `tests/operator/test_operator_edits.py` has both, with agents that are simulated."""
    await stage.apply([command("edited", "time.sleep(600)")])
    await stage.until("edited", holds(conditions.READY), "running")
    first = (await stage.pod("edited", 0))["metadata"]["uid"]
    await stage.client.patch(
        JOBS, "edited", {"spec": {"replicas": 65536, "workers": {"gpusPerWorker": 1024}}}, NAMESPACE
    )
    status = await stage.until("edited", lambda s: not is_true(s.conditions, conditions.READY), "held back", 30)
    ready = find(status.conditions, conditions.READY)
    assert ready is not None
    assert ready.reason in ("NoNodeLargeEnough", "EditDoesNotFit")
    assert "4 ranks are training in generation 1" in ready.message
    assert (await stage.pod("edited", 0))["metadata"]["uid"] == first
    back = {"spec": {"replicas": 2, "workers": {"gpusPerWorker": 2}}}
    await stage.client.patch(JOBS, "edited", back, NAMESPACE)
    status = await stage.until("edited", holds(conditions.READY), "running again")
    assert (status.mesh and status.mesh.cause, status.ready_ranks) == ("SpecChanged", "2/2")
