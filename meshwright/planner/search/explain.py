"""Explains each degree of the chosen layout, and what bounds its step.

For a degree that the request pins, the reason names the field. With an order of preference, the reason is what the
previous degree in that order would need. In a free search, it is the fraction of a step that the degree takes.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.training import ActivationCheckpointing, OptimizerOffload
from meshwright.models.lora import skipped_targets
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.memory import Memory, worst_stage
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.search.alternatives import recompute_text
from meshwright.planner.search.best_first import SearchResult
from meshwright.planner.search.candidate import OFFLOAD_MEMORY, Candidate, FittingLayout
from meshwright.planner.search.errors import memory_text
from meshwright.planner.search.expand import estimate_cost, pinned_strategy
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search_space import MICRO_BATCHES_PER_STAGE, micro_batch_sizes, tensor_degrees
from meshwright.planner.units import GIB, format_bytes
from meshwright.schedules.registry import kind_of


def reasons(result: SearchResult) -> tuple[str, ...]:
    """Return the reason for each degree of the best layout, with numbers, and what bounds its step."""
    request, best = result.request, result.best
    used, estimate = best.strategy, best.estimate
    sentences = [
        _tensor(request, used, estimate),
        _pipeline(request, used, estimate),
        _data(request, used, estimate),
        _context(request, used) or _sequence(used),
        _expert(request, used, estimate),
        _memory_saving(best),
        limits(result),
    ]
    return tuple(sentence for sentence in sentences if sentence)


def reasons_by_preference(request: SearchRequest, chosen: FittingLayout, estimate: Estimate | None) -> tuple[str, ...]:
    """Return the reasons for a layout that an order of preference determined.

    There is a sentence for each degree and each other decision, for adapters that are left out, for memory, and for
    time if there is an estimate.
    """
    used, lora = chosen.strategy, request.pinned_job.training.lora
    sentences = [
        _tensor(request, used, None),
        _pipeline(request, used, None),
        _schedule(request, used),
        _context(request, used),
        _data(request, used, None),
        _expert(request, used, None),
        _micro_batches(request, used),
        _checkpointing(request, used),
        (skipped_targets(lora, request.work.model) or "") if lora is not None else "",
        _memory(request, chosen.memory),
        _time(request, estimate),
    ]
    return tuple(sentence for sentence in sentences if sentence)


def limits(result: SearchResult) -> str:
    """Return what bounds the step: its largest part apart from compute, and the fullest stage."""
    best = result.best
    memory, byte_limit = best.estimate.memory, result.request.memory_limit(best.estimate.gpus)
    return (
        f"{step_text(best.estimate)}; stage {memory.stage} is fullest, {memory.total / GIB:.1f} of "
        f"{byte_limit / GIB:.1f} GiB, most of it {_fullest(memory)}"
    )


def step_text(estimate: Estimate) -> str:
    """Return the largest parts of a step's time as text."""
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


def _set_by(degree: str, field: str) -> str:
    return f"{degree}: set by `{field}`"


def _tensor(request: SearchRequest, used: Strategy, estimate: Estimate | None) -> str:
    if request.pins.tensor is not None:
        return _set_by(f"TP {used.tensor}", "parallelism.tensor")
    if estimate is None:
        return f"TP {used.tensor}: the smallest degree {_why_not_less_tensor(request, used)}"
    if used.tensor == 1:
        return "TP 1: nothing is gained by splitting layers, a rank holds its part and every collective is saved"
    domain = request.domain
    inside = "fills the NVLink domain" if used.tensor == domain else f"stays inside the NVLink domain of {domain} GPUs"
    return (
        f"TP {used.tensor}: {inside}, where its collectives take {_part(estimate.time.tensor, estimate):.0%} of a step"
    )


