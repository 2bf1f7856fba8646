"""Bytes of parameters, gradients and optimizer state on a rank (ZeRO, arXiv 1910.02054, section 3).

Two accounts. `published` is what frameworks of published runs do: parameters as compute uses them, masters and moments
beside them. `stored` is this repository's worker, engine by engine: parameters are stored once, in fp32 where there
are masters, and what compute needs in another format is cast for each micro-batch or gathered layer by layer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from meshwright.planner.cost.choices import Choices, Numbers, Offload, Schedule
from meshwright.planner.cost.flight import splits_backward, versions
from meshwright.planner.cost.runtime import Runtime
from meshwright.planner.cost.settings import Settings
from meshwright.planner.cost.stages import Stage, StageParameters

DOUBLE = frozenset({Schedule.DUAL_PIPE})
"""Schedules that hold every parameter on two ranks."""
FP32 = 4.0


class States(NamedTuple):
    """Bytes on one rank."""

    parameters: float
    """As compute uses them, but for what is in `gathered` and `cast`."""
    master: float
    """Copies that updates add up in, where compute has another format."""
    gradients: float
    optimizer: float
    gathered: float
    """Other replicas' parts of parameters, and of gradients that wait for their reduction."""
    cast: float = 0.0
    """Copies in the format of compute that each micro-batch in flight keeps."""
    bucket: float = 0.0
    """What a collective over replicas sums, beside the gradients that it came from."""


class Split(NamedTuple):
    """What of the choices states depend on: the key under which a search finds them again."""

    zero_stage: int
    replicas: int
    context: int
    data: int
    expert: int
    pipeline: int
    schedule: Schedule
    several: bool
    """Whether gradients add up over several micro-batches."""
    offloaded: bool
    """Whether the optimizer's state is elsewhere."""
    numbers: Numbers
    settings: Settings


def states_of(own: StageParameters, choices: Choices, runtime: Runtime, stage: Stage) -> States:
    """The states of the ranks of one stage, whose parameters before sharding are `own`."""
    split = Split(
        choices.zero_stage,
        choices.context * choices.data,
        choices.context,
        choices.data,
        choices.expert,
        choices.pipeline,
        choices.schedule,
        choices.micro_batches > 1,
        choices.offload_optimizer is not Offload.NONE,
        choices.numbers,
        choices.settings,
    )
    adapters = choices.settings.adapters_of(stage.dense, stage.mixtures)
    return _states(own, split, runtime, adapters, versions(choices, stage.rank))


@lru_cache(maxsize=65536)
def _states(own: StageParameters, split: Split, runtime: Runtime, adapters: int, copies: float) -> States:
    if runtime.stores_masters:
        return _stored(own, split, adapters, copies)
    return _published(own, split, runtime)


