"""Seconds of one optimizer step, by part.

A rank's own work per micro-batch is summed over its layers; the fullest rank sets the pace, the others' work is what
fills and drains the pipeline; then come the gradients' reduction, the optimizer and what no computation hides. Every
part is at the constants of its (accelerator, runtime) pair, so the same function calibrates and predicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from meshwright.models.transformer import Transformer
from meshwright.planner.cost.choices import Choices, ContextMethod, LayerLayout, Recompute, Work
from meshwright.planner.cost.collectives import all_gather
from meshwright.planner.cost.constants import HOST_PER_LAYER, PER_STEP, SYNCHRONISE
from meshwright.planner.cost.fabric import Span
from meshwright.planner.cost.flight import waiting
from meshwright.planner.cost.groups import Groups
from meshwright.planner.cost.kernels import MEMORY_PART, Shape, layer_time, logits_time
from meshwright.planner.cost.machine import Machine as Machine
from meshwright.planner.cost.replicas import offload_seconds, optimizer_seconds, replica_seconds
from meshwright.planner.cost.runtime import ASYNCHRONOUS_TENSOR
from meshwright.planner.cost.stages import Stage, stages_of
from meshwright.planner.cost.traffic import (
    NOTHING,
    Traffic,
    context_traffic,
    element,
    expert_traffic,
    hop,
    recomputed_part,
    tensor_traffic,
)
from meshwright.schedules.closed_forms import StageTimes


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step on the rank that sets the pace, by what they are spent on; exposed time only."""

    compute: float
    recompute: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    bubble: float
    data: float
    """Reducing gradients and gathering parameters over the replicas."""
    optimizer: float
    offload: float
    host: float

    @property
    def total(self) -> float:
        """The step."""
        return (
            self.compute
            + self.recompute
            + self.tensor
            + self.context
            + self.expert
            + self.pipeline
            + self.bubble
            + self.data
            + self.optimizer
            + self.offload
            + self.host
        )


class _Pass(NamedTuple):
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
        return sum(self)


class _Unit(NamedTuple):
    """One layer of a kind: its pass with what the choices recompute, its pass with nothing recomputed."""

    again: _Pass
    plain: _Pass


def step_time(work: Work, choices: Choices, machine: Machine, groups: Groups) -> StepTime:
    """The estimate.

    Raises:
        ValueError: the layers cannot be split over the pipeline's ranks.
    """
    stages = stages_of(work.model, choices)
    units = _units(work, choices, machine, groups)
    output, embedding = _output_seconds(work, choices, machine), _embedding_seconds(work, choices, machine)
    sizes = [(unit.again.total, unit.plain.total) for unit in units]
    totals = [_total(choices, stage, sizes, output, embedding) for stage in stages.distinct]
    longest = max(totals)
    slowest = stages.distinct[totals.index(longest)]
    worst = _stage_pass(choices, slowest, units, output, embedding)
    mean = sum(total * count for total, count in zip(totals, stages.count, strict=True)) / choices.pipeline
    count = choices.micro_batches
    slow = 1.0 / machine.slowest
    compute = worst.forward + worst.backward_input + worst.backward_weight
    return StepTime(
        compute=count * compute * slow,
        recompute=count * worst.recompute * slow,
        tensor=count * worst.tensor,
        context=count * worst.context,
        expert=count * worst.expert,
        pipeline=_sending(work, choices, machine, groups),
        bubble=_waiting(choices, worst, mean / longest) * slow,
        data=replica_seconds(work, choices, machine, groups, stages, _hiding(worst)),
        optimizer=optimizer_seconds(work, choices, machine, slowest),
        offload=offload_seconds(work, choices, machine, slowest, longest),
        host=count * worst.host + PER_STEP * machine.constants.host,
    )


def _hiding(worst: _Pass) -> tuple[float, float]:
    """Seconds of a micro-batch's (backward pass, whole pass) that communication can hide behind."""
    return worst.backward_input + worst.backward_weight + worst.recompute, worst.total


def _units(work: Work, choices: Choices, machine: Machine, groups: Groups) -> list[_Unit]:
    """A layer with a dense feed-forward part, and where there are such one with a mixture of experts."""
    layout = LayerLayout.of(choices)
    model, spans = work.model, (groups.tensor, groups.context, groups.expert)

    def one(mixture: bool, how: Recompute) -> _Pass:
        return _layer_pass(model, work.sequence_length, work.causal, mixture, how, layout, machine, *spans)

    found = []
    how = Recompute.FULL if choices.settings.rematerialize else choices.recompute
    for mixture in (False, True) if model.experts is not None else (False,):
        again = one(mixture, how)
        partly = choices.recompute_layers is not None and choices.recompute is not Recompute.NONE
        found.append(_Unit(again, one(mixture, Recompute.NONE) if partly else again))
    return found


