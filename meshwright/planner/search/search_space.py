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
MAX_EVERY_DEGREE = 256
"""Largest budget of GPUs for which every pipeline degree and every size of a micro-batch is tried. More take time."""
MAX_EVERY_SIZE = 4096
"""Largest budget of GPUs for which other sizes of micro-batches than powers of two are tried."""
MAX_EVERY_PIPELINE = 16
"""Up to this pipeline degree every one is tried for a dense model and a budget of at most `MAX_EVERY_SIZE` GPUs.

With a mixture each degree has several expert degrees, which take more time.
"""
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

    For a budget of GPUs the last list has pipelines inside an NVLink domain. Its links are fast enough for ZeRO and
    tensor parallelism, and a pipeline that is faster by its formula loses that to uneven passes.
    """
    if not request.order_of_preference:
        yield [request]
        if not request.pipelines_in_domain:
            yield [replace(request, pipelines_in_domain=True)]
        return
    pins = request.pins
    options = request.recomputations
    for context in context_degrees(request, tensor=1):
        yield [replace(request, pins=replace(pins, context=context, checkpointing=option)) for option in options]


def layouts(request: SearchRequest) -> list[Layout]:
    """Return every layout that the request allows, in order of preference if it has one."""
    found = [one for one in _layouts(request) if request.world_size in (None, one.world_size)]
    if request.order_of_preference:
        found.sort(key=lambda one: (one.pipeline, one.tensor, one.expert, -one.data))
    return found


def _layouts(request: SearchRequest) -> Iterator[Layout]:
    for tensor in tensor_degrees(request):
        for context in context_degrees(request, tensor):
            for pipeline in pipeline_degrees(request):
                check_deadline()
                if not _may_have_stages(request, tensor * context, pipeline):
                    continue
                yield from _with_replicas(request, Layout(tensor, pipeline, 1, context))


def _may_have_stages(request: SearchRequest, stage: int, pipeline: int) -> bool:
    """Whether a pipeline of stages with so many ranks may be tried."""
    if request.pipelines_in_domain or pipeline == 1 or request.pins.pipeline is not None or request.machine is None:
        return True
    return request.machine.gpu.domain == 1 or stage * pipeline > request.machine.fabric.domain


def _with_replicas(request: SearchRequest, replica: Layout) -> Iterator[Layout]:
    """Yield the layouts of a replica: with all numbers of replicas, or for each expert degree only the first to try.

    Those are the most replicas, and fewer ones with larger micro-batches than any of the layouts before.
    `with_fewer_replicas` has the others.
    """
    every, largest = _lists_all_replicas(request), dict[int, int]()
    for data in data_degrees(request, replica):
        size = _largest_micro_batch(request, replace(replica, data=data))
        for expert in expert_degrees(request, request.work.model, replica.context * data):
            if every or size > largest.get(expert, 0):
                largest[expert] = size
                yield replace(replica, data=data, expert=expert)


def with_fewer_replicas(request: SearchRequest, layout: Layout) -> Iterator[Layout]:
    """Yield layouts with fewer replicas, down to one with micro-batches that are as large. None if all are listed.

    Of layouts with micro-batches of at most the same size, those with fewer replicas take longer. But they may be the
    only ones that a schedule, a micro-batch or memory allows.
    """
    if _lists_all_replicas(request) or request.pins.data is not None:
        return
    size = _largest_micro_batch(request, layout)
    for data in data_degrees(request, layout):
        if data < layout.data and data * layout.context % layout.expert == 0:
            fewer = replace(layout, data=data)
            yield fewer
            if _largest_micro_batch(request, fewer) >= size:
                return


def _lists_all_replicas(request: SearchRequest) -> bool:
    return request.objective in (Objective.GPUS, Objective.COST) or request.order_of_preference


def _largest_micro_batch(request: SearchRequest, layout: Layout) -> int:
    return max(micro_batch_sizes(request, layout), default=0)


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

    For the replicas of a job, or at most `MAX_EVERY_DEGREE` GPUs, return every degree with which each stage has a
    layer. For dense models and at most `MAX_EVERY_SIZE` GPUs, also those up to `MAX_EVERY_PIPELINE`. A search for the
    fewest or cheapest GPUs, which tries every number of them, has neither.
    """
    if request.pins.pipeline is not None:
        return [request.pins.pipeline]
    layers, job = request.work.model.layers, request.job
    if request.work.model.tie_embeddings and not request.techniques.ties_over_stages:
        return [1]
    max_degree = min(layers, request.gpus)
    chunks = stages_per_rank(job.parallelism, 2) if job is not None else 1
    tries_more = job is not None or request.objective not in (Objective.GPUS, Objective.COST)
    if tries_more and (request.order_of_preference or request.gpus <= MAX_EVERY_DEGREE):
        return [p for p in range(1, max_degree + 1) if p == 1 or p * chunks <= layers]
    degrees_to_try = {*divisors(layers), *divisors(layers + 1), *divisors(layers + 2)}
    degrees_to_try.update(1 << power for power in range(max_degree.bit_length()))
    if tries_more and request.gpus <= MAX_EVERY_SIZE and request.work.model.mixture is None:
        degrees_to_try.update(range(1, MAX_EVERY_PIPELINE + 1))
    if not request.techniques.uneven_split and layers <= 64 and job is None:
        degrees_to_try.update(range(1, layers + 1))
    return sorted(p for p in degrees_to_try if p <= max_degree and (p == 1 or p * chunks <= layers))