def _published(own: StageParameters, choices: Split, runtime: Runtime) -> States:
    """ZeRO-1 shards optimizer state, ZeRO-2 gradients too unless micro-batches accumulate in whole ones, ZeRO-3
    parameters too: it then gathers one unit and the next, or, in a pipeline, where gathering for every micro-batch may
    cost more than it saves, a whole stage once.
    """
    copies = 2.0 if choices.schedule in DOUBLE else 1.0
    zero, whole = choices.zero_stage, own.dense + own.experts
    shard = own.dense / choices.replicas + own.experts / max(1, choices.replicas // choices.expert)
    single = choices.numbers in (Numbers.FP32, Numbers.FP64)
    weights, state = (4.0, runtime.optimizer - 4.0) if single else (runtime.weights, runtime.optimizer)
    updated = 0.0 if choices.offloaded else shard if zero else whole
    # The masters are part of what a report calls optimizer state.
    master = 0.0 if single else min(FP32, state)
    held = (master * updated, (state - master) * updated)
    if zero == 3:
        stored = 4.0 if single else runtime.sharded_weights
        pipelined = choices.pipeline > 1 and runtime.gathers_stage_once
        unit = whole if pipelined else min(whole, 2 * own.largest_unit)
        reduced = runtime.reduced * (whole if pipelined else min(whole, own.largest_unit))
        gathered = copies * (weights * unit + reduced)
        return States(copies * stored * shard, held[0], copies * runtime.gradients * shard, held[1], gathered)
    sharded_gradients = zero == 2 and (not choices.several or runtime.reduces_every_micro_batch)
    gradients = copies * runtime.gradients * (shard if sharded_gradients else whole)
    return States(copies * weights * whole, held[0], gradients, held[1], 0.0)


class _Sizes(NamedTuple):
    """Bytes of one parameter, and how many of them."""

    stored: float
    element: float
    gradient: float
    whole: float
    trained: float
    shard: float
    """Of `whole`, what one replica keeps of its set of shards."""
    trained_shard: float


def _sizes(own: StageParameters, choices: Split, adapters: int) -> _Sizes:
    settings, numbers = choices.settings, choices.numbers
    stored = (max(FP32, numbers.bytes)) if settings.master_weights else 2.0
    sharing = min(choices.replicas // settings.islands, (settings.shard_size or choices.data) * choices.context)
    whole = own.total + adapters
    shard = (own.dense + adapters) / sharing + own.experts / max(1, sharing // choices.expert)
    trained, part = (adapters, adapters / sharing) if adapters else (whole, shard)
    return _Sizes(stored, numbers.bytes, stored, whole, trained, shard, part)


def _stored(own: StageParameters, choices: Split, adapters: int, copies: float) -> States:
    sizes, settings, zero = _sizes(own, choices, adapters), choices.settings, choices.zero_stage
    alone = choices.replicas // settings.islands == 1
    if zero == 0 or alone:
        states = _whole(own, choices, sizes, alone=choices.replicas == 1)
    elif zero == 1 or settings.flat:
        states = _flat(own, choices, sizes)
    else:
        states = _gathered_by_layer(own, choices, sizes)
    if choices.offloaded:
        states = states._replace(optimizer=0.0)
    if copies:
        # Frozen weights have one version.
        states = states._replace(parameters=states.parameters + copies * sizes.stored * sizes.trained)
    if choices.schedule in DOUBLE and choices.pipeline > 1:
        return States(*(2.0 * part for part in states))
    return states


def _kinds(stored: float, element: float, count: float) -> tuple[float, float]:
    """Bytes of stored parameters as (parameters, masters): masters where compute has another format."""
    return (0.0, stored * count) if element < stored else (stored * count, 0.0)


def _moments(own: StageParameters, choices: Split, sizes: _Sizes, count: float) -> float:
    """Bytes of the optimizer's state for `count` of a stage's trained parameters, an outer optimizer's included."""
    settings = choices.settings
    tables = own.tables * count / sizes.whole if settings.adapters is None else 0.0
    each = count + tables if settings.muon else 2.0 * count
    return sizes.stored * (each + settings.outer * count)


def _bucket(own: StageParameters, choices: Split, sizes: _Sizes) -> float:
    """Bytes of the gradients of one bucket; a tensor is never cut, and a table is the largest."""
    return sizes.gradient * min(sizes.trained, max(float(choices.settings.bucket), own.tables))


def _whole(own: StageParameters, choices: Split, sizes: _Sizes, *, alone: bool) -> States:
    """Every replica holds everything; gradients move into their buckets one by one."""
    parameters, master = _kinds(sizes.stored, sizes.element, sizes.whole)
    cast = sizes.element * sizes.whole if sizes.element < sizes.stored else 0.0
    left_out = sizes.gradient * sizes.trained * choices.settings.feedback if not alone else 0.0
    return States(
        parameters,
        master,
        sizes.gradient * sizes.trained + left_out,
        _moments(own, choices, sizes, sizes.trained),
        0.0,
        cast,
        0.0 if alone else _bucket(own, choices, sizes),
    )


def _flat(own: StageParameters, choices: Split, sizes: _Sizes) -> States:
    """Parameters whole, optimizer state of own rows; stage 2 keeps own rows of gradients, where hooks see them all."""
    parameters, master = _kinds(sizes.stored, sizes.element, sizes.whole)
    bucket = _bucket(own, choices, sizes)
    gradients = sizes.gradient * sizes.trained
    if choices.zero_stage == 2 and not splits_backward(choices.schedule, choices.pipeline):
        gradients = min(gradients, sizes.gradient * sizes.trained_shard + bucket)
    cast = sizes.element * sizes.whole if sizes.element < sizes.stored else 0.0
    moments = _moments(own, choices, sizes, sizes.trained_shard)
    return States(parameters, master, gradients, moments, 0.0, cast, bucket)


def _gathered_by_layer(own: StageParameters, choices: Split, sizes: _Sizes) -> States:
    """FSDP: shards of everything. Stage 2 keeps what it gathered until the backward pass; stage 3 a layer, the next,
    and what is in no layer. Gradients add up whole over micro-batches and are reduced unit by unit in the last.
    """
    settings = choices.settings
    gathered = sizes.element * sizes.whole
    if choices.zero_stage == 3:
        gathered = sizes.element * min(sizes.whole, own.tables + 2 * own.layer)
        if settings.reshard_size is not None:
            gathered += sizes.element * sizes.whole / settings.reshard_size
    reduced = max(sizes.stored, FP32)
    waiting = reduced * min(sizes.trained, max(own.tables, own.layer))
    several = choices.several
    gradients = reduced * sizes.trained if several else sizes.gradient * sizes.trained_shard
    parameters, master = _kinds(sizes.stored, sizes.element, sizes.shard)
    moments = _moments(own, choices, sizes, sizes.trained_shard)
    if settings.parameter_offload:
        parameters, master, moments = 0.0, 0.0, 0.0
        gradients = gradients if several else 0.0
    return States(parameters, master, gradients, moments, gathered, 0.0, 0.0 if several else waiting)