def _counts(choices: Choices, stage: Stage) -> tuple[tuple[int, int], tuple[int, int]]:
    """For (dense, mixture): how many of a stage's layers recompute and how many do not."""
    if choices.recompute_layers is None:
        return (stage.dense, 0), (stage.mixtures, 0)
    dense = min(stage.dense, choices.recompute_layers)
    mixed = min(stage.mixtures, choices.recompute_layers)
    return (dense, stage.dense - dense), (mixed, stage.mixtures - mixed)


def _total(choices: Choices, stage: Stage, sizes: list[tuple[float, float]], output: float, embedding: float) -> float:
    """Seconds of one micro-batch on a rank of `stage`, from those of one layer of each kind."""
    total = (3.0 * output if stage.output else 0.0) + (embedding if stage.embedding else 0.0)
    for (again, plain), (recomputing, keeping) in zip(_counts(choices, stage), sizes, strict=False):
        total += again * recomputing + plain * keeping
    return total


def _stage_pass(choices: Choices, stage: Stage, units: list[_Unit], output: float, embedding: float) -> _Pass:
    """One micro-batch through one pipeline rank."""
    parts = [
        (count, one)
        for counts, unit in zip(_counts(choices, stage), units, strict=False)
        for count, one in zip(counts, unit, strict=True)
        if count
    ]
    total = _Pass(*(sum(count * one[index] for count, one in parts) for index in range(8)))
    extra = output if stage.output else 0.0
    looked_up = embedding if stage.embedding else 0.0
    return total._replace(
        forward=total.forward + extra,
        backward_input=total.backward_input + extra,
        backward_weight=total.backward_weight + extra + looked_up,
    )


def _tokens(work: Work, choices: Choices) -> int:
    return -(-work.sequence_length * choices.micro_batch_size // choices.context)


def _embedding_seconds(work: Work, choices: Choices, machine: Machine) -> float:
    """Seconds of looking up tokens and adding up their gradients."""
    moved = 6.0 * _tokens(work, choices) * work.model.hidden
    return moved / (machine.gpu.bandwidth * MEMORY_PART) * machine.constants.compute


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
) -> _Pass:
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
    one = _Pass(
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


def _output_seconds(work: Work, choices: Choices, machine: Machine) -> float:
    """Forward seconds of logits and loss; multi-token prediction has its own."""
    forward = logits_time(_tokens(work, choices), work.model, choices.tensor, machine.gpu, choices.numbers)
    return (1 + work.model.prediction_layers) * machine.constants.compute * forward


def _waiting(choices: Choices, worst: _Pass, part: float) -> float:
    """Idle seconds of the rank that sets the pace: the schedule's bubble, at the average rank's `part` of its pace."""
    if choices.pipeline == 1:
        return 0.0
    times = StageTimes(*(part * seconds for seconds in _thirds(worst)))
    return waiting(choices, times)


def _thirds(one: _Pass) -> tuple[float, float, float]:
    """Seconds of (forward, input's backward with what is recomputed, weights' backward); the rest spread evenly."""
    shared = (one.tensor + one.context + one.expert + one.host) / 3.0
    return one.forward + shared, one.backward_input + one.recompute + shared, one.backward_weight + shared


def stage_seconds(
    work: Work, choices: Choices, machine: Machine, groups: Groups, stage: Stage
) -> tuple[float, float, float]:
    """Seconds of one micro-batch on a rank of `stage`: forward, input's backward, weights' backward."""
    output, embedding = _output_seconds(work, choices, machine), _embedding_seconds(work, choices, machine)
    return _thirds(_stage_pass(choices, stage, _units(work, choices, machine, groups), output, embedding))


def hop_seconds(work: Work, choices: Choices, machine: Machine, groups: Groups) -> float:
    """Seconds to hand one micro-batch to the next stage."""
    if choices.pipeline == 1:
        return 0.0
    one = hop(float(_tokens(work, choices)), work.model, choices, groups, machine.fabric, machine.runtime)
    return one * machine.constants.communication + SYNCHRONISE * machine.constants.host


def _sending(work: Work, choices: Choices, machine: Machine, groups: Groups) -> float:
    """Exposed sends between stages: filling and draining always, and every micro-batch's where nothing hides them."""
    one = hop_seconds(work, choices, machine, groups)
    filling = 2 * (choices.pipeline - 1) * one
    steady = 0.0 if machine.runtime.overlap_pipeline else 2 * choices.micro_batches * choices.virtual_stages * one
    return filling + steady
