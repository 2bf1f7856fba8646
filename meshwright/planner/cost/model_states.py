"""Bytes of parameters, gradients and optimizer state on a rank (ZeRO, arXiv 1910.02054, section 3).

There are two estimates. Frameworks of published runs store parameters in the compute format, and master weights and
moments in addition. Meshwright's runtime stores parameters once, in fp32 if there are master weights; copies in the
compute format are cast for each micro-batch or gathered layer by layer. Only with sharded master weights it stores
parameters in the compute format too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.precision import Precision
from meshwright.api.training import OptimizerOffload
from meshwright.planner.cost.frameworks import Framework
from meshwright.planner.cost.schedule_cost import extra_weight_versions
from meshwright.planner.cost.stages import Stage, StageParameters
from meshwright.planner.cost.strategy import MemoryOptions, Strategy
from meshwright.planner.units import FP32_BYTES
from meshwright.schedules.registry import kind_of


class States(NamedTuple):
    """Bytes on one rank."""

    parameters: float
    """In the compute format, without `gathered` and `cast`."""
    master: float
    """Copies that updates are applied to, if the compute format is another one."""
    gradients: float
    optimizer: float
    gathered: float
    """Other replicas' parts of parameters, and of gradients that wait for their reduction."""
    cast: float = 0.0
    """Copies in the compute format that each micro-batch in flight stores."""
    bucket: float = 0.0
    """The buffer that a collective over replicas sums, in addition to the gradients."""


class StateKey(NamedTuple):
    """The choices that states depend on: the key of a search's cache."""

    zero_stage: int
    shard_ranks: int
    context: int
    data: int
    expert: int
    pipeline: int
    schedule: PipelineSchedule
    accumulates: bool
    """Whether gradients accumulate over several micro-batches."""
    offloaded: bool
    """Whether the optimizer's state is elsewhere."""
    precision: Precision
    settings: MemoryOptions


def states_of(stage_params: StageParameters, strategy: Strategy, runtime: Framework, stage: Stage) -> States:
    """The states of the ranks of one stage, whose parameters before sharding are `stage_params`."""
    split = StateKey(
        strategy.zero_stage,
        strategy.shard_ranks,
        strategy.context,
        strategy.data,
        strategy.expert,
        strategy.pipeline,
        strategy.schedule,
        strategy.micro_batches > 1,
        strategy.optimizer_offload is not OptimizerOffload.NONE,
        strategy.precision,
        strategy.settings,
    )
    adapters = strategy.settings.adapters_of(stage.dense, stage.mixtures)
    return _states(stage_params, split, runtime, adapters, extra_weight_versions(strategy, stage.rank))


@lru_cache(maxsize=65536)
def _states(
    stage_params: StageParameters, split: StateKey, runtime: Framework, adapters: int, weight_versions: float
) -> States:
    if runtime.stores_masters:
        return _meshwright_states(stage_params, split, adapters, weight_versions)
    return _framework_states(stage_params, split, runtime)


def _framework_states(stage_params: StageParameters, key: StateKey, runtime: Framework) -> States:
    """The states in frameworks of published runs.

    ZeRO-1 shards optimizer state. ZeRO-2 also shards gradients, unless micro-batches accumulate in full gradients.
    ZeRO-3 also shards parameters: it gathers one unit and the next, or in some pipelines an entire stage once.
    """
    weight_versions = 2.0 if kind_of(key.schedule).bidirectional else 1.0
    zero, whole = key.zero_stage, stage_params.dense + stage_params.experts
    shard = stage_params.shard(key.shard_ranks, key.expert)
    full_precision = key.precision in (Precision.FP32, Precision.FP64)
    weights = FP32_BYTES if full_precision else runtime.weights
    state = runtime.optimizer - FP32_BYTES if full_precision else runtime.optimizer
    updated_parameters = 0.0 if key.offloaded else shard if zero else whole
    # Publications count master weights as optimizer state.
    master = 0.0 if full_precision else min(FP32_BYTES, state)
    optimizer_states = (master * updated_parameters, (state - master) * updated_parameters)
    if zero == 3:
        stored = FP32_BYTES if full_precision else runtime.sharded_weights
        pipelined = key.pipeline > 1 and runtime.gathers_stage_once
        unit = whole if pipelined else min(whole, 2 * stage_params.largest_unit)
        reduced = runtime.reduced * (whole if pipelined else min(whole, stage_params.largest_unit))
        gathered = weight_versions * (weights * unit + reduced)
        return States(
            weight_versions * stored * shard,
            optimizer_states[0],
            weight_versions * runtime.gradients * shard,
            optimizer_states[1],
            gathered,
        )
    sharded_gradients = zero == 2 and (not key.accumulates or runtime.reduces_every_micro_batch)
    gradients = weight_versions * runtime.gradients * (shard if sharded_gradients else whole)
    return States(weight_versions * weights * whole, optimizer_states[0], gradients, optimizer_states[1], 0.0)


