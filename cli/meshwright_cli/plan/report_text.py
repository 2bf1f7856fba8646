"""The report of `meshwright plan` as text."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.figures import format_number
from meshwright.planner.render import render_placement, summary_line
from meshwright.planner.search.explain import reasons
from meshwright.planner.units import GIB, count_gpus, format_bytes
from meshwright_cli.plan.report import PlanReport

MAX_DRAWN = 64
"""Largest number of nodes that are drawn one by one."""
NEGLIGIBLE_SHARE = 0.01
"""Fraction of a placement's cost that is not reported."""


def lines(plan_report: PlanReport) -> Iterator[str]:
    """The lines of the report."""
    plan = plan_report.plan
    workers = len(plan.workers)
    yield f"Plan: {plan.summary}, {_count(plan.strategy.micro_batches, 'micro-batch', 'es')} per replica and step"
    ranks, each = _count(plan.layout.world_size, "rank"), _count(plan.gpus_per_worker, "GPU")
    yield f"      {ranks} in {_count(workers, 'worker')} of {each}"
    yield from _estimate(plan_report)
    yield ""
    yield "Why"
    yield from (f"  - {reason}" for reason in plan.reasons)
    yield ""
    yield from _placement(plan_report)
    if plan.environment:
        yield ""
        yield "Variables of the ranks, from the fabric"
        yield from (f"  {name}={value}" for name, value in plan.environment.items())
    if plan_report.rejected:
        yield ""
        yield "Not chosen"
        yield from (f"  - {one.sentence}" for one in plan_report.rejected)
    yield from _whole_cluster(plan_report)
    if plan_report.what_if:
        yield ""
        yield "With better hardware"
        yield from (f"  - {one.sentence}" for one in plan_report.what_if)
    if plan_report.inventory.warnings:
        yield ""
        yield "Warnings"
        yield from (f"  - {warning}" for warning in plan_report.inventory.warnings)


def _estimate(plan_report: PlanReport) -> Iterator[str]:
    estimate, memory = plan_report.plan.estimate, plan_report.plan.memory
    if estimate is not None:
        yield (
            f"      {format_number(estimate.seconds)} s per step, {estimate.tokens_per_second:,.0f} tokens/s, "
            f"MFU {estimate.mfu:.0%} (estimated)"
        )
    if memory is not None:
        yield f"      {format_bytes(memory.total)} on the fullest rank, stage {memory.stage} (estimated)"


def _placement(plan_report: PlanReport) -> Iterator[str]:
    placement = plan_report.placement
    if placement is None:
        yield "Placement: does not fit now"
        yield f"  {plan_report.pending}"
        return
    plan = plan_report.plan.to_status()
    status = placement.to_status("job", {})
    yield f"Placement: cost {placement.cost:g} ms per step, {_quality(placement.gap)}"
    yield f"  {summary_line(plan, status)}"
    if plan_report.fragmentation_cost > NEGLIGIBLE_SHARE * placement.cost:
        yield (
            f"  {plan_report.fragmentation_cost / placement.cost:.0%} of the cost is due to other pods on these nodes"
        )
    if len(set(placement.nodes.values())) <= MAX_DRAWN:
        gpus = {node.name: node.capacity.gpus for node in plan_report.inventory.nodes.values()}
        yield from (f"  {line}" for line in render_placement(plan, status, gpus))
    if placement.spares:
        yield f"  spare nodes: {', '.join(placement.spares)}"
    yield from (f"  note: {note}" for note in placement.notes)


def _quality(gap: float | None) -> str:
    if gap is None:
        return "the best that was found with the levels of `topology`"
    return "proved optimal" if gap == 0 else f"at most {gap:.1%} above the lower bound"


def _whole_cluster(plan_report: PlanReport) -> Iterator[str]:
    whole_cluster = plan_report.whole_cluster
    if whole_cluster is None:
        return
    best = whole_cluster.best
    yield ""
    all_gpus = "1 GPU" if plan_report.gpus == 1 else f"all {plan_report.gpus} GPUs"
    if plan_report.gpus < sum(node.capacity.gpus for node in plan_report.inventory.usable):
        all_gpus = f"{all_gpus} that fill workers of {plan_report.plan.gpus_per_worker}"
    yield f"With {all_gpus}, and `replicas` and every degree free"
    yield (
        f"  {best.summary}: {format_number(best.seconds)} s per step, {best.estimate.tokens_per_second:,.0f} tokens/s, "
        f"MFU {best.estimate.mfu:.0%}, {best.estimate.memory.total / GIB:.1f} GiB"
    )
    yield from (f"  - {reason}" for reason in reasons(whole_cluster))
    others = [one for one in whole_cluster.alternatives if one is not best][:5]
    if others:
        yield "  other good layouts (step time, GPUs, step time after a lost node)"
        for one in others:
            after = one.seconds_after_node_loss
            left = f"{format_number(after)} s" if after < float("inf") else "stops"
            yield f"  - {one.summary}: {format_number(one.seconds)} s, {count_gpus(one.estimate.gpus)}, {left}"


def _count(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{plural}"
