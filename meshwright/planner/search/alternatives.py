"""Compares the best layout with its neighbors, in which one decision differs.

A neighbor's estimated memory and time answer questions such as "why not TP 4".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.api.training import ActivationCheckpointing
from meshwright.figures import counted
from meshwright.planner.cost.memory import worst_stage
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.expand import TIE_TOLERANCE, estimate_cost
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.units import GIB, count_gpus


@dataclass(frozen=True, slots=True)
class RejectedAlternative:
    """A neighbor of the best layout, and the reason against it."""

    change: str
    """As in "TP 4 instead of 8"."""
    reason: str
    slower: float | None
    """Its step time relative to the best layout's. None if it does not fit or is impossible."""

    @property
    def sentence(self) -> str:
        """The change and the reason."""
        return f"{self.change}: {self.reason}"


def alternatives_of(request: SearchRequest, chosen: Candidate) -> tuple[RejectedAlternative, ...]:
    """Return the layouts that differ from `chosen` in one decision, with the reason against each."""
    return tuple(
        _compare(request, chosen, change, strategy) for change, strategy in _single_changes(request, chosen.strategy)
    )


def _single_changes(request: SearchRequest, winner: Strategy) -> Iterator[tuple[str, Strategy]]:
    """Yield strategies with a degree halved or doubled, or with other memory savings."""
    pins = request.pins
    for name, label in (("tensor", "TP"), ("pipeline", "PP"), ("context", "CP")):
        if getattr(pins, name) is not None:
            continue
        now = getattr(winner, name)
        for other in (now // 2, now * 2):
            if other >= 1 and other != now and (name != "context" or request.techniques.context):
                changed = traded_for_data(winner, name, now, other)
                if changed is not None:
                    yield f"{label} {other} instead of {now}", changed
    if pins.zero_stage is None and winner.shard_ranks > 1:
        for stage in request.techniques.zero_stages:
            if stage != winner.zero_stage:
                yield f"ZeRO-{stage} instead of {winner.zero_stage}", replace(winner, zero_stage=stage)
    if pins.checkpointing is None:
        for recompute_option in request.techniques.checkpointing:
            if recompute_option is not winner.checkpointing:
                yield (
                    f"{recompute_text(recompute_option)} instead of {recompute_text(winner.checkpointing)}",
                    replace(winner, checkpointing=recompute_option),
                )


def traded_for_data(winner: Strategy, name: str, now: int, other: int) -> Strategy | None:
    """Return the strategy with another degree and as many GPUs. None if the batch or replicas do not divide evenly."""
    numerator = winner.data * now
    if numerator % other:
        return None
    data = numerator // other
    sequences = winner.data * winner.micro_batches * winner.micro_batch_size
    if sequences % (data * winner.micro_batch_size) or (winner.context * data) % winner.expert:
        return None
    if data % winner.settings.islands:
        # Islands have full replicas.
        return None
    changes = {
        name: other,
        "data": data,
        "micro_batches": sequences // data // winner.micro_batch_size,
        "layer_split": None,
    }
    try:
        return replace(winner, **changes)  # type: ignore[arg-type]
    except ValueError:
        return None


def _compare(request: SearchRequest, best: Candidate, change: str, strategy: Strategy) -> RejectedAlternative:
    impossible = _why_impossible(request, strategy)
    if impossible:
        return RejectedAlternative(change, impossible, None)
    try:
        memory = worst_stage(request.work, strategy, request.runtime)
    except ValueError as error:
        return RejectedAlternative(change, str(error), None)
    byte_limit = request.memory_limit(strategy.world_size)
    if memory.total > byte_limit:
        reason = f"needs {memory.total / GIB:.1f} of {byte_limit / GIB:.1f} GiB on stage {memory.stage}"
        return RejectedAlternative(change, reason, None)
    other = Candidate(strategy, estimate_cost(request, strategy), request.node)
    ratio = other.seconds / best.seconds
    if ratio < 1.0:
        why = (
            "within the accuracy of estimates, and less simple"
            if ratio * TIE_TOLERANCE >= 1
            else "but does not match the request"
        )
        return RejectedAlternative(change, f"{1 - ratio:.1%} faster, {why}", ratio)
    if ratio - 1 < 5e-4:
        return RejectedAlternative(change, "no faster", ratio)
    return RejectedAlternative(change, f"{ratio - 1:.1%} slower: {_largest_increase(best, other)}", ratio)


def _why_impossible(request: SearchRequest, strategy: Strategy) -> str:
    model, domain = request.work.model, request.domain
    if strategy.tensor > domain:
        return f"leaves the NVLink domain of {count_gpus(domain)}"
    if model.heads % strategy.tensor or (model.kv_heads % strategy.tensor and strategy.tensor % model.kv_heads):
        return f"does not divide {counted(model.heads, 'head')} and {counted(model.kv_heads, 'key-value head')}"
    if not request.techniques.replicates_kv_heads and model.kv_heads % strategy.tensor:
        return f"does not divide {counted(model.kv_heads, 'key-value head')}"
    if strategy.pipeline > model.layers:
        return f"has more stages than {counted(model.layers, 'layer')}"
    if strategy.micro_batches < strategy.pipeline:
        return f"leaves {counted(strategy.micro_batches, 'micro-batch')} for {strategy.pipeline} stages"
    if outside := request.outside_elastic(strategy):
        return outside
    if not request.techniques.allow(request.work, strategy):
        return "is a combination that the runtime does not execute"
    return ""


def _largest_increase(best: Candidate, other: Candidate) -> str:
    """The part of the step that increased the most."""
    names = {
        "compute": "matrix products run less well",
        "recompute": "more recomputation",
        "tensor": "more tensor-parallel traffic",
        "context": "more context-parallel traffic",
        "expert": "more all-to-all",
        "pipeline": "more sends between stages",
        "bubble": "a longer bubble",
        "data": "more gradient reduction",
        "optimizer": "a longer optimizer step",
        "offload": "more offloading",
        "host": "more launches",
    }
    before, after = best.estimate.time, other.estimate.time
    largest_part = max(names, key=lambda name: float(getattr(after, name) - getattr(before, name)))
    return f"{names[largest_part]}, {getattr(after, largest_part) - getattr(before, largest_part):+.3f} s"


def recompute_text(recompute: ActivationCheckpointing) -> str:
    """Return the recomputation as text."""
    return (
        "no recomputation" if recompute is ActivationCheckpointing.NONE else f"{recompute.value.lower()} recomputation"
    )
