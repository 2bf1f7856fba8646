"""Errors of a search without a result. The message says what to change."""

from __future__ import annotations

from dataclasses import replace

from meshwright.figures import counted
from meshwright.planner.cost.memory import Memory, worst_stage
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.errors import PlanError
from meshwright.planner.search.candidate import Candidate, FittingLayout
from meshwright.planner.search.expand import estimate_cost, least_memory_strategies
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search_space import layouts, micro_batch_sizes, request_tiers, tensor_degrees
from meshwright.planner.units import GIB, count_gpus, format_bytes
from meshwright.rules.parallelism import MAX_WORKERS


class NothingFitsError(ValueError):
    """No layout of the request fits. `nearest` is the one that needs the least memory, if there is one."""

    def __init__(self, message: str, nearest: Strategy | None = None, memory: Memory | None = None) -> None:
        super().__init__(message)
        self.nearest = nearest
        self.memory = memory


def no_layout_message(request: SearchRequest) -> str:
    """Return the message for degrees that do not divide the model or the batch."""
    pins = request.pins
    pinned_values = {
        name: value
        for name in ("tensor", "context", "pipeline", "expert", "data", "micro_batches", "micro_batch_size")
        if (value := getattr(pins, name)) is not None
    }
    pinned_text = ", ".join(f"{name} {value}" for name, value in pinned_values.items()) or "nothing"
    return (
        f"no layout divides the model and the batch of {counted(request.work.global_batch, 'sequence')} over at most "
        f"{count_gpus(request.gpus)} with {pinned_text} given: change a given degree, the batch, or the number of GPUs"
    )


def closest_layout(request: SearchRequest) -> FittingLayout | None:
    """The strategy that needs the least memory of all that the request and the runtime allow; None if there is none."""
    smallest: FittingLayout | None = None
    for narrowed in (one for tier in request_tiers(request) for one in tier):
        for layout in layouts(narrowed):
            for strategy in least_memory_strategies(narrowed, layout):
                if not request.allows(strategy):
                    continue
                memory = worst_stage(request.work, strategy, request.runtime)
                if smallest is None or memory.total < smallest.memory.total:
                    smallest = FittingLayout(strategy, memory)
    return smallest


def nothing_fits_error(request: SearchRequest) -> NothingFitsError:
    """Return the error for a model that does not fit in any layout, with the layout that needs the least memory."""
    closest = closest_layout(request)
    if closest is None:
        return NothingFitsError(no_layout_message(request))
    strategy, memory = closest.strategy, closest.memory
    total, limit = memory.total, request.memory_limit(1)
    message = (
        f"no layout fits: the least that a rank needs is {total / GIB:.1f} GiB of {limit / GIB:.1f} GiB "
        f"({Candidate(strategy, estimate_cost(request, strategy), request.node).summary}, stage {memory.stage}): add "
        "GPUs, take GPUs "
        "with more memory, or shorten the sequence"
    )
    return NothingFitsError(message, strategy, memory)


def memory_text(memory: Memory) -> str:
    """Return the parts of a memory estimate as text."""
    recomputing = memory.working > memory.logits
    parts = (
        ("parameters", memory.parameters),
        ("master weights", memory.master),
        ("gradients", memory.peak_gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.activations),
        ("recomputed", memory.working) if recomputing else ("logits", memory.logits),
        ("gathered", memory.gathered),
        ("buffers", memory.buffers),
        ("context and fragmentation", memory.context + memory.fragmentation),
    )
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size >= 1)


def plan_error(request: SearchRequest) -> PlanError:
    """Return the error for a search without a result: there is no candidate, or none fits on a GPU."""
    closest = closest_layout(request)
    if closest is None:
        return _no_candidate(request)
    used, memory = closest.strategy, closest.memory
    batches = counted(used.micro_batches, "micro-batch")
    return PlanError(
        f"the model does not fit: TP {used.tensor} x PP {used.pipeline} with {batches} needs the least memory, "
        f"{format_bytes(memory.total)} per GPU ({memory_text(memory)}), "
        f"and GPUs have {format_bytes(request.memory_limit(1))} usable. "
        f"Raise {_fields_to_raise(request, used)}, shorten `training.sequenceLength`, or add larger GPUs"
        f"{_sharded_gradients_hint(request, used) or _vocabulary_hint(request)}",
        "OutOfMemory",
        depends_on_cluster=True,
    )


