"""Elastic jobs with real ranks: they are scaled, lose a node without a spare, and train on the samples of any run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshwright.api import labels
from meshwright.api.conditions import RESCALING, is_true
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_cli.demo.observer import gauge
from meshwright_local.cluster import LEAF_LABEL
from meshwright_local.control_socket import send
from meshwright_local.kube.resources import JOBS
from tests.e2e.local_stack import NAMESPACE, Stage, Test, endless, eventually, tiny

RACK = {LEAF_LABEL: "rack1"}
"""Two nodes, each of which takes one replica."""
CONSTANT = {"minLearningRate": 0.003}
"""The learning rate of the tiny job: it does not decay."""
LAST_STEPS = 20


def elastic(name: str, replicas: int, **fields: Any) -> list[dict[str, Any]]:
    """A job that trains until `finish`, at a constant learning rate: its losses do not depend on its length."""
    return endless(
        name,
        replicas=replicas,
        elastic={"maxReplicas": 2, "replacementSeconds": 5, "pauseSeconds": 10, **fields},
        workers={"nodeSelector": RACK},
        training={"optimizer": CONSTANT},
    )


def runs_with(replicas: int) -> Test:
    """The test that all ranks of this many replicas train, and that no resize is in progress."""

    def holds(status: ParallelTrainingJobStatus) -> bool:
        ranks = 2 * replicas
        settled = not is_true(status.conditions, RESCALING)
        return settled and status.replicas == replicas and status.ready_ranks == f"{ranks}/{ranks}"

    return holds


async def runs(stage: Stage, name: str, replicas: int) -> ParallelTrainingJobStatus:
    """Wait until the job trains with this many replicas, and has taken a step with them."""
    status = await stage.until(name, runs_with(replicas), f"training with {replicas} replicas")
    step = await step_of(stage, name)

    async def goes_on() -> bool:
        return await step_of(stage, name) > step

    await eventually(f"{name} is past step {step} with {replicas} replicas", goes_on)
    return status


async def step_of(stage: Stage, name: str) -> int:
    """The last step that ranks have finished, by their own metrics: the status follows every ten seconds."""
    addresses = [pod.get("status", {}).get("podIP") for pod in await stage.pods(name)]
    pages = [await stage.scrape(f"http://{address}:{labels.METRICS_PORT}/metrics") for address in addresses if address]
    return max((int(gauge(page, "ptj_step") or 0) for page in pages), default=0)


async def scale(stage: Stage, name: str, replicas: int) -> None:
    """Do what `kubectl scale` and the HorizontalPodAutoscaler do."""
    await stage.client.patch(JOBS, name, {"spec": {"replicas": replicas}}, NAMESPACE, subresource="scale")


async def uids(stage: Stage, name: str) -> dict[str, str]:
    """Name of each pod that has not ended -> its uid."""
    ended = ("Succeeded", "Failed")
    pods = [p for p in await stage.pods(name) if p["status"].get("phase") not in ended]
    return {p["metadata"]["name"]: p["metadata"]["uid"] for p in pods if "deletionTimestamp" not in p["metadata"]}


async def finish(stage: Stage, name: str) -> dict[str, Any]:
    """Let the job end soon, and return the state that it ends with."""
    steps = await step_of(stage, name) + LAST_STEPS
    await stage.client.patch(JOBS, name, {"spec": {"training": {"steps": steps}}}, NAMESPACE)
    await stage.complete(name)
    saved = await stage.saved(name)
    await stage.delete(name)
    return saved


async def uninterrupted(stage: Stage, steps: int) -> dict[str, Any]:
    """The state that a job without resizes ends with after these steps.

    It has one rank and saves once: however many steps the other one took while it waited, this takes a fraction.
    """
    changes: dict[str, Any] = {
        "parallelism": {"tensor": 1, "microBatches": 4},
        "workers": {"gpusPerWorker": 1},
        "checkpoint": {"everySteps": 100_000},
    }
    await stage.apply(tiny("fixed", replicas=1, training={"steps": steps, "optimizer": CONSTANT}, **changes))
    await stage.complete("fixed", 300)
    saved = await stage.saved("fixed")
    await stage.delete("fixed")
    return saved


async def same_run(stage: Stage, saved: dict[str, Any]) -> None:
    """Check that every sample was used once, and that the losses are those of a run without resizes."""
    expected = await uninterrupted(stage, saved["step"])
    assert saved["samples"] == saved["step"] * 8
    assert (saved["samples"], saved["digest"]) == (expected["samples"], expected["digest"])
    assert float.fromhex(saved["loss"]) == pytest.approx(float.fromhex(expected["loss"]), rel=1e-2)


async def test_a_job_is_scaled_up_and_down_in_the_pods_that_stay(stage: Stage) -> None:
    await stage.apply(elastic("scaled", 1))
    await runs(stage, "scaled", 1)
    first = await uids(stage, "scaled")
    await scale(stage, "scaled", 2)
    status = await runs(stage, "scaled", 2)
    assert status.mesh is not None
    assert (status.mesh.cause, status.mesh.generation, status.restarts_toward_limit) == ("Rescaled", 2, 0)
    both = await uids(stage, "scaled")
    assert len(both) == 2
    assert first.items() < both.items()
    await scale(stage, "scaled", 1)
    status = await runs(stage, "scaled", 1)
    assert await uids(stage, "scaled") == first
    assert [(r.cause, r.count) for r in status.restarts] == [("Rescaled", 2)]
    await same_run(stage, await finish(stage, "scaled"))


@pytest.mark.long
async def test_a_job_trains_on_without_a_lost_node_and_grows_when_it_returns(stage: Stage) -> None:
    await stage.apply(elastic("shrunk", 2))
    await runs(stage, "shrunk", 2)
    before = await uids(stage, "shrunk")
    lost = await stage.pod("shrunk", 0)
    control = stage.directory / "cluster"
    await asyncio.to_thread(send, control, action="power-off", node=lost["spec"]["nodeName"])
    try:
        status = await runs(stage, "shrunk", 1)
        assert status.restarts_toward_limit == 0
        survivors = await uids(stage, "shrunk")
    finally:
        await asyncio.to_thread(send, control, action="recover", node=lost["spec"]["nodeName"])
    del before[lost["metadata"]["name"]]
    assert survivors == before
    status = await runs(stage, "shrunk", 2)
    assert before.items() < (await uids(stage, "shrunk")).items()
    assert status.mesh is not None
    assert status.mesh.cause == "Rescaled"
    await same_run(stage, await finish(stage, "shrunk"))


@pytest.mark.long
async def test_a_job_trains_on_at_once_with_the_replica_that_is_left(stage: Stage) -> None:
    """With `onLoss: Shrink`. The worker that is lost ran rank 0.

    By default, the decision is tested in `tests/operator/test_elastic.py`, and ranks that go on in another world by the
    job that is scaled.
    """
    await stage.apply(elastic("halved", 2, onLoss="Shrink", replacementSeconds=600))
    await runs(stage, "halved", 2)
    before = await uids(stage, "halved")
    del before[await stage.delete_pod("halved", 0, grace_seconds=0)]

    def half(status: ParallelTrainingJobStatus) -> bool:
        return (status.replicas, status.ready_ranks) == (1, "2/2")  # it has begun to grow again

    status = await stage.until("halved", half, "training with the replica that is left")
    assert status.mesh is not None
    assert (status.mesh.generation, status.mesh.cause, status.restarts_toward_limit) == (2, "PodLost", 0)
    assert before.items() <= (await uids(stage, "halved")).items()
    status = await runs(stage, "halved", 2)
    assert status.mesh is not None
    assert status.mesh.cause == "Rescaled"
    assert before.items() < (await uids(stage, "halved")).items()
    await same_run(stage, await finish(stage, "halved"))
