"""Why a plan is as it is, and why there is none: sentences for people."""

from __future__ import annotations

from dataclasses import replace

from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.training import ActivationCheckpointing
from meshwright.models.lora import skipped_targets
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.memory import Memory
from meshwright.planner.errors import PlanError
from meshwright.planner.search.degree_search import MICRO_BATCHES_PER_STAGE, Candidate, DegreeSearch
from meshwright.planner.search.explain import step_text
from meshwright.planner.search.search_space import checkpointing_options, context_degrees_of_job
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


def reasons_for(search: DegreeSearch, chosen: Candidate) -> tuple[str, ...]:
    """One sentence for each degree, one for what else was chosen, one for adapters that are left out, and one for
    memory.
    """
    sentences = (
        _tensor_reason(search, chosen),
        _pipeline_reason(search, chosen),
        _schedule_reason(search, chosen),
        _context_reason(search, chosen),
        f"DP {chosen.strategy.data}: set by `replicas`",
        _expert_reason(search, chosen),
        _micro_batches_reason(search, chosen),
        _checkpointing_reason(search, chosen),
        _adapters_reason(search),
        _memory_reason(search, chosen.memory),
    )
    return tuple(sentence for sentence in sentences if sentence)


def _tensor_reason(search: DegreeSearch, chosen: Candidate) -> str:
    tensor = chosen.strategy.tensor
    if search.job.parallelism.tensor is not None:
        return f"TP {tensor}: set by `parallelism.tensor`"
    used = chosen.strategy
    smaller = [t for t in search.tensors(used.context) if t < tensor]
    if not smaller:
        return f"TP {tensor}: the smallest degree that splits the model evenly and fills workers"
    rejected = search.with_micro_batches(replace(used.layout, tensor=smaller[-1]), used.checkpointing, used.schedule)
    limit = search.cluster_limits.largest_memory
    if limit is not None and rejected.needed_bytes > limit:
        need = f"TP {smaller[-1]} needs {format_bytes(rejected.needed_bytes)} per GPU, usable are {format_bytes(limit)}"
        return f"TP {tensor}: the smallest degree whose ranks hold their part of the model ({need})"
    return f"TP {tensor}: the smallest degree that fills workers of {search.gpus_per_worker} GPUs"


def _adapters_reason(search: DegreeSearch) -> str:
    lora = search.job.training.lora
    return (skipped_targets(lora, search.job.architecture) or "") if lora is not None else ""


def _pipeline_reason(search: DegreeSearch, chosen: Candidate) -> str:
    pipeline = chosen.strategy.pipeline
    if search.job.parallelism.pipeline is not None:
        return f"PP {pipeline}: set by `parallelism.pipeline`"
    if pipeline == 1:
        return "PP 1: the model fits without a pipeline, which would idle at the ends of each step"
    widest = search.cluster_limits.domain_gpus or 1
    return f"PP {pipeline}: the fewest stages that fit; an NVLink domain of {widest} GPUs alone does not hold a replica"


def _context_reason(search: DegreeSearch, chosen: Candidate) -> str:
    context, method = chosen.strategy.context, search.job.parallelism.context_method
    if context == 1:
        return ""
    if search.job.parallelism.context is not None:
        return f"CP {context} ({method}): set by `parallelism.context`"
    tokens = search.job.training.sequence_length // context
    return f"CP {context} ({method}): the fewest ranks to a sequence with which a layout fits, {tokens} tokens each"


def _schedule_reason(search: DegreeSearch, chosen: Candidate) -> str:
    if chosen.strategy.pipeline == 1:
        return ""
    name = chosen.strategy.schedule.value
    if search.job.parallelism.schedule is not None:
        return f"schedule {name}: set by `parallelism.schedule`"
    if chosen.strategy.schedule is PipelineSchedule.ONE_F_ONE_B:
        return f"schedule {name}: no other is estimated to be faster by more than 2 %, and fits"
    if not kind_of(PipelineSchedule.ONE_F_ONE_B).accepts(chosen.strategy.pipeline, chosen.strategy.micro_batches):
        return f"schedule {name}: the fastest that fits"
    used = chosen.strategy
    plain = search.candidate(used.layout, used.micro_batches, PipelineSchedule.ONE_F_ONE_B, used.checkpointing)
    gain = search.seconds(plain.strategy) / search.seconds(used) - 1
    return f"schedule {name}: {gain:.0%} faster than 1F1B, which needs {format_bytes(plain.needed_bytes)} per GPU"


