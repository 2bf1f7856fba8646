"""A status that somebody edited: numbers at their limits, texts of any shape, conditions that were replaced.

Any user with rights to the status can write what the schema admits. It may cost that job its plan or its restarts, but
the operator must not stop, must not repeat a finished run, and must write only what the schema admits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from meshwright.api.base import MAX_SAFE_INTEGER
from meshwright.api.objects import KubeObject
from meshwright.api.status import MAX_APPLIED_SPEC, MAX_SUCCEEDED_WORKERS, ParallelTrainingJobStatus
from meshwright.protocol.messages import MAX_GENERATION
from meshwright_operator.decide.incarnations import NO_NAME_LEFT
from meshwright_operator.decide.succeeded_workers import MAX_INDEX, disjoint_ranges, parse_workers
from meshwright_operator.kube.pod_info import MAX_INCARNATION
from tests.operator.memory import MemoryCluster
from tests.operator.support import JOBS, PODS
from tests.operator.test_gang_races import command, small
from tests.operator.world import World

Change = Callable[[KubeObject], object]


class StrictCluster(MemoryCluster):
    """An API server that accepts only a status that the schema admits."""

    def update(self, path: str, obj: KubeObject, kind: str = "MODIFIED") -> KubeObject:
        if f"{JOBS}/" in path and obj.get("status"):
            ParallelTrainingJobStatus.model_validate(obj["status"])
        return super().update(path, obj, kind)


async def trained(work: float = 1e6, **fields: Any) -> World:
    """A world in which a gang of two trains, or has completed."""
    world = World(1, nodes=6, work=work)
    world.cluster.__class__ = StrictCluster
    world.submit({**small("train", 2), **fields})
    await world.run(20)
    return world


def edit(world: World, change: Change) -> None:
    """Somebody changes the status, and another operator process starts."""
    obj = copy.deepcopy(world.cluster.objects[f"{JOBS}/train"])
    change(obj["status"])
    world.cluster.update(f"{JOBS}/train", obj)
    world.cluster.watchers.clear()
    world.operators = [world.operator()]


def at(*path: str | int, value: Any) -> Change:
    """Set one value."""

    def change(status: KubeObject) -> None:
        target: Any = status
        for part in path[:-1]:
            target = target[part]
        target[path[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        at("restartCount", value=MAX_SAFE_INTEGER),
        at("restarts", value=[{"cause": "PodLost", "count": MAX_SAFE_INTEGER}]),
        at("restarts", value=[{"cause": f"Other{number}", "count": 1} for number in range(16)]),
        at("mesh", "failures", value=MAX_SAFE_INTEGER),
        at("mesh", "attempts", value=MAX_SAFE_INTEGER),
        at("mesh", "generation", value=MAX_SAFE_INTEGER),
        at("mesh", "generation", value=MAX_GENERATION),
        at("activeSeconds", value=MAX_SAFE_INTEGER),
        at("appliedSpec", value="[" * MAX_APPLIED_SPEC),
        at("mesh", "succeededWorkers", value=",".join(["2-65535"] * 4095)),
    ],
    ids=lambda change: "",
)
async def test_a_gang_restarts_whatever_its_status_says(change: Change) -> None:
    world = await trained()
    edit(world, change)
    world.crash("train-w0-0")
    await world.run(200)
    assert world.true("train", "Ready")
    assert len(world.pods()) == 2
    assert 1 < world.status("train")["mesh"]["generation"] <= MAX_GENERATION


def test_ranges_that_overlap_are_read_once() -> None:
    text = ",".join(f"{first}-65535" for first in range(3000))
    assert len(text) <= MAX_SUCCEEDED_WORKERS
    assert sum(map(len, disjoint_ranges(text))) == MAX_INDEX + 1
    assert parse_workers("7,0-3,2-5,1") == {0, 1, 2, 3, 4, 5, 7}


async def test_metrics_are_exported_whatever_a_status_says() -> None:
    world = await trained(work=5)
    assert world.true("train", "Complete")
    edit(world, at("readyRanks", value="²/²"))
    await world.run(5)
    operator = world.operators[0]
    operator.metrics.registry.register(operator.jobs)
    assert b"ptj_job_status_condition{" in operator.metrics.exposition()


@pytest.mark.parametrize("incarnation", [MAX_INCARNATION, MAX_SAFE_INTEGER])
async def test_a_worker_without_a_pod_name_gets_no_pods_but_a_condition(incarnation: int) -> None:
    world = await trained()
    edit(world, at("placement", "workers", 0, "incarnation", value=incarnation))
    await world.run(120)
    stalled = world.condition("train", "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", NO_NAME_LEFT)
    assert "status.placement.workers" in stalled["message"]
    assert not world.pods()
    assert sum(verb == "create" for verb, path in world.cluster.requests if path.startswith(PODS)) == 2
    edit(world, at("placement", "workers", 0, "incarnation", value=7))
    await world.run(700)
    assert world.true("train", "Ready")


async def test_a_pod_with_the_last_name_is_to_be_deleted() -> None:
    world = await trained()
    last = copy.deepcopy(world.cluster.objects[f"{PODS}/train-w0-0"])
    name = f"train-w0-{MAX_INCARNATION}"
    last["metadata"]["name"] = name
    last["status"] = {"phase": "Failed"}
    world.cluster.put(f"{PODS}/{name}", last)
    await world.run(60)
    assert f"Delete pod {name}" in world.condition("train", "Stalled")["message"]
    world.crash(name)
    await world.run(700)
    assert world.true("train", "Ready")


@pytest.mark.parametrize("number", [9, 16])
async def test_conditions_of_other_controllers_leave_room_for_the_operators_own(number: int) -> None:
    others = [
        {"type": f"Other{n}", "status": "True", "reason": "X", "lastTransitionTime": "2026-01-02T03:04:05Z"}
        for n in range(number)
    ]
    world = World(1, nodes=6, work=1e6)
    world.cluster.__class__ = StrictCluster
    world.submit({**small("train", 2), "status": {"conditions": others}})
    await world.run(20)
    assert world.true("train", "Ready")
    assert len(world.status("train")["conditions"]) == 16


@pytest.mark.parametrize("body", [small("train", 2), command("train", 2)], ids=["runtime", "command"])
async def test_a_finished_run_whose_conditions_were_replaced_is_not_trained_again(body: KubeObject) -> None:
    """A merge patch of another controller replaces the list."""
    world = await trained(work=5, spec=body["spec"])
    assert world.true("train", "Complete")
    for found in world.pods():
        world.crash(found.name)
    await world.run(5)
    time = "2026-01-02T03:04:05Z"
    other = {"type": "Audited", "status": "True", "reason": "X", "message": "", "lastTransitionTime": time}
    edit(world, at("conditions", value=[other]))
    await world.run(60)
    assert len(world.started) == 2, "each worker trained once"
    assert not world.pods()
    assert world.condition("train", "Complete")["status"] == "Unknown"
    assert world.condition("train", "Ready")["reason"] == "ResultLost"
    writes = world.cluster.writes
    await world.run(60)
    assert world.cluster.writes == writes
