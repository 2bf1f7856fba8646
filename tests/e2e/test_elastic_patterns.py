"""Elastic jobs with real ranks under what clusters do to them: lost nodes, autoscalers, GitOps, other jobs.

A replica is one rank in one pod, and the numbers are fp64, so that sums over another number of ranks round alike.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from meshwright.api.conditions import RESCALING, is_true
from meshwright.api.objects import KubeObject
from meshwright.api.parsing import parse_spec
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_local.control_socket import send
from meshwright_local.kube.client import APPLY_PATCH
from meshwright_local.kube.resources import JOBS
from meshwright_worker.expected_digest import expected_digest
from tests.e2e.local_stack import NAMESPACE, Stage, Test, endless, merged, tiny
from tests.e2e.test_elastic import uids


def small(name: str, replicas: int, **changes: Any) -> list[KubeObject]:
    """A job of 1 to 4 replicas of one rank each, whose losses do not depend on its length. `finish` ends it."""
    optimizer = {"learningRate": 0.001, "minLearningRate": 0.001}
    training = {
        "globalBatchSize": 24,
        "sequenceLength": 64,
        "precision": "fp64",
        "optimizer": optimizer,
    }
    spec: dict[str, Any] = {
        "replicas": replicas,
        "elastic": {"maxReplicas": 4, "replacementSeconds": 2, "pauseSeconds": 10},
        "model": {"hiddenSize": 64, "intermediateSize": 128},
        "training": training,
        "parallelism": {"tensor": 1, "microBatches": 2},
        "workers": {"gpusPerWorker": 1},
        "checkpoint": {"everySteps": 20},
    }
    make = tiny if "steps" in changes.get("training", {}) else endless
    return make(name, **merged(spec, changes))


def runs_with(replicas: int, ranks: int) -> Test:
    """The test that all ranks of this many replicas train, and that no resize is in progress."""

    def trains(status: ParallelTrainingJobStatus) -> bool:
        settled = not is_true(status.conditions, RESCALING)
        return settled and (status.replicas, status.ready_ranks) == (replicas, f"{ranks}/{ranks}")

    return trains


async def runs(stage: Stage, name: str, replicas: int, ranks: int = 0) -> ParallelTrainingJobStatus:
    """Wait until the job trains with this many replicas, of one rank unless told, and has taken a step so."""
    await stage.until(name, runs_with(replicas, ranks or replicas), f"training with {replicas} replicas")
    step = await stage.trained(name, 1)
    await stage.trained(name, step + 1)
    return await stage.status(name)


async def scale(stage: Stage, name: str, replicas: int) -> None:
    """Write the scale subresource, as `kubectl scale` and the HorizontalPodAutoscaler do: read it, write it back."""
    path = JOBS.path(NAMESPACE, name, "scale")
    found = await stage.client.request("GET", path)
    found["spec"]["replicas"] = replicas
    await stage.client.request("PUT", path, body=found)


async def finish(stage: Stage, name: str) -> dict[str, Any]:
    """Let the job end soon, and return the state that it ends with: every sample was used once."""
    steps = await stage.trained(name, 1) + 20
    await stage.client.patch(JOBS, name, {"spec": {"training": {"steps": steps}}}, NAMESPACE)
    await stage.complete(name)
    saved = await stage.saved(name)
    spec = parse_spec(await stage.client.get(JOBS, name, NAMESPACE))
    assert spec.data is not None
    assert spec.training is not None
    assert (saved["step"], saved["samples"]) == (steps, steps * spec.training.global_batch_size)
    assert saved["digest"] == await asyncio.to_thread(expected_digest, spec.data, spec.training, steps)
    await stage.delete(name)
    return saved


async def final_loss(stage: Stage, steps: int) -> float:
    """The loss that a job of one replica that is never resized ends with."""
    await stage.apply(small("fixed", 1, elastic=None, training={"steps": steps}, parallelism={"microBatches": 4}))
    await stage.complete("fixed", 300)
    loss = float.fromhex((await stage.saved("fixed"))["loss"])
    await stage.delete("fixed")
    return loss


@pytest.mark.long
async def test_a_job_survives_its_only_spare_node_and_uses_the_next_one(stage: Stage) -> None:
    """Two replicas of two pods fill the cluster. Its last node vanishes with its pods, and another one joins."""
    parallelism = {"tensor": 2, "pipeline": 2, "microBatches": 2}
    await stage.apply(small("nodes", 2, parallelism=parallelism, workers={"gpusPerWorker": 2}))
    await runs(stage, "nodes", 2, 8)
    control, last = stage.directory / "cluster", (await stage.pod("nodes", 3))["spec"]["nodeName"]
    kept = {name: uid for name, uid in (await uids(stage, "nodes")).items() if "-w0-" in name or "-w1-" in name}
    await asyncio.to_thread(send, control, action="remove", node=last)
    try:
        status = await runs(stage, "nodes", 1, 4)
        assert await uids(stage, "nodes") == kept
        assert status.restarts_toward_limit == 0
        assert status.elastic is not None
        assert status.elastic.wanted_replicas == 2
    finally:
        await asyncio.to_thread(send, control, action="add", node=last, rack=last.partition("-")[0])
    await runs(stage, "nodes", 2, 8)
    assert kept.items() < (await uids(stage, "nodes")).items()
    await finish(stage, "nodes")


@pytest.mark.long
async def test_edits_of_the_scale_subresource_leave_samples_and_losses_as_they_are(stage: Stage) -> None:
    await stage.apply(small("scaled", 1))
    await runs(stage, "scaled", 1)
    first = await uids(stage, "scaled")
    for generation, size in enumerate((4, 2, 3), start=2):
        await scale(stage, "scaled", size)
        status = await runs(stage, "scaled", size)
        assert status.mesh is not None
        assert (status.mesh.generation, status.mesh.cause) == (generation, "Rescaled")
        assert first.items() < (await uids(stage, "scaled")).items()
    assert [(r.cause, r.count) for r in status.restarts] == [("Rescaled", 3)]
    saved = await finish(stage, "scaled")
    expected = await final_loss(stage, saved["step"])
    assert float.fromhex(saved["loss"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
async def test_a_job_of_higher_priority_takes_a_replica_and_gives_it_back(stage: Stage) -> None:
    """Four replicas of two GPUs fill the cluster; the other job needs two."""
    wide = {"parallelism": {"tensor": 2, "microBatches": 2}, "workers": {"gpusPerWorker": 2}}
    await stage.apply(small("low", 4, **wide))
    await runs(stage, "low", 4, 8)
    await stage.apply(tiny("high", replicas=1, priority=10, training={"steps": 60}))
    # Of 24 sequences, three replicas cannot have equal micro-batches that fit: then the next smaller size trains.
    await stage.until("low", lambda s: s.replicas in (2, 3), "fewer replicas")
    status = await stage.complete("high")
    assert status.restart_count == 0
    await stage.delete("high")
    status = await runs(stage, "low", 4, 8)
    assert status.restarts_toward_limit == 0
    assert {r.cause for r in status.restarts} == {"Rescaled"}
    await finish(stage, "low")


@pytest.mark.long
async def test_an_autoscaler_and_a_gitops_tool_do_not_fight_over_the_size(stage: Stage) -> None:
    """Both write every few seconds. The tool applies a manifest without `replicas`, as a manager of its own."""
    claim, job = small("shared", 1)
    wanted = copy.deepcopy(job)
    del wanted["spec"]["replicas"]

    async def sync() -> None:
        path, manager = JOBS.path(NAMESPACE, "shared"), {"fieldManager": "gitops", "force": "true"}
        await stage.client.request("PATCH", path, params=manager, body=wanted, content_type=APPLY_PATCH)

    await stage.apply([claim])
    await sync()
    await runs(stage, "shared", 1)
    await scale(stage, "shared", 2)
    status = await runs(stage, "shared", 2)
    assert status.mesh is not None
    assert status.mesh.generation == 2
    before = await uids(stage, "shared")
    for _ in range(6):
        await scale(stage, "shared", 2)
        await sync()
        await asyncio.sleep(0.5)
    after = await runs(stage, "shared", 2)
    assert after.mesh == status.mesh
    assert (after.restarts, await uids(stage, "shared")) == (status.restarts, before)
    for size in (3, 2, 3, 2, 3):  # flaps within its bounds faster than a job can follow
        await scale(stage, "shared", size)
        await sync()
        await asyncio.sleep(0.5)
    flapped = await runs(stage, "shared", 3)
    assert flapped.mesh is not None
    assert {r.cause for r in flapped.restarts} == {"Rescaled"}
    assert flapped.mesh.generation <= 2 + 5
    assert before.items() < (await uids(stage, "shared")).items()
    owners = (await stage.client.get(JOBS, "shared", NAMESPACE))["metadata"]["managedFields"]
    gitops = next(entry for entry in owners if entry["manager"] == "gitops")
    assert "f:replicas" not in gitops["fieldsV1"]["f:spec"]
    await finish(stage, "shared")


@pytest.mark.long
async def test_a_batch_that_follows_the_replicas_takes_consecutive_samples(stage: Stage) -> None:
    """Steps of one replica take 8 sequences, and steps of two replicas 16, with twice the learning rate."""
    scaled = {"scaledBatch": {"replicas": 1, "learningRate": "Linear"}}
    await stage.apply(small("batch", 1, elastic=scaled, training={"globalBatchSize": 8}))
    await runs(stage, "batch", 1)
    first = await uids(stage, "batch")
    await scale(stage, "batch", 2)
    await runs(stage, "batch", 2)
    assert first.items() < (await uids(stage, "batch")).items()
    steps = await stage.trained("batch", 1) + 20
    await stage.client.patch(JOBS, "batch", {"spec": {"training": {"steps": steps}}}, NAMESPACE)
    await stage.complete("batch")
    saved = await stage.saved("batch")
    spec = parse_spec(await stage.client.get(JOBS, "batch", NAMESPACE))
    assert spec.data is not None
    assert spec.training is not None
    doubled, rest = divmod(saved["samples"] - 8 * steps, 8)
    assert saved["step"] == steps
    assert rest == 0
    assert 20 <= doubled < steps
    # The samples are those of as many sequences in batches of one size.
    assert saved["digest"] == await asyncio.to_thread(expected_digest, spec.data, spec.training, steps + doubled)
    await stage.delete("batch")
