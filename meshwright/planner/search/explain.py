"""Why a layout won, in the order in which the field decides: tensor, pipeline, data, sequence and context, expert.

Every sentence rests on a price: the winner is compared with the same layout one decision changed, so "why not TP 4"
is answered by what TP 4 would need or take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.api.training import ActivationCheckpointing, OptimizerOffload
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.memory import worst_stage
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.search.best_first import TIE_TOLERANCE, SearchResult
from meshwright.planner.search.candidate import OFFLOAD_MEMORY, Candidate
from meshwright.planner.search.expand import price
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.units import GIB


@dataclass(frozen=True, slots=True)
class RejectedAlternative:
    """A neighbour of the winner, and why it lost."""

    change: str
    """As in "TP 4 instead of 8"."""
    reason: str
    slower: float | None
    """Its step over the winner's; None where it does not fit or cannot be."""

    @property
    def sentence(self) -> str:
        """Both in one."""
        return f"{self.change}: {self.reason}"


def reasons(result: SearchResult) -> tuple[str, ...]:
    """Why each degree is what it is, textbook order, each with its numbers."""
    request, best = result.request, result.best
    sentences = [
        _tensor(request, best),
        _pipeline(request, best),
        _data(best),
        _context(request, best),
        _expert(request, best),
        _memory_saving(best),
        limits(result),
    ]
    return tuple(sentence for sentence in sentences if sentence)


def limits(result: SearchResult) -> str:
    """What bounds the step: the largest part of it beside computing, and the stage that is fullest."""
    best = result.best
    memory = best.estimate.memory
    byte_limit = result.request.memory_limit(best.estimate.gpus)
    return (
        f"{step_text(best.estimate)}; stage {memory.stage} is fullest, {memory.total / GIB:.1f} of "
        f"{byte_limit / GIB:.1f} "
        f"GiB, most of it {_fullest(best)}"
    )


def step_text(estimate: Estimate) -> str:
    """Where a step's time goes, in half a sentence."""
    time = estimate.time
    parts = {
        "recomputation": time.recompute,
        "tensor-parallel collectives": time.tensor,
        "context-parallel exchange": time.context,
        "the experts' all-to-all": time.expert,
        "sends between stages": time.pipeline,
        "the pipeline's bubble": time.bubble,
        "reducing gradients over replicas": time.data,
        "the optimizer": time.optimizer,
        "offloading": time.offload,
        "the host": time.host,
    }
    name, seconds = max(parts.items(), key=lambda part: part[1])
    return (
        f"a step spends {time.compute / time.total:.0%} in matrix products and most of the rest, "
        f"{seconds / time.total:.0%}, in {name}"
    )


def rejected_alternatives(result: SearchResult) -> tuple[RejectedAlternative, ...]:
    """The winner's neighbours, one decision changed, and what each would cost."""
    return alternatives_of(result.request, result.best)


def alternatives_of(request: SearchRequest, chosen: Candidate) -> tuple[RejectedAlternative, ...]:
    """Layouts that differ from `chosen` in one decision, and what each would cost."""
    return tuple(
        _compare(request, chosen, change, choices) for change, choices in _single_changes(request, chosen.strategy)
    )


def _single_changes(request: SearchRequest, winner: Strategy) -> Iterator[tuple[str, Strategy]]:
    """Degrees halved and doubled against the number of replicas, and savings more and less."""
    pins = request.pins
    for name, label in (("tensor", "TP"), ("pipeline", "PP"), ("context", "CP")):
        if getattr(pins, name) is not None:
            continue
        now = getattr(winner, name)
        for other in (now // 2, now * 2):
            if other >= 1 and other != now and (name != "context" or request.techniques.context):
                changed = _trade_for_data(winner, name, now, other)
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
                    f"{_recompute_text(recompute_option)} instead of {_recompute_text(winner.checkpointing)}",
                    replace(winner, checkpointing=recompute_option),
                )


def _trade_for_data(winner: Strategy, name: str, now: int, other: int) -> Strategy | None:
    """`name` changed and the replicas with it, so that GPUs and batch stay; None where they do not come out whole."""
    numerator = winner.data * now
    if numerator % other:
        return None
    data = numerator // other
    sequences = winner.data * winner.micro_batches * winner.micro_batch_size
    if sequences % (data * winner.micro_batch_size) or (winner.context * data) % winner.expert:
        return None
    if data % winner.settings.islands:
        # Islands are made of whole replicas.
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


def _compare(request: SearchRequest, best: Candidate, change: str, choices: Strategy) -> RejectedAlternative:
    impossible = _why_impossible(request, choices)
    if impossible:
        return RejectedAlternative(change, impossible, None)
    try:
        memory = worst_stage(request.work, choices, request.runtime)
    except ValueError as error:
        return RejectedAlternative(change, str(error), None)
    byte_limit = request.memory_limit(choices.world_size)
    if memory.total > byte_limit:
        reason = f"needs {memory.total / GIB:.1f} of {byte_limit / GIB:.1f} GiB on stage {memory.stage}"
        return RejectedAlternative(change, reason, None)
    other = Candidate(choices, price(request, choices), request.node)
    ratio = other.seconds / best.seconds
    if ratio < 1.0:
        why = (
            "within what an estimate can tell, and less simple"
            if ratio * TIE_TOLERANCE >= 1
            else "but not what was asked for"
        )
        return RejectedAlternative(change, f"{1 - ratio:.1%} faster, {why}", ratio)
    if ratio - 1 < 5e-4:
        return RejectedAlternative(change, "no faster", ratio)
    return RejectedAlternative(change, f"{ratio - 1:.1%} slower: {_largest_increase(best, other)}", ratio)


