"""Plans, layouts, placements and refusals as JSON, under names that belong to the golden files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshwright.api.parsing import InvalidSpecError, parse_spec
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.errors import DoesNotFitError, PlanError
from meshwright.planner.placement import Placement
from meshwright.planner.plan import Plan
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.errors import NothingFitsError
from meshwright_cli.plan.inventory_file import NodeEntry, nodes_of
from tests.golden.planner.clusters import CLUSTERS, GPU

REFUSALS: Mapping[type, str] = {
    InvalidSpecError: "invalid spec",
    PlanError: "no plan",
    DoesNotFitError: "no room",
    NothingFitsError: "nothing fits",
    ValueError: "value",
}
"""Errors by what goldens call them."""


def refusal(error: BaseException) -> dict[str, Any]:
    """What of an error is no text.

    Raises:
        BaseException: the error itself, where it is none that a caller is told to expect.
    """
    known = next((kind for kind in type(error).__mro__ if kind in REFUSALS), None)
    if known is None:
        raise error
    record: dict[str, Any] = {"refused": REFUSALS[known]}
    if isinstance(error, PlanError):
        record |= {"reason": error.reason, "cluster": error.depends_on_cluster}
    if isinstance(error, DoesNotFitError):
        record |= {
            "short": error.unplaced_workers,
            "fits": error.replicas_that_fit,
            "kept": error.blocked_by_kept_workers,
        }
    return record


def attempt(decide: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """(decisions, text) of a call, or of its refusal."""
    try:
        return decide()
    except ValueError as error:
        return refusal(error), str(error)


def spec_of(job: dict[str, Any]) -> ParallelTrainingJobSpec:
    """The parsed spec of a job."""
    return parse_spec(job)


def inventory_of(name: str, spec: ParallelTrainingJobSpec | None = None) -> Inventory:
    """A cluster of `clusters.py` as a job sees it."""
    content = CLUSTERS[name]
    if isinstance(content, dict):
        nodes = [item for item in content["items"] if item["kind"] == "Node"]
        pods = [item for item in content["items"] if item["kind"] == "Pod"]
    else:
        pairs = [pair for entry in content for pair in nodes_of(NodeEntry.model_validate(entry), GPU)]
        nodes, pods = [node for node, _ in pairs], [pod for _, pod in pairs if pod is not None]
    if spec is None:
        return Inventory.from_objects(nodes, pods)
    workers = spec.workers
    return Inventory.from_objects(
        nodes,
        pods,
        gpu_resource=workers.gpu_resource,
        node_selector=workers.node_selector,
        tolerations=workers.tolerations,
    )


def plan_record(plan: Plan) -> dict[str, Any]:
    """What a plan decides, and its estimate in short."""
    status = plan.to_status().model_dump(mode="json", by_alias=True, exclude_none=True)
    record = {key: value for key, value in status.items() if key not in ("summary", "reasons")}
    return {**record, "estimate": estimate_record(plan.estimate) if plan.estimate else None}


def estimate_record(estimate: Estimate) -> list[float]:
    """Step, throughput, use and memory: enough to tell that nothing changed."""
    memory = estimate.memory
    return [estimate.seconds, estimate.mfu, estimate.bubble, memory.total, memory.states, memory.stage]


def found_record(found: Candidate) -> list[Any]:
    """A layout of the search over every degree, with its price; choices have the names that a job gives them."""
    used = found.strategy
    after = found.seconds_after_node_loss
    return [
        f"TP{used.tensor} CP{used.context} PP{used.pipeline} EP{used.expert} DP{used.data}",
        f"{used.micro_batches}x{used.micro_batch_size}",
        f"{used.schedule.value} {used.virtual_stages}",
        f"ZeRO-{used.zero_stage} {used.checkpointing.value} {used.optimizer_offload.value}",
        f"{used.context_method.value}{' sequence' if used.sequence_parallel else ''}",
        list(used.layer_split) if used.layer_split is not None else None,
        found.seconds,
        found.estimate.mfu,
        found.estimate.memory.total,
        after if after < float("inf") else None,
    ]


def placement_record(placement: Placement) -> dict[str, Any]:
    """Where every worker runs, what that costs and how good it is."""
    crossings = placement.crossings
    return {
        "nodes": " ".join(placement.nodes[worker] for worker in sorted(placement.nodes)),
        "cost": placement.cost,
        "bound": placement.bound,
        "straddling": [crossings.straddling_tensor_groups, crossings.straddling_replicas],
        "spares": list(placement.spares),
    }
