"""The reasons for the plan of a job, in the order in which textbooks choose degrees.

First replicas on every GPU; then ZeRO, if a GPU has no room for all model states; then tensor parallelism in the NVLink
domain; then a pipeline across nodes; then context parallelism for long sequences; then experts. For a degree that the
spec states, the reason names the field. For another it is what the next smaller degree would need or take.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.precision import Precision
from meshwright.api.training import ActivationCheckpointing
from meshwright.figures import counted, format_number
from meshwright.models.lora import skipped_targets
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.memory import Memory, worst_stage
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.search.alternatives import traded_for_data
from meshwright.planner.search.candidate import FittingLayout
from meshwright.planner.search.errors import memory_text
from meshwright.planner.search.expand import (
    SMALLEST_MEMORY,
    Choices,
    estimate_cost,
    job_strategy,
    stages_to_try,
)
from meshwright.planner.search.explain import expert_parts, set_by, step_text
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search_space import (
    MICRO_BATCHES_PER_STAGE,
    data_degrees,
    micro_batch_sizes,
    tensor_degrees,
)
from meshwright.planner.units import count_gpus, format_bytes
from meshwright.rules.parallelism import MAX_WORKERS
from meshwright.schedules.registry import kind_of


def reasons_of_plan(
    request: SearchRequest, chosen: FittingLayout, estimate: Estimate | None, gpus: int | None = None
) -> tuple[str, ...]:
    """Return the reasons for a job's layout.

    There is a sentence for each degree and each other decision, for adapters that are left out, for memory, and for
    time if there is an estimate.

    Args:
        request: the search.
        chosen: its result.
        estimate: the cost of a step, if known.
        gpus: the job's budget. None if it states `replicas`.
    """
    used, lora = chosen.strategy, request.pinned_job.training.lora
    sentences = [
        _budget(request, used, gpus) if gpus is not None else "",
        _data(request, used),
        _zero(request, used, estimate),
        _tensor(request, used, estimate),
        _pipeline(request, used, estimate),
        _schedule(request, used),
        _context(request, used),
        _expert(request, used),
        _micro_batches(request, used),
        _checkpointing(request, used),
        (skipped_targets(lora, request.work.model) or "") if lora is not None else "",
        _memory(request, chosen.memory),
        _time(request, estimate),
    ]
    return tuple(sentence for sentence in sentences if sentence)


def _budget(request: SearchRequest, used: Strategy, gpus: int) -> str:
    unused = gpus - used.world_size
    text = f"{used.world_size} of `gpus: {gpus}` are used"
    if not unused:
        return text
    each, size = request.gpus_per_worker, used.layout.replica_size
    most = data_degrees(request, replace(used.layout, data=1, expert=1))
    if gpus - unused == gpus // each * each:
        why = f"all workers have {count_gpus(each)}"
    elif used.data == most[0] and request.gpus < gpus:
        why = f"a job has at most {MAX_WORKERS} workers, of {count_gpus(each)} each: raise `workers.gpusPerWorker`"
    elif used.data == most[0]:
        batch = f"the batch of {request.work.global_batch} sequences"
        why = f"no larger number of replicas of {count_gpus(size)} divides {batch} and fills workers of {each}"
    else:
        why = f"with more replicas of {count_gpus(size)} no layout fits, or none is faster"
    return f"{text}, {unused} {'is' if unused == 1 else 'are'} left over: {why}"


def _data(request: SearchRequest, used: Strategy) -> str:
    name, size = f"DP {used.data}", used.layout.replica_size
    if request.pins.data is not None:
        return set_by(name, "replicas")
    if size == 1:
        shards = ", with its model states sharded over all replicas" if used.zero_stage else ""
        return f"{name}: the model fits on one GPU{shards}, so every GPU trains a replica"
    return f"{name}: a replica takes {count_gpus(size)}, and the batch is split over as many replicas as `gpus` allows"


def _zero(request: SearchRequest, used: Strategy, estimate: Estimate | None) -> str:
    stage = used.zero_stage
    if used.shard_ranks == 1:
        return ""
    if request.pins.zero_stage is not None:
        return set_by(f"ZeRO-{stage}", "parallelism.zeroStage")
    lower = [other for other in stages_to_try(request, used.layout, used.schedule) if other is not None]
    lower = [other for other in lower if other < stage]
    if not lower:
        return f"ZeRO-{stage}: the lowest stage that other fields allow" if stage else "ZeRO-0: no stage is faster"
    other = replace(used, zero_stage=lower[-1])
    needed, limit = _bytes_of(request, other), request.memory_limit(1)
    if needed > limit:
        return (
            f"ZeRO-{stage}: with stage {lower[-1]} a rank needs {format_bytes(needed)}, "
            f"and {format_bytes(limit)} are usable"
        )
    return f"ZeRO-{stage}: {_gain(request, used, other, estimate)} stage {lower[-1]}, which fits too"


def _gain(request: SearchRequest, used: Strategy, other: Strategy, estimate: Estimate | None) -> str:
    """How much faster a strategy is, up to the name of the other."""
    if estimate is None:
        return "simpler than"
    gain = estimate_cost(request, other).seconds / estimate_cost(request, used).seconds - 1
    return f"{gain:.0%} faster than" if gain >= 0.005 else "as fast as"


def _tensor(request: SearchRequest, used: Strategy, estimate: Estimate | None) -> str:
    name = f"TP {used.tensor}"
    if request.pins.tensor is not None:
        return set_by(name, "parallelism.tensor")
    if request.order_of_preference:
        return f"{name}: the smallest degree {_why_not_less_tensor(request, used)}"
    if used.tensor == 1:
        return "TP 1: a GPU holds its part of every layer, and no layer is split"
    inside = f"inside an NVLink domain of {count_gpus(request.domain)}"
    return f"{name}, {inside}: {_against_half(request, used, 'tensor', 'TP', estimate)}"


def _why_not_less_tensor(request: SearchRequest, used: Strategy) -> str:
    pins = replace(request.pins, context=used.context, checkpointing=used.checkpointing, schedule=used.schedule)
    narrowed = replace(request, pins=pins)
    smaller = [tensor for tensor in tensor_degrees(narrowed) if tensor < used.tensor]
    if not smaller:
        return "that splits the model evenly and fills workers"
    layout, limit = replace(used.layout, tensor=smaller[-1]), request.memory_limit(1)
    sizes = micro_batch_sizes(narrowed, layout, used.schedule)
    choices = [
        Choices(used.schedule, context_method=used.context_method, zero_stage=stage)
        for stage in stages_to_try(narrowed, layout, used.schedule)
    ]
    least = [_bytes_of(request, job_strategy(narrowed, layout, sizes[0], one)) for one in choices if sizes]
    if least and min(least) > limit:
        need = f"TP {smaller[-1]} needs {format_bytes(min(least))} per GPU, and {format_bytes(limit)} are usable"
        return f"whose ranks hold their part of the model ({need})"
    return f"that fills workers of {count_gpus(request.gpus_per_worker)}"


def _pipeline(request: SearchRequest, used: Strategy, estimate: Estimate | None) -> str:
    name, pipeline = f"PP {used.pipeline}", used.pipeline
    if request.pins.pipeline is not None:
        return set_by(name, "parallelism.pipeline")
    if pipeline == 1:
        return "PP 1: the model fits without a pipeline, which would idle at the ends of each step"
    if request.order_of_preference:
        widest = request.domain if request.limits is not None and request.limits.known else 1
        domain = f"an NVLink domain of {count_gpus(widest)}"
        return f"{name}: the fewest stages that fit; {domain} alone does not hold a replica"
    return f"{name}: {_against_half(request, used, 'pipeline', 'PP', estimate)}"


def _against_half(request: SearchRequest, used: Strategy, name: str, label: str, estimate: Estimate | None) -> str:
    """What half the degree would need or take, with twice the replicas."""
    degree = getattr(used, name)
    half = degree // 2
    other = traded_for_data(used, name, degree, half)
    if other is None or (name != "pipeline" and not request.allows(other)):
        return f"no layout with {label} {half} and as many GPUs divides the batch, or other fields do not allow it"
    stages = [stage for stage in stages_to_try(request, other.layout, other.schedule) if stage is not None]
    variants = [replace(other, zero_stage=stage) for stage in stages] or [other]
    least, limit = min(_bytes_of(request, one) for one in variants), request.memory_limit(1)
    if least > limit:
        return f"with {label} {half} a rank needs at least {format_bytes(least)}, and {format_bytes(limit)} are usable"
    fitting = [one for one in variants if _bytes_of(request, one) <= limit]
    best = min(fitting, key=lambda one: estimate_cost(request, one).seconds)
    return f"{_gain(request, used, best, estimate)} {label} {half} with as many micro-batches"


def _schedule(request: SearchRequest, used: Strategy) -> str:
    if used.pipeline == 1:
        return ""
    stages = f" with {used.virtual_stages} stages a rank" if used.schedule_kind.virtual_stages else ""
    name, plain = f"schedule {used.schedule.value}{stages}", PipelineSchedule.ONE_F_ONE_B
    if request.pins.schedule is not None:
        return set_by(name, "parallelism.schedule")
    if used.schedule is plain:
        return f"{name}: no other is estimated to be faster by more than 1%, and fits"
    if not kind_of(plain).accepts(used.pipeline, used.micro_batches):
        return f"{name}: the fastest that fits"
    other = request.pinned_job.strategy(
        used.layout,
        used.micro_batches,
        plain,
        used.checkpointing,
        context_method=used.context_method,
        zero_stage=used.zero_stage,
    )
    gain = estimate_cost(request, other).seconds / estimate_cost(request, used).seconds - 1
    needed = format_bytes(_bytes_of(request, other))
    return f"{name}: {gain:.0%} faster than 1F1B, which needs {needed} per GPU"


def _context(request: SearchRequest, used: Strategy) -> str:
    if used.context == 1:
        return ""
    name = f"CP {used.context} ({used.context_method.value})"
    if request.pins.context is not None:
        return set_by(name, "parallelism.context")
    length = request.work.sequence_length
    each = length // used.context
    if request.order_of_preference:
        return f"{name}: the fewest ranks to a sequence with which a layout fits, {each} tokens each"
    return f"{name}: sequences of {length} tokens are shared, {each} tokens each: the fastest layout that fits"


def _expert(request: SearchRequest, used: Strategy) -> str:
    expert, experts = used.expert, expert_parts(request, used.expert)
    if not experts:
        return ""
    if request.pins.expert is not None:
        return set_by(f"EP {expert}", "parallelism.expert")
    if expert == 1:
        return f"EP 1: every replica has all experts, so no token is sent to another rank ({experts})"
    return f"EP {expert}: {experts}; fewer parts need more memory or take longer"


def _micro_batches(request: SearchRequest, used: Strategy) -> str:
    count, pipeline = used.micro_batches, used.pipeline
    name = counted(count, "micro-batch")
    idle = round(100 * (pipeline - 1) / (count + pipeline - 1))
    plain = pipeline > 1 and used.schedule is PipelineSchedule.ONE_F_ONE_B
    tail = f"; the pipeline idles {idle}% of a step" if plain else ""
    if request.pins.micro_batches is not None:
        return set_by(name, "parallelism.microBatches") + tail
    if pipeline == 1 and request.memory_limit(1) == inf:
        fits = _bytes_of(request, used) <= SMALLEST_MEMORY
        why = f"the fewest that fit in {format_bytes(SMALLEST_MEMORY)}" if fits else "the smallest"
        return f"{name}: {why}, since the memory of the GPUs is not known; set `parallelism.microBatches` for others"
    if pipeline == 1:
        return f"{name}: the fewest whose activations fit"
    if request.machine is not None:
        return f"{name}: the fastest number whose activations fit{tail}"
    if count >= MICRO_BATCHES_PER_STAGE * pipeline:
        return f"{name}: at least {MICRO_BATCHES_PER_STAGE} per stage{tail}"
    return f"{name}: as many as a replica's share of the batch allows{tail}"


def _checkpointing(request: SearchRequest, used: Strategy) -> str:
    none = ActivationCheckpointing.NONE
    if request.pins.checkpointing is not None or used.checkpointing is none:
        return ""
    name = f"activation checkpointing {used.checkpointing.value}"
    needed, limit = _bytes_of(request, replace(used, checkpointing=none)), request.memory_limit(1)
    if needed > limit:
        return f"{name}: without it a rank needs {format_bytes(needed)}, and {format_bytes(limit)} are usable"
    return f"{name}: other layouts of as many GPUs fit without it and are slower"


def _memory(request: SearchRequest, memory: Memory) -> str:
    text = (
        f"memory: stage {memory.stage} is the fullest with {format_bytes(memory.total)} per GPU ({memory_text(memory)})"
    )
    limit = request.memory_limit(1)
    if limit == inf:
        return f"{text}; not compared, since the memory of the GPUs is not known"
    return f"{text}, and {format_bytes(limit)} are usable"


def _time(request: SearchRequest, estimate: Estimate | None) -> str:
    if estimate is None or request.machine is None:
        return ""
    gpu = request.machine.gpu
    gain = gpu.peak(Precision.BF16) / gpu.peak(request.fixed.precision)
    faster = f". Products in bf16 are up to {gain:.0f} times faster: see `training.precision`" if gain >= 2 else ""
    mfu, text = f"MFU {estimate.mfu:.0%}", step_text(estimate)
    return f"time: {format_number(estimate.seconds)} s per step on {gpu.name} ({mfu}); {text}{faster}"


def _bytes_of(request: SearchRequest, strategy: Strategy) -> float:
    """Bytes of the fullest rank."""
    return worst_stage(request.work, strategy, request.runtime).total