class _Sizes(NamedTuple):
    """Bytes of one parameter, and numbers of parameters."""

    stored: float
    element: float
    gradient: float
    whole: float
    trained: float
    shard: float
    """The part of `whole` that one replica stores of its set of shards."""
    trained_shard: float


def _sizes(stage_params: StageParameters, key: StateKey, adapters: int) -> _Sizes:
    settings, precision = key.settings, key.precision
    stored = (max(FP32_BYTES, precision.bytes)) if settings.master_weights else 2.0
    shards = min(key.shard_ranks // settings.islands, (settings.shard_size or key.data) * key.context)
    whole = stage_params.total + adapters
    shard = (stage_params.dense + adapters) / shards + stage_params.experts / max(1, shards // key.expert)
    trained, trained_shard_size = (adapters, adapters / shards) if adapters else (whole, shard)
    return _Sizes(stored, precision.bytes, stored, whole, trained, shard, trained_shard_size)


def _meshwright_states(stage_params: StageParameters, key: StateKey, adapters: int, weight_versions: float) -> States:
    sizes, settings, zero = _sizes(stage_params, key, adapters), key.settings, key.zero_stage
    unsharded = key.shard_ranks // settings.islands == 1
    if zero == 0 or unsharded:
        states = _replicated(stage_params, key, sizes, unsharded=key.shard_ranks == 1)
    elif settings.master_gradient is not None:
        states = _sharded_masters(stage_params, key, sizes._replace(gradient=settings.master_gradient))
    elif zero == 1 or settings.flat:
        states = _flat_sharded(stage_params, key, sizes)
    else:
        states = _fsdp_sharded(stage_params, key, sizes)
    if key.offloaded:
        states = states._replace(optimizer=0.0)
    if weight_versions:
        # Frozen weights have one version.
        states = states._replace(parameters=states.parameters + weight_versions * sizes.stored * sizes.trained)
    if kind_of(key.schedule).bidirectional and key.pipeline > 1:
        return States(*(2.0 * trained_shard_size for trained_shard_size in states))
    return states


def _parameters_and_masters(stored: float, element: float, count: float) -> tuple[float, float]:
    """Bytes of stored parameters as (parameters, masters). Masters exist if the compute format is another one."""
    return (0.0, stored * count) if element < stored else (stored * count, 0.0)


def _optimizer_bytes(stage_params: StageParameters, key: StateKey, sizes: _Sizes, count: float) -> float:
    """Bytes of the optimizer's state for `count` of a stage's trained parameters, including an outer optimizer."""
    settings = key.settings
    tables = stage_params.tables * count / sizes.whole if settings.adapters is None else 0.0
    each = count + tables if settings.muon else 2.0 * count
    return sizes.stored * (each + settings.outer * count)


def _bucket_bytes(stage_params: StageParameters, key: StateKey, sizes: _Sizes) -> float:
    """Bytes of the gradients of one bucket. A tensor is never split, and a table is the largest."""
    return sizes.gradient * min(sizes.trained, max(float(key.settings.bucket), stage_params.tables))


def _replicated(stage_params: StageParameters, key: StateKey, sizes: _Sizes, *, unsharded: bool) -> States:
    """Every replica has all parameters, gradients and optimizer state.

    Gradients are moved into their buckets one by one.
    """
    parameters, master = _parameters_and_masters(sizes.stored, sizes.element, sizes.whole)
    cast = sizes.element * sizes.whole if sizes.element < sizes.stored else 0.0
    error_feedback_bytes = sizes.gradient * sizes.trained * key.settings.feedback if not unsharded else 0.0
    return States(
        parameters,
        master,
        sizes.gradient * sizes.trained + error_feedback_bytes,
        _optimizer_bytes(stage_params, key, sizes, sizes.trained),
        0.0,
        cast,
        0.0 if unsharded else _bucket_bytes(stage_params, key, sizes),
    )


def _flat_sharded(stage_params: StageParameters, key: StateKey, sizes: _Sizes) -> States:
    """Full parameters and a shard of optimizer state."""
    parameters, master = _parameters_and_masters(sizes.stored, sizes.element, sizes.whole)
    bucket = _bucket_bytes(stage_params, key, sizes)
    gradients = _flat_gradient_bytes(key, sizes, bucket)
    cast = sizes.element * sizes.whole if sizes.element < sizes.stored else 0.0
    moments = _optimizer_bytes(stage_params, key, sizes, sizes.trained_shard)
    return States(parameters, master, gradients, moments, 0.0, cast, bucket)


def _sharded_masters(stage_params: StageParameters, key: StateKey, sizes: _Sizes) -> States:
    """Full parameters in the compute format; a shard of master weights and optimizer state in fp32."""
    bucket = _bucket_bytes(stage_params, key, sizes)
    return States(
        sizes.element * sizes.whole,
        sizes.stored * sizes.trained_shard,
        _flat_gradient_bytes(key, sizes, bucket),
        _optimizer_bytes(stage_params, key, sizes, sizes.trained_shard),
        0.0,
        0.0,
        bucket,
    )


def _flat_gradient_bytes(key: StateKey, sizes: _Sizes, bucket: float) -> float:
    """Full gradients. With stage 2 a shard of them and a bucket, if backward hooks receive all gradients."""
    gradients = sizes.gradient * sizes.trained
    if key.zero_stage == 2 and not (key.pipeline > 1 and kind_of(key.schedule).splits_backward):
        gradients = min(gradients, sizes.gradient * sizes.trained_shard + bucket)
    return gradients


def _gathered_bytes(stage_params: StageParameters, key: StateKey, sizes: _Sizes) -> float:
    """Parameters that FSDP has gathered at a time. With a gather in fp8 those of products, and a shard of them more.

    Experts are gathered in the compute format, so a layer with them is counted in it.
    """
    if not key.settings.gathers_fp8:
        parameters = sizes.whole
        if key.zero_stage == 3:
            parameters = min(parameters, stage_params.tables + 2 * stage_params.layer)
        return sizes.element * parameters
    products = stage_params.dense - stage_params.tables
    shard = products * sizes.shard / sizes.whole
    if key.zero_stage == 3:
        layer = stage_params.layer * (sizes.element if stage_params.experts else 1.0)
        return (
            shard
            + sizes.element * stage_params.tables
            + min(2 * layer, products + sizes.element * stage_params.experts)
        )
    return shard + sizes.element * (sizes.whole - products) + products


def _fsdp_sharded(stage_params: StageParameters, key: StateKey, sizes: _Sizes) -> States:
    """FSDP shards parameters, gradients and optimizer state.

    Stage 2 stores gathered parameters until the backward pass. Stage 3 stores a layer, the next one, and the parameters
    outside layers. Full gradients accumulate over micro-batches, and are reduced in the last. Or only shards
    accumulate, and the gradients of one layer, or those outside layers, wait for their reduction. A split backward pass
    has both, as it computes those of look-ups at once.
    """
    settings = key.settings
    gathered = _gathered_bytes(stage_params, key, sizes)
    if key.zero_stage == 3 and settings.reshard_size is not None:
        gathered += sizes.element * sizes.whole / settings.reshard_size
    reduced = max(sizes.stored, FP32_BYTES)
    accumulates = key.accumulates and not settings.reduces_each
    largest = max(stage_params.tables, stage_params.layer)
    if settings.reduces_each and key.accumulates and key.pipeline > 1 and kind_of(key.schedule).splits_backward:
        largest = stage_params.tables + stage_params.layer
    unreduced_bytes = reduced * min(sizes.trained, largest)
    gradients = reduced * sizes.trained if accumulates else sizes.gradient * sizes.trained_shard
    parameters, master = _parameters_and_masters(sizes.stored, sizes.element, sizes.shard)
    moments = _optimizer_bytes(stage_params, key, sizes, sizes.trained_shard)
    if settings.parameter_offload:
        parameters, master, moments = 0.0, 0.0, 0.0
        gradients = gradients if accumulates else 0.0
    return States(parameters, master, gradients, moments, gathered, 0.0, 0.0 if accumulates else unreduced_bytes)