def _why_impossible(request: SearchRequest, choices: Strategy) -> str:
    model, domain = request.work.model, request.domain
    if choices.tensor > domain:
        return f"leaves the NVLink domain of {domain} GPUs"
    if model.heads % choices.tensor or (model.kv_heads % choices.tensor and choices.tensor % model.kv_heads):
        return f"does not divide {model.heads} heads and {model.kv_heads} key-value heads"
    if not request.techniques.replicates_kv_heads and model.kv_heads % choices.tensor:
        return f"does not divide {model.kv_heads} key-value heads"
    if choices.pipeline > model.layers:
        return f"has more stages than {model.layers} layers"
    if choices.micro_batches < choices.pipeline:
        return f"leaves {choices.micro_batches} micro-batches for {choices.pipeline} stages"
    if not request.techniques.allow(request.work, choices):
        return "is a combination that the runtime does not execute"
    return ""


def _largest_increase(best: Candidate, other: Candidate) -> str:
    """The part of the step that grew most."""
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


def _tensor(request: SearchRequest, best: Candidate) -> str:
    used, domain = best.strategy, request.domain
    if request.pins.tensor is not None:
        return f"TP {used.tensor} is given"
    if used.tensor == 1:
        return "TP 1: nothing is gained by splitting layers, a rank holds its part and every collective is saved"
    inside = "fills the NVLink domain" if used.tensor == domain else f"stays inside the NVLink domain of {domain} GPUs"
    part = best.estimate.time.tensor / best.seconds
    return f"TP {used.tensor} {inside}, where its collectives take {part:.0%} of a step"


def _pipeline(request: SearchRequest, best: Candidate) -> str:
    used = best.strategy
    if used.pipeline == 1:
        return "PP 1: layers fit without stages, so nothing waits" if request.pins.pipeline is None else "PP 1 is given"
    given = "is given: " if request.pins.pipeline is not None else "spreads the layers' states with little traffic: "
    return (
        f"PP {used.pipeline} {given}{used.micro_batches} micro-batches of {used.micro_batch_size} on the "
        f"{used.schedule_kind.short_name} schedule leave a bubble of {best.estimate.bubble:.1%}"
    )


def _data(best: Candidate) -> str:
    used = best.strategy
    if used.data == 1:
        return "DP 1: the replica takes all GPUs"
    part = best.estimate.time.data / best.seconds
    return f"DP {used.data} takes the rest of the GPUs; reducing gradients takes {part:.1%} of a step"


def _context(request: SearchRequest, best: Candidate) -> str:
    used = best.strategy
    if used.context > 1:
        tokens = request.work.sequence_length // used.context
        return (
            f"CP {used.context} ({used.context_method.value}): activations of {request.work.sequence_length} tokens "
            f"do not fit otherwise or cost more elsewhere; each rank keeps {tokens}"
        )
    if used.tensor > 1 and used.sequence_parallel:
        return "sequence parallelism with TP: norms and residuals are split too, at no further traffic"
    return ""


def _expert(request: SearchRequest, best: Candidate) -> str:
    moe = request.work.model.mixture
    if moe is None:
        return ""
    used = best.strategy
    if used.expert == 1:
        return f"EP 1: every rank holds its part of all {moe.experts} experts"
    part = best.estimate.time.expert / best.seconds
    return (
        f"EP {used.expert} shares out {moe.experts} experts, {moe.experts // used.expert} a rank; "
        f"the all-to-all takes {part:.0%} of a step"
    )


def _memory_saving(best: Candidate) -> str:
    used = best.strategy
    sentences = []
    if used.zero_stage:
        sentences.append(f"ZeRO-{used.zero_stage} over {used.shard_ranks} replicas")
    if used.checkpointing is not ActivationCheckpointing.NONE:
        sentences.append(_recompute_text(used.checkpointing))
    if used.optimizer_offload is not OptimizerOffload.NONE:
        sentences.append(f"optimizer state in {OFFLOAD_MEMORY[used.optimizer_offload]} memory")
    return f"{' and '.join(sentences)}: the least saving that fits" if sentences else "no memory has to be saved"


def _recompute_text(recompute: ActivationCheckpointing) -> str:
    return (
        "no recomputation" if recompute is ActivationCheckpointing.NONE else f"{recompute.value.lower()} recomputation"
    )


def _fullest(best: Candidate) -> str:
    memory = best.estimate.memory
    kinds = {
        "parameters, gradients and optimizer state": memory.states,
        "activations": memory.activations,
        "logits": memory.logits,
        "gathered parameters": memory.gathered,
        "buffers": memory.buffers,
    }
    return max(kinds, key=lambda kind: kinds[kind])