def _sharded_gradients_hint(request: SearchRequest, used: Strategy) -> str:
    """A hint, if only the full gradients that accumulate over micro-batches do not fit."""
    settings, sizes = used.settings, micro_batch_sizes(request, used.layout)
    if sizes and used.micro_batches == 1:
        # Without the accumulated gradients, smaller micro-batches need less.
        used = replace(used, micro_batches=used.micro_batch_size // sizes[0], micro_batch_size=sizes[0])
    accumulates = used.zero_stage >= 2 and used.micro_batches > 1 and request.runtime.stores_masters
    if not accumulates or settings.flat or settings.reduces_each or not settings.master_weights:
        return ""
    alone = replace(used, micro_batches=1, micro_batch_size=used.micro_batches * used.micro_batch_size)
    if used.pipeline == 1 and _fits(request, alone):
        return ". It fits with `parallelism.microBatches: 1`"
    if used.pipeline > 1 and used.schedule_kind.mixes_backward:
        return ""
    reducing = replace(used, settings=replace(settings, reduces_each=True))
    if not _fits(request, reducing):
        return ""
    return ". It fits with `parallelism.dataParallel.reduceEveryMicroBatch: true` (Experimental)"


def _vocabulary_hint(request: SearchRequest) -> str:
    """A hint, if the vocabulary allows no tensor degree with which the model fits, and a slightly larger one does."""
    techniques, model = request.techniques, request.work.model
    if techniques.pads_vocabulary or request.pins.tensor is not None:
        return ""
    padding = replace(request, techniques=replace(techniques, pads_vocabulary=True))
    now, degree = (max(tensor_degrees(one), default=1) for one in (request, padding))
    if degree <= now:
        return ""
    size = -(-model.vocab_size // degree) * degree
    closest = closest_layout(_with_vocabulary(request, size))
    if closest is None or closest.memory.total > request.memory_limit(1):
        return ""
    return (
        f". It fits with `model.vocabSize: {size}`, a multiple of {degree}: tensor parallelism splits the vocabulary "
        f"evenly, which {model.vocab_size} allows up to TP {now}"
    )


def _with_vocabulary(request: SearchRequest, size: int) -> SearchRequest:
    model = request.work.model.model_copy(update={"vocab_size": size})
    work, job = replace(request.work, model=model), request.job
    return replace(request, work=work, job=None if job is None else replace(job, architecture=model, work=work))


def _fits(request: SearchRequest, strategy: Strategy) -> bool:
    return worst_stage(request.work, strategy, request.runtime).total <= request.memory_limit(1)


def _fields_to_raise(request: SearchRequest, used: Strategy) -> str:
    """The fields whose larger values need less memory, as text. What is left out was raised already."""
    pins = request.pins
    raisable = pins.zero_stage is not None and pins.zero_stage < request.techniques.zero_stages[-1]
    fields = ["`parallelism.zeroStage`"] if raisable else []
    if pins.micro_batches is not None and used.micro_batch_size > 1:
        fields.append("`parallelism.microBatches`")
    more = "gpus" if pins.data is None else "replicas"
    listed = f"{', '.join(fields)} or `{more}`" if fields else f"`{more}`"
    each = request.gpus_per_worker
    if used.world_size * 2 <= MAX_WORKERS * each:
        return listed
    return f"`workers.gpusPerWorker` (a job has at most {MAX_WORKERS} workers, here of {count_gpus(each)}), {listed}"


def _no_candidate(request: SearchRequest) -> PlanError:
    gpus = request.gpus_per_worker
    if request.pins.data is None:
        return PlanError(
            f"no layout fills workers of {count_gpus(gpus)} with at most {count_gpus(request.gpus)} and divides the "
            f"batch of {counted(request.work.global_batch, 'sequence')} over its replicas: change `gpus`, "
            "`workers.gpusPerWorker` or `training.globalBatchSize`, or leave more of `parallelism` to the planner",
            "InvalidSpec",
            depends_on_cluster=request.pins.tensor is None,
        )
    return PlanError(
        f"no tensor and pipeline degree gives full workers of {count_gpus(gpus)} with `replicas` {request.pins.data}: "
        "change `workers.gpusPerWorker` or `replicas`, or set `parallelism.tensor` and `parallelism.pipeline`"
        f"{_vocabulary_hint(request)}",
        "InvalidSpec",
        depends_on_cluster=request.pins.tensor is None,
    )
