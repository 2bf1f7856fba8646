"""Small clusters and jobs for the planner's tests."""

from __future__ import annotations

from typing import Any

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cluster.pod_resources import Resources
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.cost_model import Calibration, cost_model_for
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement import Placement
from meshwright.planner.plan import Plan, make_plans
from meshwright.planner.plan_and_place import place_best

GPU = "nvidia.com/gpu"
LEAF = "network.topology.nvidia.com/leaf"
ACCELERATOR = "network.topology.nvidia.com/accelerator"
ZONE = "topology.kubernetes.io/zone"


def node(
    name: str,
    *,
    gpus: int = 8,
    rack: str | None = "rack0",
    domain: str | None = None,
    zone: str | None = "zone0",
    memory_mib: int | None = 81559,
    labels: dict[str, str] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """A raw Node that is ready and has room for everything but GPUs."""
    stated = {LEAF: rack, ACCELERATOR: domain, ZONE: zone, "nvidia.com/gpu.memory": memory_mib and str(memory_mib)}
    return {
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name}
            | {key: value for key, value in stated.items() if value is not None}
            | (labels or {}),
        },
        "spec": spec,
        "status": {
            "allocatable": {GPU: str(gpus), "cpu": "64", "memory": "512Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def pod(
    name: str, *, gpus: int = 0, on: str | None = None, pinned: str | None = None, phase: str = "Running", **spec: Any
) -> dict[str, Any]:
    """A raw Pod that is bound to `on`, or pinned to `pinned` and waiting."""
    body: dict[str, Any] = {"containers": [{"name": "c", "resources": {"limits": {GPU: str(gpus)}}}], **spec}
    if on:
        body["nodeName"] = on
    if pinned:
        field = {"key": "metadata.name", "operator": "In", "values": [pinned]}
        required = {"nodeSelectorTerms": [{"matchFields": [field]}]}
        body["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return {"metadata": {"name": name}, "spec": body, "status": {"phase": phase}}


def inventory(*nodes: dict[str, Any], pods: tuple[dict[str, Any], ...] = (), **options: Any) -> Inventory:
    """The inventory of these objects."""
    return Inventory.from_objects(nodes, pods, **options)


def racks(count: int, nodes: int, gpus: int, **options: Any) -> list[dict[str, Any]]:
    """`count` racks of `nodes` nodes each, every node an NVLink domain."""
    return [node(f"rack{r}-node{n}", gpus=gpus, rack=f"rack{r}", **options) for r in range(count) for n in range(nodes)]


def plan_of(tensor: int, pipeline: int, data: int, gpus_per_worker: int) -> Plan:
    """A plan by its degrees alone."""
    return Plan(Strategy(tensor, pipeline, data), gpus_per_worker, Resources(gpus=gpus_per_worker, pods=1))


def spec_of(**changes: Any) -> ParallelTrainingJobSpec:
    """A spec with a small model; keyword arguments replace top-level fields."""
    return ParallelTrainingJobSpec.model_validate(
        {
            "replicas": 2,
            "model": {"preset": "tiny"},
            "data": {"source": "PythonStdlib"},
            "training": {"steps": 100, "globalBatchSize": 16, "sequenceLength": 128},
            "workers": {"image": "worker", "gpusPerWorker": 2},
            **changes,
        }
    )


def choose_plan(
    spec: ParallelTrainingJobSpec, inventory: Inventory, calibration: Calibration | None = None
) -> tuple[Plan, Placement | None]:
    """The plan of a job that does not run yet, and its placement, or None if no layout fits now.

    Raises:
        PlanError: the spec's fields contradict each other, or no layout fits this cluster's GPUs.
    """
    plans = make_plans(spec, inventory, calibration)
    try:
        placement = place_best(plans, inventory, cost_model_for(spec, plans[0].architecture, inventory, calibration))
    except DoesNotFitError:
        return plans[0], None
    return placement.plan, placement
