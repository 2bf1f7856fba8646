"""Why a plan is as it is, and why there is none: sentences for people."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.training import ActivationCheckpointing
from meshwright.models.lora import skipped_targets
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.memory import Memory, worst_stage
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.errors import PlanError
from meshwright.planner.search.candidate import FittingLayout
from meshwright.planner.search.errors import closest_layout
from meshwright.planner.search.expand import pinned_strategy, price
from meshwright.planner.search.explain import step_text
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search_space import MICRO_BATCHES_PER_STAGE, micro_batch_sizes, tensor_degrees
from meshwright.planner.units import format_bytes
from meshwright.schedules.registry import kind_of


def memory_text(memory: Memory) -> str:
    """The parts of an estimate that make its peak."""
    recomputing = memory.working > memory.logits
    parts = (
        ("parameters", memory.parameters),
        ("master weights", memory.master),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.activations),
        ("recomputed", memory.working) if recomputing else ("logits", memory.logits),
        ("gathered", memory.gathered),
        ("buffers", memory.buffers),
        ("context and fragmentation", memory.context + memory.fragmentation),
    )
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size >= 1)


def reasons_for(request: SearchRequest, chosen: FittingLayout) -> tuple[str, ...]:
    """One sentence for each degree, one for what else was chosen, one for adapters that are left out, and one for
    memory.
    """
    sentences = (
        _tensor_reason(request, chosen),
        _pipeline_reason(request, chosen),
        _schedule_reason(request, chosen),
        _context_reason(request, chosen),
        f"DP {chosen.strategy.data}: set by `replicas`",
        _expert_reason(request, chosen),
        _micro_batches_reason(request, chosen),
        _checkpointing_reason(request, chosen),
        _adapters_reason(request),
        _memory_reason(request, chosen.memory),
    )
    return tuple(sentence for sentence in sentences if sentence)


def _tensor_reason(request: SearchRequest, chosen: FittingLayout) -> str:
    tensor = chosen.strategy.tensor
    if request.pinned_job.parallelism.tensor is not None:
        return f"TP {tensor}: set by `parallelism.tensor`"
    used = chosen.strategy
    pins = replace(request.pins, context=used.context, checkpointing=used.checkpointing, schedule=used.schedule)
    narrowed = replace(request, pins=pins)
    smaller = [t for t in tensor_degrees(narrowed) if t < tensor]
    if not smaller:
        return f"TP {tensor}: the smallest degree that splits the model evenly and fills workers"
    layout, limit = replace(used.layout, tensor=smaller[-1]), request.memory_limit(1)
    sizes = micro_batch_sizes(narrowed, layout, used.schedule)
    needed = _bytes_of(request, pinned_strategy(narrowed, layout, sizes[0], used.schedule)) if sizes else 0
    if needed > limit:
        need = f"TP {smaller[-1]} needs {format_bytes(needed)} per GPU, usable are {format_bytes(limit)}"
        return f"TP {tensor}: the smallest degree whose ranks hold their part of the model ({need})"
    return f"TP {tensor}: the smallest degree that fills workers of {request.gpus_per_worker} GPUs"


def _adapters_reason(request: SearchRequest) -> str:
    lora = request.pinned_job.training.lora
    return (skipped_targets(lora, request.pinned_job.architecture) or "") if lora is not None else ""


def _pipeline_reason(request: SearchRequest, chosen: FittingLayout) -> str:
    pipeline = chosen.strategy.pipeline
    if request.pinned_job.parallelism.pipeline is not None:
        return f"PP {pipeline}: set by `parallelism.pipeline`"
    if pipeline == 1:
        return "PP 1: the model fits without a pipeline, which would idle at the ends of each step"
    widest = _domain(request)
    return f"PP {pipeline}: the fewest stages that fit; an NVLink domain of {widest} GPUs alone does not hold a replica"


def _context_reason(request: SearchRequest, chosen: FittingLayout) -> str:
    context, method = chosen.strategy.context, request.pinned_job.parallelism.context_method
    if context == 1:
        return ""
    if request.pinned_job.parallelism.context is not None:
        return f"CP {context} ({method}): set by `parallelism.context`"
    tokens = request.pinned_job.training.sequence_length // context
    return f"CP {context} ({method}): the fewest ranks to a sequence with which a layout fits, {tokens} tokens each"


def _schedule_reason(request: SearchRequest, chosen: FittingLayout) -> str:
    if chosen.strategy.pipeline == 1:
        return ""
    name = chosen.strategy.schedule.value
    if request.pinned_job.parallelism.schedule is not None:
        return f"schedule {name}: set by `parallelism.schedule`"
    if chosen.strategy.schedule is PipelineSchedule.ONE_F_ONE_B:
        return f"schedule {name}: no other is estimated to be faster by more than 2 %, and fits"
    if not kind_of(PipelineSchedule.ONE_F_ONE_B).accepts(chosen.strategy.pipeline, chosen.strategy.micro_batches):
        return f"schedule {name}: the fastest that fits"
    used = chosen.strategy
    job = request.pinned_job
    plain = job.strategy(used.layout, used.micro_batches, PipelineSchedule.ONE_F_ONE_B, used.checkpointing)
    gain = price(request, plain).seconds / price(request, used).seconds - 1
    needed = format_bytes(_bytes_of(request, plain))
    return f"schedule {name}: {gain:.0%} faster than 1F1B, which needs {needed} per GPU"


def _checkpointing_reason(request: SearchRequest, chosen: FittingLayout) -> str:
    if (
        request.pinned_job.training.activation_checkpointing is not None
        or chosen.strategy.checkpointing is ActivationCheckpointing.NONE
    ):
        return ""
    name = f"activation checkpointing {chosen.strategy.checkpointing.value}"
    used = chosen.strategy
    none = ActivationCheckpointing.NONE
    plain = request.pinned_job.strategy(used.layout, used.micro_batches, used.schedule, none)
    needed_bytes, limit = _bytes_of(request, plain), request.memory_limit(1)
    if needed_bytes > limit:
        return f"{name}: without it a rank needs {format_bytes(needed_bytes)}, usable are {format_bytes(limit)}"
    return f"{name}: other layouts of as many GPUs fit without it and are slower"


def _expert_reason(request: SearchRequest, chosen: FittingLayout) -> str:
    mixture, expert = request.pinned_job.architecture.mixture, chosen.strategy.expert
    if mixture is None:
        return ""
    if request.pinned_job.parallelism.expert is not None:
        return f"EP {expert}: set by `parallelism.expert`"
    held = f"{mixture.experts // expert} of {mixture.experts} experts a rank"
    if expert == 1:
        return f"EP 1: every replica has all experts, and no token travels ({held})"
    return f"EP {expert}: {held}; fewer parts need more memory or take longer"


def _micro_batches_reason(request: SearchRequest, chosen: FittingLayout) -> str:
    count, pipeline = chosen.strategy.micro_batches, chosen.strategy.pipeline
    name = f"{count} micro-batch" if count == 1 else f"{count} micro-batches"
    idle = round(100 * (pipeline - 1) / (count + pipeline - 1))
    plain = pipeline > 1 and chosen.strategy.schedule is PipelineSchedule.ONE_F_ONE_B
    tail = f"; the pipeline idles {idle} % of a step" if plain else ""
    if request.pinned_job.parallelism.micro_batches is not None:
        return f"{name}: set by `parallelism.microBatches`{tail}"
    if pipeline == 1:
        return f"{name}: the fewest whose activations fit"
    if count >= MICRO_BATCHES_PER_STAGE * pipeline:
        return f"{name}: at least {MICRO_BATCHES_PER_STAGE} per stage{tail}"
    return f"{name}: as many as a replica's share of the batch allows{tail}"


def _memory_reason(request: SearchRequest, memory: Memory) -> str:
    text = (
        f"memory: stage {memory.stage} is the fullest with {format_bytes(memory.total)} per GPU ({memory_text(memory)})"
    )
    limit = request.memory_limit(1)
    if limit == inf:
        return f"{text}; not compared, since the memory of the GPUs is not known"
    return f"{text}, usable are {format_bytes(limit)}"


def time_reasons(request: SearchRequest, estimate: Estimate | None) -> tuple[str, ...]:
    """What a step is estimated to take, and in what; nothing where there is no price."""
    if estimate is None or request.machine is None:
        return ()
    gpu = request.machine.gpu.name
    return (f"time: {estimate.seconds:.3g} s per step on {gpu} (MFU {estimate.mfu:.0%}); {step_text(estimate)}",)


def _bytes_of(request: SearchRequest, strategy: Strategy) -> float:
    """Bytes of the fullest rank."""
    return worst_stage(request.work, strategy, request.runtime).total


def _domain(request: SearchRequest) -> int:
    """GPUs of the widest NVLink domain; 1 if not known."""
    return (request.limits.domain_gpus if request.limits is not None else None) or 1


def nothing_fits(request: SearchRequest) -> PlanError:
    """The error for a search without a result: no candidate at all, or none that a GPU holds."""
    closest = closest_layout(request)
    if closest is None:
        return _no_candidate(request)
    used, memory = closest.strategy, closest.memory
    return PlanError(
        f"the model does not fit: TP {used.tensor} x PP {used.pipeline} with {used.micro_batches} micro-batches comes "
        f"closest and needs {format_bytes(memory.total)} per GPU ({memory_text(memory)}); "
        f"the GPUs here offer {format_bytes(request.memory_limit(1))}. Raise `parallelism.zeroStage`, "
        "`parallelism.microBatches` or `replicas`, shorten `training.sequenceLength`, or add larger GPUs",
        "OutOfMemory",
        depends_on_cluster=True,
    )


def _no_candidate(request: SearchRequest) -> PlanError:
    gpus = request.gpus_per_worker
    return PlanError(
        f"no tensor and pipeline degree gives whole workers of {gpus} GPUs with `replicas` {request.pins.data}: change "
        "`workers.gpusPerWorker` or `replicas`, or set `parallelism.tensor` and `parallelism.pipeline`",
        "InvalidSpec",
        depends_on_cluster=request.pins.tensor is None,
    )