def _why_not_less_tensor(request: SearchRequest, used: Strategy) -> str:
    pins = replace(request.pins, context=used.context, checkpointing=used.checkpointing, schedule=used.schedule)
    narrowed = replace(request, pins=pins)
    smaller = [tensor for tensor in tensor_degrees(narrowed) if tensor < used.tensor]
    if not smaller:
        return "that splits the model evenly and fills workers"
    layout, limit = replace(used.layout, tensor=smaller[-1]), request.memory_limit(1)
    sizes = micro_batch_sizes(narrowed, layout, used.schedule)
    needed = _bytes_of(request, pinned_strategy(narrowed, layout, sizes[0], used.schedule)) if sizes else 0
    if needed > limit:
        need = f"TP {smaller[-1]} needs {format_bytes(needed)} per GPU, usable are {format_bytes(limit)}"
        return f"whose ranks hold their part of the model ({need})"
    return f"that fills workers of {request.gpus_per_worker} GPUs"


def _pipeline(request: SearchRequest, used: Strategy, estimate: Estimate | None) -> str:
    pipeline = used.pipeline
    if request.pins.pipeline is not None:
        why = _set_by(f"PP {pipeline}", "parallelism.pipeline")
    elif pipeline == 1:
        return "PP 1: the model fits without a pipeline, which would idle at the ends of each step"
    elif estimate is None:
        widest = (request.limits.domain_gpus if request.limits is not None else None) or 1
        domain = f"an NVLink domain of {widest} GPUs alone does not hold a replica"
        why = f"PP {pipeline}: the fewest stages that fit; {domain}"
    else:
        why = f"PP {pipeline}: spreads the layers' states with little traffic"
    if estimate is None or pipeline == 1:
        return why
    return (
        f"{why}; {used.micro_batches} micro-batches of {used.micro_batch_size} on the "
        f"{used.schedule_kind.short_name} schedule leave a bubble of {estimate.bubble:.1%}"
    )


def _data(request: SearchRequest, used: Strategy, estimate: Estimate | None) -> str:
    if estimate is None:
        return _set_by(f"DP {used.data}", "replicas")
    if used.data == 1:
        return "DP 1: the replica takes all GPUs"
    part = _part(estimate.time.data, estimate)
    return f"DP {used.data}: takes the rest of the GPUs; reducing gradients takes {part:.1%} of a step"


def _context(request: SearchRequest, used: Strategy) -> str:
    if used.context == 1:
        return ""
    name = f"CP {used.context} ({used.context_method.value})"
    if request.pins.context is not None:
        return _set_by(name, "parallelism.context")
    length = request.work.sequence_length
    each = length // used.context
    if request.order_of_preference:
        return f"{name}: the fewest ranks to a sequence with which a layout fits, {each} tokens each"
    return f"{name}: activations of {length} tokens do not fit otherwise or cost more elsewhere; each rank keeps {each}"


def _sequence(used: Strategy) -> str:
    if used.tensor > 1 and used.sequence_parallel:
        return "sequence parallelism with TP: norms and residuals are split too, at no further traffic"
    return ""


def _expert(request: SearchRequest, used: Strategy, estimate: Estimate | None) -> str:
    mixture, expert = request.work.model.mixture, used.expert
    if mixture is None:
        return ""
    # In a free search `parallelism.expert` has no effect, so it is not named for a degree of 1.
    if request.pins.expert is not None and (expert > 1 or request.order_of_preference):
        return _set_by(f"EP {expert}", "parallelism.expert")
    experts = f"{mixture.experts // expert} of {mixture.experts} experts a rank"
    if expert == 1:
        return f"EP 1: every replica has all experts, so no token is sent to another rank ({experts})"
    if estimate is None:
        return f"EP {expert}: {experts}; fewer parts need more memory or take longer"
    return f"EP {expert}: {experts}; the all-to-all takes {_part(estimate.time.expert, estimate):.0%} of a step"