def data_degrees(request: SearchRequest, replica: Layout) -> list[int]:
    """Return the numbers of replicas that divide the batch and fill workers, the largest first."""
    size, batch = replica.replica_size, request.work.global_batch
    max_replicas = request.gpus // size
    pinned = request.pins.data
    counts = reversed(divisors(batch)) if pinned is None else [pinned] if batch % pinned == 0 else []
    return [count for count in counts if count <= max_replicas and _fills_workers(request, replica, count)]


def expert_degrees(request: SearchRequest, model: Architecture, replicas: int) -> list[int]:
    """Return the divisors of the experts that divide the ranks with the same dense parameters."""
    if request.pins.expert is not None:
        return [request.pins.expert] if replicas % request.pins.expert == 0 else []
    if model.mixture is None or not request.techniques.expert:
        return [1]
    return divisors(gcd(model.mixture.experts, replicas))


def micro_batch_sizes(request: SearchRequest, layout: Layout, schedule: PipelineSchedule | None = None) -> list[int]:
    """Return numbers of sequences of a micro-batch, ascending: the pinned one, or divisors of a replica's batch.

    There is at least one micro-batch for each stage, and without a machine, which could estimate the bubble, at least
    `MICRO_BATCHES_PER_STAGE`. If the batch is too small, micro-batches are as small as possible. For more than
    `MAX_EVERY_DEGREE` GPUs only sizes up to `MAX_MICRO_BATCH` are tried, and for more than `MAX_EVERY_SIZE` only powers
    of two of these.

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
        if not request.order_of_preference and request.gpus > MAX_EVERY_DEGREE:
            powers_only = request.gpus > MAX_EVERY_SIZE
            sizes = [one for one in sizes if one <= MAX_MICRO_BATCH and (not powers_only or one & (one - 1) == 0)]
    if schedule is not None:
        accepts = kind_of(schedule).accepts
        counts = [(size, replica_batch // size) for size in sizes]
        sizes = [size for size, count in counts if count <= MAX_MICRO_BATCHES and accepts(pipeline, count)]
    per_stage = MICRO_BATCHES_PER_STAGE if request.machine is None else 1
    least = per_stage * pipeline if pipeline > 1 else 1
    return [size for size in sizes if replica_batch // size >= least] or sizes[:1]


def _fills_workers(request: SearchRequest, replica: Layout, replicas: int) -> bool:
    gpus, tensor = request.gpus_per_worker, replica.tensor
    return replica.replica_size * replicas % gpus == 0 and (tensor % gpus == 0 or gpus % tensor == 0)
