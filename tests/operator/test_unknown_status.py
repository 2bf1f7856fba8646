"""An older version reads and writes a status that a newer one has written."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from meshwright.api.objects import KubeObject
from meshwright.api.parsing import parse_status
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_operator.controller import status_patch
from meshwright_operator.kube.client import ApiError
from meshwright_operator.kube.parsed_jobs import ParsedJobs
from tests.operator.memory import _merge
from tests.operator.support import job
from tests.operator.world import World

NEWER_CONDITION = {
    "type": "Audited",
    "status": "True",
    "reason": "Audited",
    "message": "",
    "lastTransitionTime": "2026-01-02T03:04:05Z",
}


def make_newer(status: KubeObject) -> None:
    """What a newer version adds: fields in every object, a condition, and a value that this version does not know."""
    status["newList"], status["newText"] = [{"a": 1}], "x"
    status["plan"] |= {"schedule": "ScheduleOfTheFuture", "microPipelines": 3}
    status["mesh"]["newCounter"] = 4
    status["placement"]["newRanges"] = ["0-3"]
    status["placement"]["workers"][0]["newRow"] = "r7"
    status["conditions"].append(NEWER_CONDITION)
    next(c for c in status["conditions"] if c["type"] == "Ready")["newSeverity"] = "Low"


def newer_parts(status: KubeObject) -> list[Any]:
    ready = next(c for c in status["conditions"] if c["type"] == "Ready")
    return [
        status.get("newList"),
        status.get("newText"),
        status["plan"].get("schedule"),
        status["plan"].get("microPipelines"),
        status["mesh"].get("newCounter"),
        status["placement"].get("newRanges"),
        status["placement"]["workers"][0].get("newRow"),
        NEWER_CONDITION in status["conditions"],
        ready.get("newSeverity"),
    ]


KEPT = [[{"a": 1}], "x", "ScheduleOfTheFuture", 3, 4, ["0-3"], "r7", True, "Low"]


async def world_of_a_newer_version() -> World:
    world = World(seed=1, nodes=6, work=1e9)
    world.submit(job("train", training={"steps": 10**6, "globalBatchSize": 24, "sequenceLength": 64}))
    await world.run(30)
    assert world.true("train", "Ready")
    make_newer(world.status("train"))
    world.cluster.watchers.clear()
    world.operators = [world.operator()]
    return world


async def test_a_rollback_restarts_nobody_and_loses_nothing() -> None:
    world = await world_of_a_newer_version()
    before = sorted(pod.name for pod in world.pods())
    await world.run(60)
    assert sorted(pod.name for pod in world.pods()) == before
    assert newer_parts(world.status("train")) == KEPT
    assert world.status("train")["step"] > 20


async def test_what_is_unknown_goes_with_the_object_that_it_was_about() -> None:
    world = await world_of_a_newer_version()
    world.crash(world.pods()[0].name)
    await world.run(60)
    assert world.true("train", "Ready")
    status = world.status("train")
    assert status["newText"] == "x"
    assert status["plan"]["microPipelines"] == 3
    assert status["mesh"]["generation"] == 2
    assert "newCounter" not in status["mesh"]
    assert NEWER_CONDITION in status["conditions"]


async def test_steady_state_writes_nothing_beside_an_unknown_status() -> None:
    world = await world_of_a_newer_version()
    await world.run(30)
    for agent in world.agents.values():
        agent.hung = True  # no progress, so nothing to write
    await world.run(30)
    writes = world.cluster.writes
    await world.run(30)
    assert world.cluster.writes == writes


async def test_an_older_crd_rejects_what_is_kept_and_gets_the_rest() -> None:
    world = await world_of_a_newer_version()
    merge_patch = world.cluster.merge_patch

    async def strict(path: str, body: KubeObject) -> KubeObject:
        if path.endswith("/status"):
            target = copy.deepcopy(world.cluster.objects[path.removesuffix("/status")])
            _merge(target, {"status": body["status"]})
            if target["status"]["plan"].get("schedule") == "ScheduleOfTheFuture":
                raise ApiError(422, "Invalid", "status.plan.schedule: Unsupported value")
        return await merge_patch(path, body)

    world.cluster.merge_patch = strict  # type: ignore[method-assign]
    await world.run(60)
    assert world.status("train")["step"] > 20
    assert "schedule" not in world.status("train")["plan"]


@pytest.mark.parametrize("known", [{"step": 3}, {"step": 3, "tokensPerSecond": 7}])
def test_what_this_version_knows_is_deleted(known: dict[str, Any]) -> None:
    old = {"metadata": {"name": "train"}, "status": {**known, "unknown": 1, "loss": ["damaged"]}}
    status = parse_status(old)
    status.step = status.tokens_per_second = None
    new = dict(status.wire())
    after = copy.deepcopy(old["status"])
    _merge(after, status_patch.status_patch(old, new, ParsedJobs()))
    assert "step" not in after
    assert "tokensPerSecond" not in after
    assert after["unknown"] == 1
    assert ParallelTrainingJobStatus.model_validate({k: v for k, v in after.items() if k != "unknown"}).loss == ""
