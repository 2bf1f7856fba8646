"""The report of `meshwright plan` as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.training import ActivationCheckpointing, OptimizerOffload
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.plan import Plan
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.explain import reasons
from meshwright_cli.plan.report import PlanReport


def document(plan_report: PlanReport) -> dict[str, Any]:
    """Plan and placement as in a job's status, with estimates, alternatives and reasons."""
    plan, placement, whole_cluster = plan_report.plan, plan_report.placement, plan_report.whole_cluster
    return {
        "plan": _plan(plan),
        "estimate": _estimate(plan.estimate) if plan.estimate else None,
        "placement": placement.to_status(plan_report.name, {}).model_dump(by_alias=True) if placement else None,
        "placementQuality": (
            {
                "cost": placement.cost,
                "lowerBound": placement.bound,
                "gap": placement.gap,
                "costOfFragmentation": plan_report.fragmentation_cost,
                "notes": [*placement.notes],
            }
            if placement
            else None
        ),
        "estimateUnplaced": _estimate(plan_report.ideal_estimate) if plan_report.ideal_estimate else None,
        "pending": plan_report.pending or None,
        "notChosen": [{"change": o.change, "reason": o.reason, "timeRatio": o.slower} for o in plan_report.rejected],
        "wholeCluster": (
            {
                "gpus": plan_report.gpus,
                "best": _found(whole_cluster.best),
                "reasons": list(reasons(whole_cluster)),
                "asGood": [_found(one) for one in whole_cluster.ranked[1:8]],
                "alternatives": [_found(one) for one in whole_cluster.alternatives],
                "spec": _changes(plan_report.spec, plan_report.proposal) if plan_report.proposal else None,
            }
            if whole_cluster
            else None
        ),
        "whatIf": [{"change": w.change, "speedup": w.speedup, "sentence": w.sentence} for w in plan_report.what_if],
        "warnings": list(plan_report.inventory.warnings),
    }


def _plan(plan: Plan) -> dict[str, Any]:
    return plan.to_status().model_dump(by_alias=True, exclude_none=True)


def _changes(spec: ParallelTrainingJobSpec, proposal: ParallelTrainingJobSpec) -> dict[str, Any]:
    """What to merge into the job's spec to get the layout. Null takes a field away, as in a JSON merge patch."""
    return _patch(_layout_fields(spec), _layout_fields(proposal))


def _layout_fields(spec: ParallelTrainingJobSpec) -> dict[str, Any]:
    fields: dict[str, Any] = spec.model_dump(
        mode="json", by_alias=True, exclude_none=True, include={"replicas", "gpus", "parallelism"}
    )
    if spec.training is not None:
        optimizer = spec.training.optimizer
        path = {} if optimizer.offload_path is None else {"offloadPath": optimizer.offload_path}
        fields["training"] = {
            "activationCheckpointing": spec.training.checkpointing.value,
            "optimizer": {"offload": optimizer.offload.value, **path},
        }
    return fields


def _patch(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """`after`, with null for what only `before` has."""
    gone = dict.fromkeys(name for name in before if name not in after)
    nested = {
        name: _patch(before[name], value)
        for name, value in after.items()
        if isinstance(value, dict) and isinstance(before.get(name), dict)
    }
    return {**after, **nested, **gone}


def _found(found: Candidate) -> dict[str, Any]:
    after = found.seconds_after_node_loss
    return {
        "summary": found.summary,
        "choices": _choices(found.strategy),
        "estimate": _estimate(found.estimate),
        "stepSecondsAfterALostNode": after if after < float("inf") else None,
    }


_OFFLOAD_WORDS = {OptimizerOffload.NONE: "none", OptimizerOffload.CPU: "cpu", OptimizerOffload.FILE: "nvme"}


def _choices(strategy: Strategy) -> dict[str, Any]:
    """A layout in the words of this output, which stay as programs read them."""
    every_k = strategy.checkpointing is ActivationCheckpointing.EVERY_K
    return {
        "tensor": strategy.tensor,
        "sequence_parallel": strategy.sequence_parallel,
        "tensor_overlap": strategy.tensor_overlap,
        "context": strategy.context,
        "context_method": strategy.context_method,
        "ulysses": strategy.ulysses,
        "pipeline": strategy.pipeline,
        "schedule": strategy.schedule_kind.short_name,
        "virtual_stages": strategy.virtual_stages,
        "layer_split": strategy.layer_split,
        "expert": strategy.expert,
        "expert_tensor": strategy.expert_tensor,
        "data": strategy.data,
        "zero_stage": strategy.zero_stage,
        "micro_batch_size": strategy.micro_batch_size,
        "micro_batches": strategy.micro_batches,
        "recompute": strategy.checkpointing.lower(),
        "recompute_every": strategy.checkpoint_every if every_k else 1,
        "recompute_layers": strategy.checkpoint_layers,
        "offload_optimizer": _OFFLOAD_WORDS[strategy.optimizer_offload],
        "offload_activations": "cpu" if strategy.activation_offload else "none",
        "numbers": "fp8" if strategy.fp8 else strategy.precision,
        "settings": asdict(strategy.settings),
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return {
        "stepSeconds": estimate.seconds,
        "stepSecondsByPart": asdict(estimate.time),
        "tokensPerSecond": estimate.tokens_per_second,
        "tokensPerGpuHour": estimate.tokens_per_gpu_hour,
        "mfu": estimate.mfu,
        "bubble": estimate.bubble,
        "gpus": estimate.gpus,
        "memoryBytes": estimate.memory.total,
        "memoryBytesByKind": asdict(estimate.memory),
    }