def _schedule(request: SearchRequest, used: Strategy) -> str:
    if used.pipeline == 1:
        return ""
    name, plain = f"schedule {used.schedule.value}", PipelineSchedule.ONE_F_ONE_B
    if request.pins.schedule is not None:
        return _set_by(name, "parallelism.schedule")
    if used.schedule is plain:
        return f"{name}: no other is estimated to be faster by more than 2 %, and fits"
    if not kind_of(plain).accepts(used.pipeline, used.micro_batches):
        return f"{name}: the fastest that fits"
    other = request.pinned_job.strategy(used.layout, used.micro_batches, plain, used.checkpointing)
    gain = estimate_cost(request, other).seconds / estimate_cost(request, used).seconds - 1
    needed = format_bytes(_bytes_of(request, other))
    return f"{name}: {gain:.0%} faster than 1F1B, which needs {needed} per GPU"


def _checkpointing(request: SearchRequest, used: Strategy) -> str:
    none = ActivationCheckpointing.NONE
    if request.pins.checkpointing is not None or used.checkpointing is none:
        return ""
    name = f"activation checkpointing {used.checkpointing.value}"
    plain = request.pinned_job.strategy(used.layout, used.micro_batches, used.schedule, none)
    needed, limit = _bytes_of(request, plain), request.memory_limit(1)
    if needed > limit:
        return f"{name}: without it a rank needs {format_bytes(needed)}, usable are {format_bytes(limit)}"
    return f"{name}: other layouts of as many GPUs fit without it and are slower"


def _micro_batches(request: SearchRequest, used: Strategy) -> str:
    count, pipeline = used.micro_batches, used.pipeline
    name = f"{count} micro-batch" if count == 1 else f"{count} micro-batches"
    idle = round(100 * (pipeline - 1) / (count + pipeline - 1))
    plain = pipeline > 1 and used.schedule is PipelineSchedule.ONE_F_ONE_B
    tail = f"; the pipeline idles {idle} % of a step" if plain else ""
    if request.pins.micro_batches is not None:
        return _set_by(name, "parallelism.microBatches") + tail
    if pipeline == 1:
        return f"{name}: the fewest whose activations fit"
    if count >= MICRO_BATCHES_PER_STAGE * pipeline:
        return f"{name}: at least {MICRO_BATCHES_PER_STAGE} per stage{tail}"
    return f"{name}: as many as a replica's share of the batch allows{tail}"


def _memory_saving(best: Candidate) -> str:
    used = best.strategy
    sentences = []
    if used.zero_stage:
        sentences.append(f"ZeRO-{used.zero_stage} over {used.shard_ranks} replicas")
    if used.checkpointing is not ActivationCheckpointing.NONE:
        sentences.append(recompute_text(used.checkpointing))
    if used.optimizer_offload is not OptimizerOffload.NONE:
        sentences.append(f"optimizer state in {OFFLOAD_MEMORY[used.optimizer_offload]} memory")
    return f"{' and '.join(sentences)}: the least saving that fits" if sentences else "no memory has to be saved"


def _memory(request: SearchRequest, memory: Memory) -> str:
    text = (
        f"memory: stage {memory.stage} is the fullest with {format_bytes(memory.total)} per GPU ({memory_text(memory)})"
    )
    limit = request.memory_limit(1)
    if limit == inf:
        return f"{text}; not compared, since the memory of the GPUs is not known"
    return f"{text}, usable are {format_bytes(limit)}"


def _time(request: SearchRequest, estimate: Estimate | None) -> str:
    if estimate is None or request.machine is None:
        return ""
    gpu = request.machine.gpu.name
    return f"time: {estimate.seconds:.3g} s per step on {gpu} (MFU {estimate.mfu:.0%}); {step_text(estimate)}"


def _bytes_of(request: SearchRequest, strategy: Strategy) -> float:
    """Bytes of the fullest rank."""
    return worst_stage(request.work, strategy, request.runtime).total


def _part(seconds: float, estimate: Estimate) -> float:
    """The fraction of a step."""
    return seconds / estimate.seconds


def _fullest(memory: Memory) -> str:
    kinds = {
        "parameters, gradients and optimizer state": memory.states,
        "activations": memory.activations,
        "logits": memory.logits,
        "gathered parameters": memory.gathered,
        "buffers": memory.buffers,
    }
    return max(kinds, key=lambda kind: kinds[kind])
