"""The operator's own path: ranked plans of a spec, where they are placed, and what becomes of them in a running job.

Of each job: the plans it could get, the one it gets on what is free, and then, as far as it has room, what follows a
lost node, a restart of the whole gang, more and fewer replicas, pods that another scheduler placed, and measured steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cost_model import Calibration, StepMeasurement, cost_model_for, recalibrate
from meshwright.planner.placement import Placement, PlacingOptions, PreviousPlacement, nodes_to_free, place, with_spares
from meshwright.planner.plan import make_plan, make_plans
from meshwright.planner.plan_and_place import map_plan_ranks, place_plan
from tests.golden.files import check
from tests.golden.planner.clusters import Draws
from tests.golden.planner.jobs import job, merged
from tests.golden.planner.records import attempt, inventory_of, placement_record, plan_record, spec_of
from tests.planner.builders import choose_plan
from tests.tiers import mostly_long

JOBS: Mapping[str, dict[str, Any]] = {
    "dense": job("llama-3-8b", replicas=4),
    "dense zero 2": job("llama-3-8b", replicas=4, parallelism={"zeroStage": 2}, workers={"gpusPerWorker": 4}),
    "dense small workers": job("llama-3.2-1b", replicas=8, workers={"gpusPerWorker": 1}),
    "pipeline": job(
        "llama-2-13b", replicas=4, parallelism={"pipeline": 4, "zeroStage": 1}, workers={"gpusPerWorker": 4}
    ),
    "two workers a tensor group": job("llama-3-8b", parallelism={"tensor": 8}, workers={"gpusPerWorker": 4}),
    "context": job("llama-3-8b", parallelism={"context": 4}, training={"sequenceLength": 32768}),
    "mixture": job("deepseek-v2-lite", replicas=4, parallelism={"zeroStage": 2}, workers={"gpusPerWorker": 4}),
    "islands": job("llama-3-8b", replicas=4, training={"outer": {"method": "DiLoCo"}}),
    "command": job(
        "",
        replicas=6,
        parallelism={"tensor": 4, "pipeline": 2},
        workers={"gpusPerWorker": 4},
        **{"model": None, "data": None, "training": None, "runtime": {"command": ["python", "train.py"]}},
    ),
}
ON = (
    *("4 h100 nodes", "h100 racks", "h100 holes", "h100 whole nodes taken", "h100 spines with holes", "nvl72 holes"),
    *("a100 holes", "mixed", "unknown gpus with memory", "full"),
)


def record(name: str, cluster: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """(what happens, (decisions, text)) for one job on one cluster."""
    spec = spec_of(JOBS[name])
    inventory = inventory_of(cluster, spec)
    plans = attempt(lambda: _ranked(spec, inventory))
    yield "plans", plans
    if isinstance(plans[0], dict):
        return
    chosen, placement = choose_plan(spec, inventory)
    if placement is None:
        free = nodes_to_free(chosen, inventory)
        yield "free", ([list(free.nodes), free.gpus, free.workers] if free else None, None)
        wide = PlacingOptions(tensor_within="rack")
        yield "rack-wide", attempt(lambda: _placed(place(chosen, inventory, options=wide)))
        return
    yield "chosen", (_chosen(placement), [chosen.reasons, placement.notes])
    yield "spares", _placed(with_spares(placement, inventory, 2))
    yield from _happens(name, cluster, spec, inventory, placement)


def _ranked(spec: Any, inventory: Inventory) -> tuple[Any, Any]:
    plans = make_plans(spec, inventory)
    return [plan_record(plan) for plan in plans], [plan.reasons for plan in plans]


def _chosen(placement: Placement) -> dict[str, Any]:
    return {"plan": plan_record(placement.plan), "placement": placement_record(placement)}


def _placed(placement: Placement) -> tuple[Any, Any]:
    seconds = placement.plan.estimate.seconds if placement.plan.estimate else None
    return {**placement_record(placement), "seconds": seconds}, placement.notes


def _happens(
    name: str, cluster: str, spec: Any, inventory: Inventory, first: Placement
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """What becomes of a placed job."""
    draws = Draws(f"{name} on {cluster}")
    plan, status = first.plan, first.to_status("job", {})
    cost_model = cost_model_for(spec, plan.architecture, inventory)
    before = PreviousPlacement.of_status(status)
    lost = draws.choice(sorted(set(first.nodes.values())))
    left = replace(inventory, nodes={key: node for key, node in inventory.nodes.items() if key != lost})
    keep = {worker: node for worker, node in first.nodes.items() if node != lost}
    yield "lost node", attempt(lambda: _placed(place_plan(plan, left, cost_model, keep, before)))
    yield "restart", attempt(lambda: _placed(place_plan(plan, left, cost_model, None, before)))
    for replicas in (2 * spec.replicas, spec.replicas // 2):
        resized = spec.model_copy(update={"replicas": replicas})

        def again(resized: Any = resized) -> tuple[Any, Any]:
            now = make_plan(resized, inventory, plan.to_status())
            kept = place_plan(now, inventory, cost_model_for(resized, now.architecture, inventory), None, before)
            return {"plan": plan_record(now), **_placed(kept)[0]}, [now.reasons, kept.notes]

        yield f"{replicas} replicas", attempt(again)
    given = dict(zip(sorted(first.nodes), sorted(first.nodes.values(), key=lambda _: draws.below(1000)), strict=True))
    stay = {0: 0} if draws.below(2) else {}

    def mapped() -> tuple[Any, Any]:
        found, slots = map_plan_ranks(plan, inventory, cost_model, given, stay)
        return {**_placed(found)[0], "slots": [slots[pod] for pod in sorted(slots)]}, found.notes

    yield "given nodes", attempt(mapped)
    if cost_model is not None and plan.estimate is not None:
        yield "slower than estimated", attempt(lambda: _learned(spec, inventory, first))


def _learned(spec: Any, inventory: Inventory, first: Placement) -> tuple[Any, Any]:
    """The plan when this one took 1.3 times as long as estimated."""
    plan, shipped = first.plan, Calibration()
    cost_model = cost_model_for(spec, plan.architecture, inventory)
    assert cost_model is not None
    assert plan.estimate is not None
    measured = StepMeasurement(cost_model, plan.strategy, 1.3 * plan.estimate.seconds, 200)
    learned = recalibrate(shipped, [measured])
    constants = {
        gpu: [round(value, 9) for value in (one.compute, one.communication, one.host)]
        for gpu, one in learned.constants.items()
    }
    chosen, _ = choose_plan(spec, inventory, learned)
    decided = {key: value for key, value in plan_record(chosen).items() if "estimate" not in key}
    return {"constants": constants, "plan": decided}, None


OFTEN = ("h100 holes", "nvl72 holes", "full")
TIERS = ["operator-plans", "operator-plans-long"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tier", mostly_long(TIERS, TIERS[0].__eq__))
def test_operator_plans(tier: str) -> None:
    found = {
        f"{name} on {cluster}: {what}": pair
        for name in JOBS
        for cluster in ON
        if (cluster in OFTEN) == (tier == TIERS[0])
        if not ("nvl72" in cluster and JOBS[name]["spec"]["workers"]["gpusPerWorker"] > 4)
        for what, pair in record(name, cluster)
    }
    check(f"planner/{tier}.jsonl", {name: pair[0] for name, pair in found.items()})
    check(f"planner/{tier}-text.jsonl", {name: pair[1] for name, pair in found.items() if pair[1]})


def test_a_running_job_keeps_its_plan_where_the_cluster_changed() -> None:
    """Also with no node at all: losing nodes changes no layout."""
    found, text = {}, {}
    for name, wanted in JOBS.items():
        spec = spec_of(wanted)
        plan, _ = choose_plan(spec, inventory_of("h100 racks", spec))
        for where in ("4 h100 nodes", "t4", "no gpus"):
            for change, patch in {
                "as before": {},
                "other zero": {"parallelism": {"zeroStage": 3}},
                "other batch": {"training": {"globalBatchSize": 128}},
                "TP given": {"parallelism": {"tensor": 4}},
                "PP 3": {"parallelism": {"pipeline": 3}},
            }.items():
                if name == "command" and "training" in patch:
                    continue
                changed = spec_of({**wanted, "spec": merged(wanted["spec"], patch)})

                def kept(changed: Any = changed, where: str = where, plan: Any = plan) -> tuple[Any, Any]:
                    now = make_plan(changed, inventory_of(where, changed), plan.to_status())
                    return plan_record(now), now.reasons

                case = f"{name}, {change}, on {where}"
                found[case], text[case] = attempt(kept)
    check("planner/kept-plans.jsonl", found)
    check("planner/kept-plans-text.jsonl", text)