def _checkpointing_reason(search: DegreeSearch, chosen: Candidate) -> str:
    if (
        search.job.training.activation_checkpointing is not None
        or chosen.strategy.checkpointing is ActivationCheckpointing.NONE
    ):
        return ""
    name = f"activation checkpointing {chosen.strategy.checkpointing.value}"
    used = chosen.strategy
    plain = search.candidate(used.layout, used.micro_batches, used.schedule, ActivationCheckpointing.NONE)
    needed_bytes = plain.needed_bytes
    limit = search.cluster_limits.largest_memory
    if limit is not None and needed_bytes > limit:
        return f"{name}: without it a rank needs {format_bytes(needed_bytes)}, usable are {format_bytes(limit)}"
    return f"{name}: other layouts of as many GPUs fit without it and are slower"


def _expert_reason(search: DegreeSearch, chosen: Candidate) -> str:
    mixture, expert = search.job.architecture.mixture, chosen.strategy.expert
    if mixture is None:
        return ""
    if search.job.parallelism.expert is not None:
        return f"EP {expert}: set by `parallelism.expert`"
    held = f"{mixture.experts // expert} of {mixture.experts} experts a rank"
    if expert == 1:
        return f"EP 1: every replica has all experts, and no token travels ({held})"
    return f"EP {expert}: {held}; fewer parts need more memory or take longer"


def _micro_batches_reason(search: DegreeSearch, chosen: Candidate) -> str:
    count, pipeline = chosen.strategy.micro_batches, chosen.strategy.pipeline
    name = f"{count} micro-batch" if count == 1 else f"{count} micro-batches"
    idle = round(100 * (pipeline - 1) / (count + pipeline - 1))
    plain = pipeline > 1 and chosen.strategy.schedule is PipelineSchedule.ONE_F_ONE_B
    tail = f"; the pipeline idles {idle} % of a step" if plain else ""
    if search.job.parallelism.micro_batches is not None:
        return f"{name}: set by `parallelism.microBatches`{tail}"
    if pipeline == 1:
        return f"{name}: the fewest whose activations fit"
    if count >= MICRO_BATCHES_PER_STAGE * pipeline:
        return f"{name}: at least {MICRO_BATCHES_PER_STAGE} per stage{tail}"
    return f"{name}: as many as a replica's share of the batch allows{tail}"


def _memory_reason(search: DegreeSearch, memory: Memory | None) -> str:
    if memory is None:
        return ""
    text = (
        f"memory: stage {memory.stage} is the fullest with {format_bytes(memory.total)} per GPU ({memory_text(memory)})"
    )
    limit = search.cluster_limits.largest_memory
    if limit is None:
        return f"{text}; not compared, since the memory of the GPUs is not known"
    return f"{text}, usable are {format_bytes(limit)}"


def time_reasons(search: DegreeSearch, estimate: Estimate | None) -> tuple[str, ...]:
    """What a step is estimated to take, and in what; nothing where there is no price."""
    if estimate is None or search.cost_model is None:
        return ()
    gpu = search.cost_model.machine.gpu.name
    return (f"time: {estimate.seconds:.3g} s per step on {gpu} (MFU {estimate.mfu:.0%}); {step_text(estimate)}",)


def nothing_fits(search: DegreeSearch) -> PlanError:
    """The error for a search without a result: no candidate at all, or none that a GPU holds."""
    candidates = [
        one
        for context in context_degrees_of_job(search.job)
        for again in checkpointing_options(search.job.training)
        for one in search.candidates(context, again)
    ]
    if not candidates:
        return _no_candidate(search)
    closest = min(candidates, key=lambda c: c.needed_bytes)
    detail = f" ({memory_text(closest.memory)})" if closest.memory else ""
    limit = search.cluster_limits.largest_memory or 0
    used = closest.strategy
    return PlanError(
        f"the model does not fit: TP {used.tensor} x PP {used.pipeline} with {used.micro_batches} micro-batches comes "
        f"closest and needs {format_bytes(closest.needed_bytes)} per GPU{detail}; "
        f"the GPUs here offer {format_bytes(limit)}. Raise `parallelism.zeroStage`, "
        "`parallelism.microBatches` or `replicas`, shorten `training.sequenceLength`, or add larger GPUs",
        "OutOfMemory",
        depends_on_cluster=True,
    )


def _no_candidate(search: DegreeSearch) -> PlanError:
    gpus = search.gpus_per_worker
    return PlanError(
        f"no tensor and pipeline degree gives whole workers of {gpus} GPUs with `replicas` {search.replicas}: change "
        "`workers.gpusPerWorker` or `replicas`, or set `parallelism.tensor` and `parallelism.pipeline`",
        "InvalidSpec",
        depends_on_cluster=search.job.parallelism.tensor is None,
    )
