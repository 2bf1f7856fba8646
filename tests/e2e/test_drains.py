"""Nodes that drain under real ranks: no step is repeated, and every sample is used once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshwright.api.parsing import parse_spec
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_local.kube.resources import JOBS, NODES
from meshwright_worker.expected_digest import expected_digest
from tests.e2e.local_stack import NAMESPACE, Stage, tiny
from tests.e2e.test_elastic import RACK, elastic, finish, runs, runs_with, uids

RARE = {"everySteps": 100_000}
"""No periodic checkpoint: only one that is saved for the drain."""


async def cordon(stage: Stage, node: str, *, cordoned: bool) -> None:
    await stage.client.patch(NODES, node, {"spec": {"unschedulable": cordoned}})


async def nothing_repeated(job: list[dict[str, Any]], status: ParallelTrainingJobStatus, saved: dict[str, Any]) -> None:
    spec = parse_spec(job[-1])
    assert spec.data is not None
    assert spec.training is not None
    assert saved["digest"] == await asyncio.to_thread(expected_digest, spec.data, spec.training, saved["step"])
    assert saved["samples"] == saved["step"] * 8
    assert status.goodput is not None
    assert "RedoneSteps" not in {entry.cause for entry in status.goodput.booked}


@pytest.mark.long
async def test_an_elastic_job_continues_without_a_draining_node(stage: Stage) -> None:
    job = elastic("shrinks", 2)
    job[-1]["spec"]["checkpoint"].update(RARE)
    await stage.apply(job)
    await runs(stage, "shrinks", 2)
    node = (await stage.pod("shrinks", 1))["spec"]["nodeName"]
    await cordon(stage, node, cordoned=True)
    try:
        await runs(stage, "shrinks", 1)
    finally:
        await cordon(stage, node, cordoned=False)
    step = (await runs(stage, "shrinks", 2)).step or 0
    status = await stage.until("shrinks", lambda s: (s.step or 0) > step, "training")
    assert {entry.cause for entry in status.restarts} == {"Rescaled"}
    await nothing_repeated(job, status, await finish(stage, "shrinks"))


@pytest.mark.long
async def test_a_worker_saves_and_moves_off_a_draining_node(stage: Stage) -> None:
    job = tiny("moves", replicas=1, workers={"nodeSelector": RACK}, training={"steps": 100_000}, checkpoint=RARE)
    await stage.apply(job)
    await stage.until("moves", lambda s: s.ready_ranks == "2/2", "2/2 ranks")
    before = await uids(stage, "moves")
    node = (await stage.pod("moves", 0))["spec"]["nodeName"]
    await cordon(stage, node, cordoned=True)
    try:
        status = await stage.until(
            "moves",
            lambda s: s.ready_ranks == "2/2" and s.mesh is not None and s.mesh.cause == "NodeDrained",
            "moved",
        )
        assert [entry.cause for entry in status.restarts] == ["NodeDrained"]
        assert (await stage.pod("moves", 0))["spec"]["nodeName"] != node
        assert not before.items() & (await uids(stage, "moves")).items()
    finally:
        await cordon(stage, node, cordoned=False)
    steps = (status.step or 0) + 40
    await stage.client.patch(JOBS, "moves", {"spec": {"training": {"steps": steps}}}, NAMESPACE)
    status = await stage.complete("moves")
    await nothing_repeated(job, status, await stage.saved("moves"))


@pytest.mark.long
@pytest.mark.parametrize("worker", [0, 1])
async def test_the_replacement_of_an_elastic_jobs_worker_starts_beside_it(stage: Stage, worker: int) -> None:
    job = elastic("beside", 2)
    job[-1]["spec"]["checkpoint"].update(RARE)
    del job[-1]["spec"]["workers"]["nodeSelector"]
    await stage.apply(job)
    await runs(stage, "beside", 2)
    before = await uids(stage, "beside")
    node = (await stage.pod("beside", worker))["spec"]["nodeName"]
    await cordon(stage, node, cordoned=True)
    try:
        moving = await stage.until("beside", lambda s: s.elastic is not None and s.elastic.next_placement, "moving")
        assert moving.ready_ranks == "4/4", "its ranks train meanwhile"
        status = await stage.until(
            "beside",
            lambda s: runs_with(2)(s) and s.mesh is not None and s.mesh.cause == "NodeDrained",
            "moved",
        )
        after = await uids(stage, "beside")
        assert len(after) == 2
        assert before.items() & after.items() == {(f"beside-w{1 - worker}-0", before[f"beside-w{1 - worker}-0"])}
    finally:
        await cordon(stage, node, cordoned=False)
    assert [(entry.cause, entry.count) for entry in status.restarts] == [("NodeDrained", 1)]
    step = status.step or 0
    status = await stage.until("beside", lambda s: (s.step or 0) > step, "training")
    saved = await finish(stage, "beside")
    await nothing_repeated(job, status, saved)
