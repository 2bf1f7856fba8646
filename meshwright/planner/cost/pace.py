"""Seconds that one micro-batch takes on each pipeline rank, and which rank sets the pace.

A rank's own work is summed over its layers: kernels, collectives and what launching them adds, at the constants of the
(accelerator, runtime) pair. The fullest rank sets the pace; the others' work is what fills and drains the pipeline.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from meshwright.models.transformer import Transformer
from meshwright.planner.cost.choices import Choices, ContextMethod, LayerLayout, Recompute, Work
from meshwright.planner.cost.collectives import all_gather
from meshwright.planner.cost.constants import HOST_PER_LAYER, SYNCHRONISE
from meshwright.planner.cost.fabric import Span
from meshwright.planner.cost.groups import Groups
from meshwright.planner.cost.kernels import MEMORY_PART, Shape, layer_time, logits_time
from meshwright.planner.cost.machine import Machine
from meshwright.planner.cost.runtime import ASYNCHRONOUS_TENSOR
from meshwright.planner.cost.stages import Stage, Stages
from meshwright.planner.cost.traffic import (
    NOTHING,
    Traffic,
    context_traffic,
    element,
    expert_traffic,
    recomputed_part,
    tensor_traffic,
)


class Pass(NamedTuple):
    """Seconds of one micro-batch on one rank, or of one of its layers."""

    forward: float
    backward_input: float
    backward_weight: float
    recompute: float
    tensor: float
    context: float
    expert: float
    host: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


class _Unit(NamedTuple):
    """One layer of a kind: its pass with what the choices recompute, its pass with nothing recomputed."""

    again: Pass
    plain: Pass


class Pace(NamedTuple):
    """What one micro-batch takes on the pipeline's ranks."""

    slowest: Stage
    worst: Pass
    """Of `slowest`, whose ranks set the pace."""
    longest: float
    """Seconds on `slowest`."""
    mean: float
    """Of all ranks."""


class _Layers(NamedTuple):
    """What of the choices a rank's pace depends on, but for the split: the key under which a search finds it again."""

    layout: LayerLayout
    how: Recompute
    limit: int | None
    """Layers of a stage that recompute; None for every layer."""
    spans: tuple[Span, Span, Span]
    """Of the tensor, the context and the expert group."""

    @classmethod
    def of(cls, choices: Choices, groups: Groups) -> _Layers:
        how = Recompute.FULL if choices.settings.rematerialize else choices.recompute
        return cls(
            LayerLayout.of(choices), how, choices.recompute_layers, (groups.tensor, groups.context, groups.expert)
        )


def pace_of(work: Work, choices: Choices, machine: Machine, groups: Groups, stages: Stages) -> Pace:
    """The pace of a layout; alike for all its schedules and ZeRO stages with the same layers on the same ranks."""
    return _pace(work, _Layers.of(choices, groups), machine, stages)


@lru_cache(maxsize=65536)
def _pace(work: Work, layers: _Layers, machine: Machine, stages: Stages) -> Pace:
    units, beside = _units(work, layers, machine), _beside(work, layers.layout, machine)
    sizes = [(unit.again.total, unit.plain.total) for unit in units]
    totals = [_total(layers, stage, sizes, beside) for stage in stages.distinct]
    longest = max(totals)
    slowest = stages.distinct[totals.index(longest)]
    mean = sum(total * count for total, count in zip(totals, stages.count, strict=True)) / len(stages.every)
    return Pace(slowest, _stage_pass(layers, slowest, units, beside), longest, mean)


def stage_seconds(
    work: Work, choices: Choices, machine: Machine, groups: Groups, stage: Stage
) -> tuple[float, float, float]:
    """Seconds of one micro-batch on a rank of `stage`: forward, input's backward, weights' backward."""
    layers = _Layers.of(choices, groups)
    beside = _beside(work, layers.layout, machine)
    return thirds(_stage_pass(layers, stage, _units(work, layers, machine), beside))


def thirds(one: Pass) -> tuple[float, float, float]:
    """Seconds of (forward, input's backward with what is recomputed, weights' backward); the rest spread evenly."""
    shared = (one.tensor + one.context + one.expert + one.host) / 3.0
    return one.forward + shared, one.backward_input + one.recompute + shared, one.backward_weight + shared


def _units(work: Work, layers: _Layers, machine: Machine) -> list[_Unit]:
    """A layer with a dense feed-forward part, and where there are such one with a mixture of experts."""
    model = work.model

    def one(mixture: bool, how: Recompute) -> Pass:
        chosen = (mixture, how, layers.layout, machine, *layers.spans)
        return _layer_pass(model, work.sequence_length, work.causal, *chosen)

    found = []
    for mixture in (False, True) if model.experts is not None else (False,):
        again = one(mixture, layers.how)
        found.append(_Unit(again, again if layers.limit is None else one(mixture, Recompute.NONE)))
    return found


