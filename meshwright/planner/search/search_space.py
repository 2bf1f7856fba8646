"""The layouts that a search tries: the degrees that a model and a machine allow, in order.

Ranks are interchangeable within a group, so layouts differ only in degrees. Degrees that cannot be better are left out:
a tensor-parallel group stays in its NVLink domain, because it communicates several times in every layer; a
context-parallel rank has at least `MIN_CONTEXT_TOKENS` tokens; data parallelism uses the remaining GPUs, and every
replica has full sequences of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import gcd, isqrt

from meshwright.api.parallelism import ContextMethod, PipelineSchedule
from meshwright.layout import Layout
from meshwright.models.architecture import Architecture
from meshwright.planner.deadline import check_deadline
from meshwright.planner.search.request import Objective, SearchRequest
from meshwright.planner.search.runtime_rules import largest_value
from meshwright.rules.context import head_exchange_ranks, heads_divide
from meshwright.schedules.pipeline_layout import stages_per_rank
from meshwright.schedules.registry import kind_of

MIN_CONTEXT_TOKENS = 2048
MAX_MICRO_BATCHES = largest_value("microBatches")
MAX_MICRO_BATCH = 32
MICRO_BATCHES_PER_STAGE = 4
"""Target in order of preference: with 4 micro-batches per stage a pipeline idles less than a fifth of the time."""


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    return list(_divisors(number))


@lru_cache(maxsize=1024)
def _divisors(number: int) -> tuple[int, ...]:
    # Every layout needs the divisors of a replica's batch, and there are few different batches.
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return (*small, *(number // d for d in reversed(small) if d * d != number))


def request_tiers(request: SearchRequest) -> Iterator[list[SearchRequest]]:
    """Yield lists of narrower requests to try in turn. The first list with a layout that fits ends the search.

    With an order of preference there is a list for each context degree. Its requests are the checkpointing options, in
    the order of their cost. Sharing sequences needs more GPUs for every replica; recomputation only takes time.
    """
    if not request.order_of_preference:
        yield [request]
        return
    pins = request.pins
    options = (pins.checkpointing,) if pins.checkpointing is not None else request.techniques.checkpointing
    for context in context_degrees(request, tensor=1):
        yield [replace(request, pins=replace(pins, context=context, checkpointing=option)) for option in options]


def layouts(request: SearchRequest) -> list[Layout]:
    """Return every layout that the request allows, in order of preference if it has one."""
    found = [one for one in _layouts(request) if request.world_size in (None, one.world_size)]
    if request.order_of_preference:
        found.sort(key=lambda one: (one.pipeline, one.tensor, one.expert))
    return found


def _layouts(request: SearchRequest) -> Iterator[Layout]:
    model = request.work.model
    for tensor in tensor_degrees(request):
        for context in context_degrees(request, tensor):
            for pipeline in pipeline_degrees(request):
                check_deadline()
                size = tensor * context * pipeline
                for data in data_degrees(request, size):
                    if not _fills_workers(request, tensor, size * data):
                        continue
                    for expert in expert_degrees(request, model, context * data):
                        yield Layout(tensor, pipeline, data, context, expert)


def tensor_degrees(request: SearchRequest) -> list[int]:
    """Return the degrees that split heads, feed-forward and vocabulary evenly, within an NVLink domain."""
    pins = request.pins
    if pins.tensor is not None:
        return [pins.tensor]
    model, techniques, length = request.work.model, request.techniques, request.work.sequence_length
    common = gcd(model.heads, model.intermediate_size)
    if model.mixture is not None:
        common = gcd(common, model.mixture.intermediate_size) if request.fixed.expert_tensor else common
        common = gcd(common, model.mixture.shared_intermediate_size) if request.order_of_preference else common
    if not techniques.pads_vocabulary:
        common = gcd(common, model.vocab_size)
    if not techniques.replicates_kv_heads:
        common = gcd(common, model.kv_heads)
    context, sequence = pins.context or 1, pins.sequence_parallel is not False
    ranks = head_exchange_ranks(pins.context_method or ContextMethod.RING_ZIG_ZAG, context, request.fixed.ulysses)
    return [
        tensor
        for tensor in divisors(common)
        if tensor <= request.domain
        and (length % tensor == 0 or not sequence)
        and (context == 1 or length >= 2 * context * (tensor if sequence else 1))
        and heads_divide(model.heads, model.kv_heads, tensor, ranks)
    ]


def context_degrees(request: SearchRequest, tensor: int) -> list[int]:
    """Return powers of two with which every rank has at least `MIN_CONTEXT_TOKENS` tokens."""
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
    """Return the divisors of the layers (embedding and output count as zero, one or two), and powers of two.

    With an order of preference, return every degree with which each stage has a layer.
    """
    if request.pins.pipeline is not None:
        return [request.pins.pipeline]
    layers, job = request.work.model.layers, request.job
    if request.work.model.tie_embeddings and not request.techniques.ties_over_stages:
        return [1]
    max_degree = min(layers, request.gpus)
    if job is not None:
        return [p for p in range(1, max_degree + 1) if p * stages_per_rank(job.parallelism, p) <= layers]
    degrees_to_try = {*divisors(layers), *divisors(layers + 1), *divisors(layers + 2)}
    degrees_to_try.update(1 << power for power in range(max_degree.bit_length()))
    if not request.techniques.uneven_split and layers <= 64:
        degrees_to_try.update(range(1, layers + 1))
    return sorted(degree for degree in degrees_to_try if degree <= max_degree)


def data_degrees(request: SearchRequest, size: int) -> list[int]:
    """Return the numbers of replicas of `size` ranks that divide the batch: the largest, or by objective all."""
    max_replicas = request.gpus // size
    batch = request.work.global_batch
    if request.pins.data is not None:
        return [request.pins.data] if request.pins.data <= max_replicas and batch % request.pins.data == 0 else []
    replica_counts = [count for count in divisors(batch) if count <= max_replicas]
    if request.objective in (Objective.GPUS, Objective.COST):
        return replica_counts
    return replica_counts[-1:]


def expert_degrees(request: SearchRequest, model: Architecture, replicas: int) -> list[int]:
    """Return the divisors of the experts that divide the ranks with the same dense parameters."""
    if request.pins.expert is not None:
        return [request.pins.expert] if replicas % request.pins.expert == 0 else []
    if model.mixture is None or not request.techniques.expert:
        return [1]
    return divisors(gcd(model.mixture.experts, replicas))


def micro_batch_sizes(request: SearchRequest, layout: Layout, schedule: PipelineSchedule | None = None) -> list[int]:
    """Return numbers of sequences of a micro-batch, ascending: the pinned one, or divisors of a replica's batch.

    A free search tries powers of two up to `MAX_MICRO_BATCH`, with at least one micro-batch for each stage. In order of
    preference there are at least `MICRO_BATCHES_PER_STAGE` for each. If the batch is too small, micro-batches are as
    small as possible.

    Args:
        request: the search.
        layout: the degrees.
        schedule: omit numbers of micro-batches that this schedule does not support.
    """
    replica_batch, pins, pipeline = request.work.global_batch // layout.data, request.pins, layout.pipeline
    if pins.micro_batches is not None:
        sizes = [replica_batch // pins.micro_batches] if replica_batch % pins.micro_batches == 0 else []
    elif pins.micro_batch_size is not None:
        sizes = [pins.micro_batch_size] if replica_batch % pins.micro_batch_size == 0 else []
    else:
        sizes = divisors(replica_batch)
        if not request.order_of_preference:
            sizes = [size for size in sizes if size <= MAX_MICRO_BATCH and size & (size - 1) == 0]
    if schedule is not None:
        accepts = kind_of(schedule).accepts
        counts = [(size, replica_batch // size) for size in sizes]
        sizes = [size for size, count in counts if count <= MAX_MICRO_BATCHES and accepts(pipeline, count)]
    per_stage = MICRO_BATCHES_PER_STAGE if request.order_of_preference else 1
    least = per_stage * pipeline if pipeline > 1 else 1
    return [size for size in sizes if replica_batch // size >= least] or sizes[:1]


def _fills_workers(request: SearchRequest, tensor: int, world: int) -> bool:
    gpus = request.gpus_per_worker
    return world % gpus == 0 and (tensor % gpus == 0 or gpus % tensor == 0)
