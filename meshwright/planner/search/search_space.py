"""What a search tries: the degrees that a model and a machine allow, and what may be decided beside them, in order.

Ranks are interchangeable within a group, so a layout is counted, not enumerated by rank: only degrees differ. Degrees
that cannot be better are left out here: a tensor-parallel group never leaves its NVLink domain (it talks several times
in every layer), a context-parallel rank gets at least `MIN_CONTEXT_TOKENS` tokens, and data parallelism takes what is
left, in whole sequences of the batch.

For a job whose replicas are given, recomputing costs time and no GPU, so it is weighed against what else memory would
buy; sharing sequences makes every replica larger, and is done where no layout fits otherwise. A schedule is one that
the worker runs with everything else that the job asks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, isqrt

from meshwright.api.data_parallel import DataParallelStrategy
from meshwright.api.parallelism import ParallelismSpec, PipelineSchedule
from meshwright.api.training import ActivationCheckpointing, TrainingSpec
from meshwright.layout import Layout
from meshwright.models.architecture import Architecture
from meshwright.planner.search.request import Objective, SearchRequest
from meshwright.planner.workload import TrainingJob
from meshwright.schedules.pipeline_layout import stages_per_rank
from meshwright.schedules.registry import kind_of, schedules_where

MIN_CONTEXT_TOKENS = 2048
MAX_MICRO_BATCH = 32


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def layouts(request: SearchRequest) -> Iterator[Layout]:
    """Every layout that the request allows."""
    model = request.work.model
    for tensor in tensor_degrees(request):
        for context in context_degrees(request, tensor):
            for pipeline in pipeline_degrees(request):
                size = tensor * context * pipeline
                for data in data_degrees(request, size):
                    if not _fills_workers(request, tensor, size * data):
                        continue
                    for expert in expert_degrees(request, model, context * data):
                        yield Layout(tensor, pipeline, data, context, expert)


def tensor_degrees(request: SearchRequest) -> list[int]:
    """Degrees that split heads, feed-forward and vocabulary evenly, within an NVLink domain."""
    pinned = request.pins.tensor
    if pinned is not None:
        return [pinned]
    model, techniques = request.work.model, request.techniques
    common = gcd(model.heads, model.intermediate_size)
    if model.mixture is not None and request.fixed.expert_tensor:
        common = gcd(common, model.mixture.intermediate_size)
    if not techniques.pads_vocabulary:
        common = gcd(common, model.vocab_size)
    if not techniques.replicates_kv_heads:
        common = gcd(common, model.kv_heads)
    allowed = [t for t in divisors(common) if t <= request.domain and request.work.sequence_length % t == 0]
    return [t for t in allowed if model.kv_heads % t == 0 or t % model.kv_heads == 0]


def context_degrees(request: SearchRequest, tensor: int) -> list[int]:
    """Powers of two that leave every rank enough tokens to be worth the exchange."""
    if request.pins.context is not None:
        return [request.pins.context]
    if not request.techniques.context:
        return [1]
    length = request.work.sequence_length
    context_options, degree = [1], 2
    while length // degree >= MIN_CONTEXT_TOKENS and length % (2 * degree * tensor) == 0 and degree <= request.gpus:
        context_options.append(degree)
        degree *= 2
    return context_options


def pipeline_degrees(request: SearchRequest) -> list[int]:
    """Divisors of the layers, with embedding and output counted as none, one or two of them, and powers of two."""
    if request.pins.pipeline is not None:
        return [request.pins.pipeline]
    layers = request.work.model.layers
    max_degree = min(layers, request.gpus)
    degrees_to_try = {*divisors(layers), *divisors(layers + 1), *divisors(layers + 2)}
    degrees_to_try.update(1 << power for power in range(max_degree.bit_length()))
    if not request.techniques.uneven_split and layers <= 64:
        degrees_to_try.update(range(1, layers + 1))
    if request.work.model.tie_embeddings and not request.techniques.ties_over_stages:
        return [1]
    return sorted(degree for degree in degrees_to_try if degree <= max_degree)


def data_degrees(request: SearchRequest, size: int) -> list[int]:
    """Numbers of replicas of `size` ranks that share the batch evenly: the most that fit, or all, by objective."""
    max_replicas = request.gpus // size
    batch = request.work.global_batch
    if request.pins.data is not None:
        return [request.pins.data] if request.pins.data <= max_replicas and batch % request.pins.data == 0 else []
    replica_counts = [count for count in divisors(batch) if count <= max_replicas]
    if request.objective in (Objective.GPUS, Objective.COST):
        return replica_counts
    return replica_counts[-1:]


def expert_degrees(request: SearchRequest, model: Architecture, replicas: int) -> list[int]:
    """Divisors of the experts that divide the ranks with the same dense parameters."""
    if request.pins.expert is not None:
        return [request.pins.expert] if replicas % request.pins.expert == 0 else []
    if model.mixture is None or not request.techniques.expert:
        return [1]
    return divisors(gcd(model.mixture.experts, replicas))


def micro_batch_sizes(request: SearchRequest, layout: Layout) -> list[int]:
    """Sequences of one micro-batch: powers of two and what is pinned, dividing a replica's part of the batch."""
    replica_batch = request.work.global_batch // layout.data
    pins = request.pins
    if pins.micro_batches is not None:
        return [replica_batch // pins.micro_batches] if replica_batch % pins.micro_batches == 0 else []
    if pins.micro_batch_size is not None:
        return [pins.micro_batch_size] if replica_batch % pins.micro_batch_size == 0 else []
    sizes = [size for size in divisors(replica_batch) if size <= MAX_MICRO_BATCH and size & (size - 1) == 0]
    keeping_stages_busy = [size for size in sizes if replica_batch // size >= layout.pipeline]
    return keeping_stages_busy or sizes[:1]


def _fills_workers(request: SearchRequest, tensor: int, world: int) -> bool:
    gpus = request.gpus_per_worker
    return world % gpus == 0 and (tensor % gpus == 0 or gpus % tensor == 0)


CHECKPOINTING_OPTIONS = (
    ActivationCheckpointing.NONE,
    ActivationCheckpointing.SELECTIVE,
    ActivationCheckpointing.FULL,
    ActivationCheckpointing.SQRT,
)
"""In order of what they cost."""
CANDIDATE_SCHEDULES = tuple(
    sorted(
        schedules_where(lambda kind: kind.candidate_rank is not None),
        key=lambda order: kind_of(order).candidate_rank or 0,
    )
)
"""Synchronous schedules that may be worth it, the simplest first; the others hold more and wait as long."""


def checkpointing_options(training: TrainingSpec) -> tuple[ActivationCheckpointing, ...]:
    """What to try, the cheapest first; what the spec gives is the only one."""
    requested = training.activation_checkpointing
    if requested is not None:
        return (requested,)
    # The worker compiles it into layers of one graph alone, which depends on much that is not decided yet.
    return tuple(
        option
        for option in CHECKPOINTING_OPTIONS
        if not (training.compile and option is ActivationCheckpointing.SELECTIVE)
    )


def context_degrees_of_job(job: TrainingJob) -> list[int]:
    """Context degrees: the one that is given, or 1 and powers of two that leave ranks enough even parts of a row."""
    model, training, parallelism = job.architecture, job.training, job.parallelism
    if parallelism.context is not None:
        return [parallelism.context]
    needs_whole_sequences = (
        training.attention_dropout > 0
        or kind_of(parallelism.order).asynchronous
        or (model.mixture is not None and model.mixture.capacity_factor is not None)
    )
    degrees, length = [1], training.sequence_length
    while (
        not needs_whole_sequences
        and length // (2 * degrees[-1]) >= MIN_CONTEXT_TOKENS
        and length % (4 * degrees[-1]) == 0
    ):
        degrees.append(2 * degrees[-1])
    return degrees


def schedule_allowed(schedule: PipelineSchedule, asked: ParallelismSpec, layout: Layout, model: Architecture) -> bool:
    """Whether the worker runs a schedule in this layout, as far as the number of micro-batches does not decide it."""
    spec = asked.model_copy(update={"schedule": schedule})
    rank_stages = stages_per_rank(spec, layout.pipeline)
    if layout.pipeline * rank_stages > model.layers or (rank_stages > 1 and asked.layer_split is not None):
        return False
    kind = kind_of(schedule)
    if kind.even and layout.pipeline % 2:
        return False
    flat_shards = asked.zero_stage == 1 or asked.data_parallel.strategy is DataParallelStrategy.ZERO
    return not (kind.bidirectional and flat_shards and layout.shard_ranks > 1)
