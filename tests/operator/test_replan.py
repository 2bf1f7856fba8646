"""`elastic.replan` in virtual time: a job with too few nodes for one replica is planned anew, and returns."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from meshwright.api.parsing import parse_spec
from meshwright.api.status import PlanStatus
from meshwright.rules.elastic import spec_of_plan
from meshwright_operator.kube.cache import key_of
from tests.operator.support import JOBS, job
from tests.operator.test_elastic import FOREVER, edit, events, pods, set_ready
from tests.operator.world import World


def replanning(name: str, **spec: Any) -> dict[str, Any]:
    """One replica of two stages. Each stage takes a node of two GPUs."""
    elastic = {"replan": True, "pauseSeconds": 30, **spec.pop("elastic", {})}
    return job(
        name,
        **{
            "replicas": 1,
            "parallelism": {"tensor": 2, "pipeline": 2, "microBatches": 4},
            "training": {"steps": 10**6, "globalBatchSize": 64, "sequenceLength": 64},
            "checkpoint": {"claimName": "shared"},
            "elastic": elastic,
            **spec,
        },
    )


def layout(world: World, name: str) -> tuple[int, int, int]:
    """Tensor, pipeline and data degree in status."""
    plan = world.status(name)["plan"]
    return plan["tensor"], plan["pipeline"], plan["data"]


async def running(seed: int, nodes: int = 2, **spec: Any) -> World:
    """A cluster in which the job trains."""
    world = World(seed, nodes=nodes, work=FOREVER)
    world.submit(replanning("job", **spec))
    await world.run(30)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    return world


def lose(world: World, worker: int) -> str:
    """The node of a worker goes down; its name."""
    node: str = next(pod.node for pod in world.pods("job") if pod.worker == worker and not pod.terminal)
    set_ready(world, node, ready=False)
    return node


@pytest.mark.parametrize("worker", [0, 1])
async def test_a_job_continues_without_a_stage_and_returns_to_its_layout(worker: int) -> None:
    world = await running(1)
    before = world.status("job")["plan"]
    assert layout(world, "job") == (2, 2, 1)
    survivor = next(pod.name for pod in world.pods("job") if pod.worker != worker)
    node = lose(world, worker)
    spent = set()
    for _ in range(90):
        await world.run(1)
        spent.add(world.status("job")["goodput"]["cause"])
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert "Rescaling" in spent, spent
    status = world.status("job")
    assert layout(world, "job") == (2, 1, 1)
    assert (status["plan"]["replanned"], status["plan"]["worldSize"], status["readyRanks"]) == (True, 2, "2/2")
    assert pods(world, "job") == {survivor}
    assert status["mesh"]["cause"] == "Rescaled"
    assert "TP 2 x PP 2 x DP 1" in status["plan"]["reasons"][0]
    (note,) = events(world, "job", "Rescaled")
    assert note.message == (
        "Continues as TP 2 on 2 GPUs instead of TP 2 x PP 2 on 4 GPUs, because the nodes that are left do not fit "
        "1 replica in the full layout"
    )
    set_ready(world, node, ready=True)
    await world.run(240)
    after = world.status("job")
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    kept = ("tensor", "pipeline", "data", "context", "expert", "microBatches", "schedule", "zeroStage", "worldSize")
    assert {name: after["plan"].get(name) for name in kept} == {name: before.get(name) for name in kept}
    assert "replanned" not in after["plan"]
    assert after["plan"]["activationCheckpointing"] == before["activationCheckpointing"]
    assert survivor in pods(world, "job")
    assert len(pods(world, "job")) == 2
    assert not world.true("job", "Rescaling")


async def test_a_replanned_job_keeps_its_plan_until_its_size_changes() -> None:
    world = await running(2)
    lose(world, 0)
    await world.run(90)
    plan = world.status("job")["plan"]
    (survivor,) = pods(world, "job")
    world.crash(survivor)
    await world.run(120)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert world.status("job")["plan"] == plan


async def test_a_job_starts_with_what_it_can_be_planned_for() -> None:
    world = await running(3, nodes=1)
    assert layout(world, "job") == (2, 1, 1)
    assert world.status("job")["mesh"]["cause"] == "Start"
    assert world.status("job")["elastic"]["fullPlan"]["pipeline"] == 2


async def test_without_replan_or_below_its_smallest_number_of_gpus_a_job_waits() -> None:
    for elastic in ({"replan": False}, {"minGpus": 3}):
        world = await running(4, elastic=elastic)
        lose(world, 0)
        await world.run(300)
        assert not world.true("job", "Ready")
        assert layout(world, "job") == (2, 2, 1)


async def test_an_operator_that_restarts_keeps_the_full_plan() -> None:
    world = await running(5)
    full = world.status("job")["elastic"]["fullPlan"]
    node = lose(world, 1)
    await world.run(90)
    assert world.status("job")["elastic"]["fullPlan"] == full
    world.cluster.watchers.clear()
    world.operators = [world.operator()]
    await world.run(60)
    assert layout(world, "job") == (2, 1, 1)
    set_ready(world, node, ready=True)
    await world.run(240)
    assert layout(world, "job") == (2, 2, 1)
    assert world.status("job")["elastic"]["fullPlan"] == full


async def test_a_budget_of_gpus_is_planned_anew_for_what_is_left() -> None:
    world = await running(6, nodes=4, gpus=8, parallelism={"tensor": 2})
    assert layout(world, "job") == (2, 1, 4)
    lost = [lose(world, 0), lose(world, 1), lose(world, 2)]
    await world.run(90)
    assert layout(world, "job") == (2, 1, 1)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    for node in lost:
        set_ready(world, node, ready=True)
    await world.run(240)
    assert layout(world, "job") == (2, 1, 4)
    assert world.status("job")["elastic"]["wantedReplicas"] == 4


async def test_an_edit_while_replanned_restarts_the_job_with_the_nodes_that_are_left() -> None:
    world = await running(7)
    node = lose(world, 0)
    await world.run(90)
    edit(world, "job", workers={"image": "meshwright/worker:2", "gpusPerWorker": 2})
    await world.run(180)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert layout(world, "job") == (2, 1, 1)
    assert world.status("job")["observedGeneration"] == 2
    set_ready(world, node, ready=True)
    await world.run(240)
    assert layout(world, "job") == (2, 2, 1)


async def test_replan_that_is_turned_on_while_the_job_waits() -> None:
    world = await running(8, elastic={"replan": False})
    lose(world, 0)
    await world.run(120)
    assert not world.true("job", "Ready")
    edit(world, "job", elastic={"replan": True})
    await world.run(120)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert layout(world, "job") == (2, 1, 1)


async def test_a_job_on_gpus_of_the_catalog_is_planned_anew() -> None:
    world = World(9, nodes=2, work=FOREVER)
    for name, obj in world.nodes.items():
        labeled = copy.deepcopy(obj)
        labeled["metadata"]["labels"] |= {
            "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
            "nvidia.com/gpu.memory": "81559",
        }
        world.cluster.stamp(labeled)
        world.nodes[name] = labeled
        world.operators[0].cache.put_node(labeled)
        world.operators[0].nodes_changed()
    world.submit(replanning("job"))
    await world.run(30)
    assert "estimatedStepMilliseconds" in world.status("job")["plan"]
    node = lose(world, 0)
    await world.run(90)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert layout(world, "job") == (2, 1, 1)
    set_ready(world, node, ready=True)
    await world.run(240)
    assert layout(world, "job") == (2, 2, 1)
    assert world.true("job", "Ready"), world.condition("job", "Ready")


@pytest.mark.parametrize(
    "changes",
    [
        {"parallelism": {"tensor": 2, "pipeline": 2, "schedule": "ZBV", "layerSplit": [1, 1, 1, 1], "microBatches": 4}},
        {"parallelism": {"tensor": 2, "pipeline": 2, "schedule": "Automatic", "activationLimit": 2, "microBatches": 8}},
        {"parallelism": {"tensor": 2, "pipeline": 2, "rematerialize": True, "tensorOverlap": True, "microBatches": 4}},
        {"parallelism": {"tensor": 1, "pipeline": 2, "context": 2, "contextMethod": "Ulysses", "microBatches": 2}},
        {
            "replicas": 4,
            "elastic": {"replan": True, "minReplicas": 4},
            "parallelism": {
                "tensor": 1,
                "pipeline": 1,
                "zeroStage": 3,
                "microBatches": 1,
                "dataParallel": {"strategy": "HYBRID_SHARD", "shardSize": 2},
            },
        },
        {
            "replicas": 4,
            "elastic": {"replan": True, "minReplicas": 4},
            "parallelism": {"tensor": 1, "pipeline": 1, "microBatches": 1, "dataParallel": {"compression": "PowerSGD"}},
        },
    ],
)
async def test_ranks_accept_what_a_job_is_planned_anew_for(changes: dict[str, Any]) -> None:
    """Whatever a spec states about its full layout."""
    world = await running(10, **changes)
    (operator,) = world.operators
    full = world.status("job")["plan"]
    assert full["worldSize"] == 4
    node = lose(world, 0)
    await world.run(90)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    plan = world.status("job")["plan"]
    assert (plan["replanned"], plan["worldSize"]) == (True, 2)
    obj = world.cluster.objects[f"{JOBS}/job"]
    current = PlanStatus.model_validate(plan)
    spec = spec_of_plan(parse_spec(obj), current)
    assert operator.planner.running_plan(key_of(obj), spec, current).problems(spec) == []
    set_ready(world, node, ready=True)
    await world.run(240)
    after = world.status("job")["plan"]
    for name in ("tensor", "pipeline", "data", "context", "schedule", "zeroStage", "microBatches", "worldSize"):
        assert after.get(name) == full.get(name), name
