"""The answer for people."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.cli.plan.answer import Answer
from meshwright.planner.reasons import amount_text
from meshwright.planner.search.explain import reasons
from meshwright.planner.show import placement_lines, summary_line

MAX_DRAWN = 64
"""Nodes of a placement that is drawn node by node."""
SLIGHT = 0.01
"""Part of a placement's cost that is not worth a line."""


def lines(answer: Answer) -> Iterator[str]:
    """The whole text, line by line."""
    plan = answer.plan
    workers = len(plan.workers)
    yield f"Plan: {plan.summary}, {_count(plan.micro_batches, 'micro-batch', 'es')} per replica and step"
    ranks, each = _count(plan.layout.world_size, "rank"), _count(plan.gpus_per_worker, "GPU")
    yield f"      {ranks} in {_count(workers, 'worker')} of {each}"
    yield from _estimate(answer)
    yield ""
    yield "Why"
    yield from (f"  - {reason}" for reason in plan.reasons)
    yield ""
    yield from _placement(answer)
    if answer.lost:
        yield ""
        yield "Not chosen"
        yield from (f"  - {one.sentence}" for one in answer.lost)
    yield from _wider(answer)
    if answer.what_if:
        yield ""
        yield "With a better cluster"
        yield from (f"  - {one.sentence}" for one in answer.what_if)
    if answer.inventory.warnings:
        yield ""
        yield "Warnings"
        yield from (f"  - {warning}" for warning in answer.inventory.warnings)


def _estimate(answer: Answer) -> Iterator[str]:
    estimate, memory = answer.plan.estimate, answer.plan.memory
    if estimate is not None:
        yield (
            f"      {estimate.seconds:.3g} s per step, {estimate.tokens_per_second:,.0f} tokens/s, "
            f"MFU {estimate.mfu:.0%} (estimated)"
        )
    if memory is not None:
        yield f"      {amount_text(memory.total)} on the fullest rank, stage {memory.stage} (estimated)"


def _placement(answer: Answer) -> Iterator[str]:
    placement = answer.placement
    if placement is None:
        yield "Placement: none now"
        yield f"  {answer.pending}"
        return
    quality = "proved best" if placement.gap == 0 else f"at most {placement.gap:.1%} above the best possible"
    plan = answer.plan.to_status()
    status = placement.to_status("job", {})
    yield f"Placement: cost {placement.cost:g}, {quality}"
    yield f"  {summary_line(plan, status)}"
    if answer.leftovers > SLIGHT * placement.cost:
        yield f"  what others hold on these nodes makes {answer.leftovers / placement.cost:.0%} of the cost"
    if len(set(placement.nodes.values())) <= MAX_DRAWN:
        gpus = {node.name: node.capacity.gpus for node in answer.inventory.nodes.values()}
        yield from (f"  {line}" for line in placement_lines(plan, status, gpus))
    if placement.spares:
        yield f"  spare nodes: {', '.join(placement.spares)}"
    yield from (f"  note: {note}" for note in placement.notes)


def _wider(answer: Answer) -> Iterator[str]:
    wider = answer.wider
    if wider is None:
        return
    best = wider.best
    yield ""
    yield f"With {answer.gpus} GPUs to use, `replicas` and every degree free"
    yield (
        f"  {best.summary}: {best.seconds:.3g} s per step, {best.estimate.tokens_per_second:,.0f} tokens/s, "
        f"MFU {best.estimate.mfu:.0%}, {best.estimate.memory.total / 2**30:.1f} GiB"
    )
    yield from (f"  - {reason}" for reason in reasons(wider))
    others = [one for one in wider.alternatives if one is not best][:5]
    if others:
        yield "  other good ones (time, GPUs, after a lost node)"
        for one in others:
            after = one.after_a_lost_node
            left = f"{after:.3g} s" if after < float("inf") else "stops"
            yield f"  - {one.summary}: {one.seconds:.3g} s, {one.estimate.gpus} GPUs, {left}"


def _count(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{plural}"
