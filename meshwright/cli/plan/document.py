"""The answer as JSON: everything the text says, for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.cli.plan.answer import Answer
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.plan import Plan
from meshwright.planner.search.explain import reasons
from meshwright.planner.search.found import Found


def document(answer: Answer) -> dict[str, Any]:
    """Plan and placement as they would stand in a job's status, with estimates, alternatives and reasons."""
    plan, placement, wider = answer.plan, answer.placement, answer.wider
    return {
        "plan": _plan(plan),
        "estimate": _estimate(plan.estimate) if plan.estimate else None,
        "placement": placement.to_status("job", {}).model_dump(by_alias=True) if placement else None,
        "placementQuality": (
            {
                "cost": placement.cost,
                "lowerBound": placement.bound,
                "gap": placement.gap,
                "costOfFragmentation": answer.leftovers,
                "notes": [*placement.notes],
            }
            if placement
            else None
        ),
        "estimateUnplaced": _estimate(answer.drawn) if answer.drawn else None,
        "pending": answer.pending or None,
        "notChosen": [{"change": o.change, "reason": o.reason, "timeRatio": o.slower} for o in answer.lost],
        "wholeCluster": (
            {
                "gpus": answer.gpus,
                "best": _found(wider.best),
                "reasons": list(reasons(wider)),
                "asGood": [_found(one) for one in wider.as_good[1:8]],
                "alternatives": [_found(one) for one in wider.alternatives],
                "spec": _changes(answer.proposal) if answer.proposal else None,
            }
            if wider
            else None
        ),
        "whatIf": [{"change": w.change, "speedup": w.speedup, "sentence": w.sentence} for w in answer.what_if],
        "warnings": list(answer.inventory.warnings),
    }


def _plan(plan: Plan) -> dict[str, Any]:
    return plan.to_status().model_dump(by_alias=True, exclude_none=True)


def _changes(spec: ParallelTrainingJobSpec) -> dict[str, Any]:
    """What to write into the job's spec to get the layout."""
    fields: dict[str, Any] = spec.model_dump(
        mode="json", by_alias=True, exclude_none=True, include={"replicas", "parallelism"}
    )
    if spec.training is not None:
        again = spec.training.checkpointing.value
        fields["training"] = {
            "activationCheckpointing": again,
            "optimizer": {"offload": spec.training.optimizer.offload.value},
        }
    return fields


def _found(found: Found) -> dict[str, Any]:
    after = found.after_a_lost_node
    return {
        "summary": found.summary,
        "choices": asdict(found.choices),
        "estimate": _estimate(found.estimate),
        "stepSecondsAfterALostNode": after if after < float("inf") else None,
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