def _counts(layers: _Layers, stage: Stage) -> tuple[tuple[int, int], tuple[int, int]]:
    """For (dense, mixture): how many of a stage's layers recompute and how many do not."""
    if layers.limit is None:
        return (stage.dense, 0), (stage.mixtures, 0)
    dense = min(stage.dense, layers.limit)
    mixed = min(stage.mixtures, layers.limit)
    return (dense, stage.dense - dense), (mixed, stage.mixtures - mixed)


class _Beside(NamedTuple):
    """Seconds of a micro-batch beside its layers."""

    output: float
    """Logits and loss, forward."""
    embedding: float
    """Looking up tokens and adding up their gradients."""


def _beside(work: Work, layout: LayerLayout, machine: Machine) -> _Beside:
    """Of the last and of the first stage; multi-token prediction has its own logits."""
    model, tokens = work.model, -(-work.sequence_length * layout.micro_batch_size // layout.context)
    forward = logits_time(tokens, model, layout.tensor, machine.gpu, layout.numbers)
    moved = 6.0 * tokens * model.hidden
    return _Beside(
        (1 + model.prediction_layers) * machine.constants.compute * forward,
        moved / (machine.gpu.bandwidth * MEMORY_PART) * machine.constants.compute,
    )


def _total(layers: _Layers, stage: Stage, sizes: list[tuple[float, float]], beside: _Beside) -> float:
    """Seconds of one micro-batch on a rank of `stage`, from those of one layer of each kind."""
    total = (3.0 * beside.output if stage.output else 0.0) + (beside.embedding if stage.embedding else 0.0)
    for (again, plain), (recomputing, keeping) in zip(_counts(layers, stage), sizes, strict=False):
        total += again * recomputing + plain * keeping
    return total


def _stage_pass(layers: _Layers, stage: Stage, units: list[_Unit], beside: _Beside) -> Pass:
    """One micro-batch through one pipeline rank."""
    parts = [
        (count, one)
        for counts, unit in zip(_counts(layers, stage), units, strict=False)
        for count, one in zip(counts, unit, strict=True)
        if count
    ]
    total = Pass(*(sum(count * one[index] for count, one in parts) for index in range(8)))
    extra = beside.output if stage.output else 0.0
    looked_up = beside.embedding if stage.embedding else 0.0
    return total._replace(
        forward=total.forward + extra,
        backward_input=total.backward_input + extra,
        backward_weight=total.backward_weight + extra + looked_up,
    )


@lru_cache(maxsize=65536)
def _layer_pass(
    model: Transformer,
    sequence: int,
    causal: bool,
    mixture: bool,
    how: Recompute,
    chosen: LayerLayout,
    machine: Machine,
    tensor_span: Span,
    context_span: Span,
    expert_span: Span,
) -> Pass:
    """One micro-batch through one layer: kernels, collectives, and what launching them adds."""
    fabric, runtime, constants = machine.fabric, machine.runtime, machine.constants
    tokens = -(-sequence * chosen.micro_batch_size // chosen.context)
    shape = Shape(
        model,
        mixture,
        tokens,
        sequence,
        chosen.context,
        chosen.tensor,
        chosen.sequence_parallel,
        chosen.expert,
        causal,
        chosen.numbers,
        chosen.context_method is not ContextMethod.RING,
        chosen.expert_tensor,
    )
    time = layer_time(shape, machine.gpu, runtime)
    again = recomputed_part(how)
    tensor = tensor_traffic(tokens, model, chosen, tensor_span, fabric)
    hidden = ASYNCHRONOUS_TENSOR if chosen.tensor_overlap else runtime.overlap_tensor
    tensor_seconds = (1.0 - hidden) * _both(tensor, again)
    if runtime.partitioned_checkpoints and again and chosen.tensor > 1:
        tensor_seconds += all_gather(tokens * model.hidden * element(chosen.numbers), tensor_span, fabric)
    context = context_traffic(tokens, model, chosen, context_span, fabric, time.core * constants.compute)
    expert = expert_traffic(tokens, model, chosen, expert_span, fabric, runtime) if mixture else NOTHING
    blocking = sum(t.blocking_forward * (1 + again) + t.blocking_backward for t in (tensor, context, expert))
    one = Pass(
        forward=constants.compute * time.forward,
        backward_input=constants.compute * time.backward_input,
        backward_weight=constants.compute * time.backward_weight,
        recompute=constants.compute * time.recomputed(how, runtime),
        tensor=constants.communication * tensor_seconds,
        context=constants.communication * _both(context, again),
        expert=constants.communication * _both(expert, again),
        host=0.0,
    )
    launching = exposed_host((3.0 + again) * HOST_PER_LAYER * constants.host, one.total)
    return one._replace(host=launching + blocking * SYNCHRONISE * constants.host)


def _both(traffic: Traffic, again: float) -> float:
    return traffic.forward * (1.0 + again) + traffic.backward


def exposed_host(launching: float, busy: float) -> float:
    """Seconds by which launching kernels exceeds the `busy` seconds that they run, with a soft corner between."""
    return float((launching**4 + busy**4) ** 0.25) - busy
