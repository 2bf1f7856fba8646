"""Seconds of one micro-batch on each pipeline rank, and the slowest rank.

A rank's time is the sum over its layers of kernels, collectives and launches, with the constants of the (accelerator,
runtime) pair. The fullest rank determines the step time. The time of the other ranks fills and drains the pipeline.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from meshwright.api.parallelism import ContextMethod
from meshwright.api.training import ActivationCheckpointing
from meshwright.models.architecture import Architecture
from meshwright.planner.cost.collectives import all_gather
from meshwright.planner.cost.comm_groups import GroupSpans
from meshwright.planner.cost.comm_time import (
    NO_COMM,
    LayerCommTime,
    context_comm_time,
    expert_comm_time,
    expert_gather_time,
    recomputed_part,
    recomputed_tensor_part,
    tensor_comm_time,
)
from meshwright.planner.cost.constants import HOST_PER_LAYER, jitter
from meshwright.planner.cost.fabric import Span
from meshwright.planner.cost.frameworks import ASYNC_TENSOR_OVERLAP, Framework
from meshwright.planner.cost.machine import Machine
from meshwright.planner.cost.roofline import MEMORY_PART, LayerShape, layer_time, logits_time
from meshwright.planner.cost.stages import Stage, Stages, stage_parameters
from meshwright.planner.cost.strategy import LayerStrategy, Strategy, Workload
from meshwright.planner.units import FP32_BYTES


class MicroBatchTime(NamedTuple):
    """Seconds of one micro-batch on one rank, or of one of its layers."""

    forward: float
    backward_input: float
    backward_weight: float
    recompute: float
    tensor: float
    context: float
    expert: float
    host: float
    paired: float = 0.0
    """Of `expert`, what is hidden if the passes overlap those of another micro-batch. Not a part of its own."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(self) - self.paired


class _LayerTimes(NamedTuple):
    """Times of one kind of layer: with the recomputation of the layout, and without recomputation."""

    recomputed_part_time: MicroBatchTime
    plain_time: MicroBatchTime


class Bottleneck(NamedTuple):
    """The time of one micro-batch on the pipeline's ranks."""

    slowest: Stage
    worst: MicroBatchTime
    """Time on `slowest`, whose ranks determine the step time."""
    longest: float
    """Seconds on `slowest`."""
    mean: float
    """Mean over all ranks, in seconds."""


class _LayerKey(NamedTuple):
    """The choices that a rank's time depends on, except the layer split: the key of a search's cache."""

    layout: LayerStrategy
    recompute_method: ActivationCheckpointing
    limit: int | None
    """Number of layers of a stage that recompute. None for every layer."""
    spans: tuple[Span, Span, Span]
    """Spans of the tensor, the context and the expert group."""
    chunked_loss: bool
    weight_bytes: float
    """Of `weight_pass_bytes`."""

    @classmethod
    def of(cls, strategy: Strategy, groups: GroupSpans, runtime: Framework) -> _LayerKey:
        recompute_method = ActivationCheckpointing.FULL if strategy.settings.rematerialize else strategy.checkpointing
        return cls(
            LayerStrategy.of(strategy),
            recompute_method,
            strategy.checkpoint_layers,
            (groups.tensor, groups.context, groups.expert),
            strategy.settings.loss_chunk is not None,
            weight_pass_bytes(strategy, runtime),
        )


def bottleneck_of(
    work: Workload, strategy: Strategy, machine: Machine, groups: GroupSpans, stages: Stages
) -> Bottleneck:
    """The slowest rank of a layout. Equal for all schedules and ZeRO stages with the same layers on the same ranks."""
    return _bottleneck(work, _LayerKey.of(strategy, groups, machine.runtime), machine, stages)


@lru_cache(maxsize=65536)
def _bottleneck(work: Workload, layers: _LayerKey, machine: Machine, stages: Stages) -> Bottleneck:
    layer_times, edges = (
        _units(work, layers, machine),
        _edge_times(work, layers, machine),
    )
    sizes = [(unit.recomputed_part_time.total, unit.plain_time.total) for unit in layer_times]
    totals = [_total(layers, stage, sizes, edges) for stage in stages.distinct]
    if stages.mirrored:
        return _mirrored_bottleneck(layers, stages, totals, layer_times, edges)
    longest = max(totals)
    slowest = stages.distinct[totals.index(longest)]
    mean = sum(total * count for total, count in zip(totals, stages.count, strict=True)) / len(stages.every)
    return Bottleneck(slowest, _stage_time(layers, slowest, layer_times, edges), longest, mean)


def _mirrored_bottleneck(
    layers: _LayerKey, stages: Stages, totals: list[float], layer_times: list[_LayerTimes], edges: _EdgeTimes
) -> Bottleneck:
    """The slowest rank if each has two stages, for half of the micro-batches each."""
    means = [(totals[one] + totals[other]) / 2.0 for one, other, _ in stages.mirrored]
    longest = max(means)
    one, other, _ = stages.mirrored[means.index(longest)]
    first, second = (_stage_time(layers, stages.distinct[each], layer_times, edges) for each in (one, other))
    worst = MicroBatchTime(*((a + b) / 2.0 for a, b in zip(first, second, strict=True)))
    slowest = stages.distinct[one if totals[one] >= totals[other] else other]
    mean = sum(each * count for each, (_, _, count) in zip(means, stages.mirrored, strict=True)) / len(stages.every)
    return Bottleneck(slowest, worst, longest, mean)


def stage_times(
    work: Workload, strategy: Strategy, machine: Machine, groups: GroupSpans, stage: Stage
) -> tuple[float, float, float]:
    """Seconds of one micro-batch on a rank of `stage`: forward, backward for inputs, backward for weights."""
    layers = _LayerKey.of(strategy, groups, machine.runtime)
    edges = _edge_times(work, layers, machine)
    return forward_and_backward_parts(_stage_time(layers, stage, _units(work, layers, machine), edges))


def forward_and_backward_parts(one: MicroBatchTime) -> tuple[float, float, float]:
    """Seconds of (forward, backward for inputs with recomputation, backward for weights).

    Gradients of weights need no collective of a layer. The host's time is spread evenly.
    """
    sent, launched = (one.tensor + one.context + one.expert) / 2.0, one.host / 3.0
    return (
        one.forward + sent + launched,
        one.backward_input + one.recompute + sent + launched,
        one.backward_weight + launched,
    )


def _units(work: Workload, layers: _LayerKey, machine: Machine) -> list[_LayerTimes]:
    """Times of a layer with a dense feed-forward part and, if the model has them, of one with a mixture of experts."""
    model = work.model

    def one(mixture: bool, recompute_method: ActivationCheckpointing) -> MicroBatchTime:
        chosen = (mixture, recompute_method, layers.layout, machine, layers.spans)
        time = _layer_time(model, work.sequence_length, work.causal, *chosen)
        weights = stage_parameters(
            model, Stage(0, 1, int(mixture), embedding=False, output=False), layers.layout.tensor, 1
        ).dense
        passes = weights * layers.weight_bytes / (machine.gpu.bandwidth * MEMORY_PART)
        return time._replace(backward_weight=time.backward_weight + machine.constants.compute * passes)

    found = []
    for mixture in (False, True) if model.mixture is not None else (False,):
        recomputed_part_time = one(mixture, layers.recompute_method)
        plain_time = recomputed_part_time if layers.limit is None else one(mixture, ActivationCheckpointing.NONE)
        found.append(_LayerTimes(recomputed_part_time, plain_time))
    return found


def _counts(layers: _LayerKey, stage: Stage, edges: _EdgeTimes) -> tuple[tuple[int, int], tuple[int, int]]:
    """For (dense, mixture): the number of a stage's layers with and without recomputation."""
    dense_count, mixture_count = stage.dense, stage.mixtures
    if stage.output:
        dense_count, mixture_count = dense_count + edges.predicting[0], mixture_count + edges.predicting[1]
    if layers.limit is None:
        return (dense_count, 0), (mixture_count, 0)
    dense, mixed = min(dense_count, layers.limit), min(mixture_count, layers.limit)
    return (dense, dense_count - dense), (mixed, mixture_count - mixed)


def weight_pass_bytes(strategy: Strategy, runtime: Framework) -> float:
    """Bytes of memory traffic per dense parameter that a micro-batch's passes over weights and gradients move, outside
    products. Those over experts are part of `roofline`.

    This runtime casts weights to the compute format and their gradients to that of the sum, and adds all but the only
    micro-batch's. FSDP copies weights out of its buffer in both passes instead, and casts while it adds: about as much.
    nanotron reads 2 + 4 bytes and writes 4 to add a gradient (`FP32GradientAccumulator` in its
    `optim/gradient_accumulator.py`).
    """
    if not runtime.stores_masters:
        return runtime.adds_gradients
    settings, element = strategy.settings, strategy.precision.bytes
    stored = gradient = max(FP32_BYTES, element) if settings.master_weights else element
    if settings.master_gradient is not None:
        stored, gradient = element, settings.master_gradient
    moved = element + stored if stored > element else 0.0
    if settings.adapters is None:
        moved += element + gradient if gradient > element else 0.0
        moved += 3.0 * gradient if strategy.micro_batches > 1 else 0.0
    return moved


class _EdgeTimes(NamedTuple):
    """Seconds of a micro-batch outside layers."""

    output: float
    """Logits and loss, forward."""
    embedding: float
    """Token look-up, and summing the gradients of the table."""
    predicting: tuple[int, int] = (0, 0)
    """Layers of multi-token prediction after the last layer: (dense, mixtures)."""


def _edge_times(work: Workload, layers: _LayerKey, machine: Machine) -> _EdgeTimes:
    """Times of the last and the first stage.

    Each depth of multi-token prediction has a layer of its own and separate logits (arXiv 2412.19437, section 2.2).
    """
    model, layout, gpu = work.model, layers.layout, machine.gpu
    tokens = -(-work.sequence_length * layout.micro_batch_size // layout.context)
    forward = logits_time(
        tokens, model, layout.tensor, gpu, layout.precision, machine.runtime, chunked=layers.chunked_loss
    )
    # Passes over a table of weights are a third of each pass of the output, and all of the embedding's.
    table = layers.weight_bytes * model.vocab_size * model.hidden_size / layout.tensor
    memory_rate = gpu.bandwidth * MEMORY_PART
    return _EdgeTimes(
        machine.constants.compute * ((1 + model.prediction_layers) * forward + table / 3.0 / memory_rate),
        machine.constants.compute * (6.0 * tokens * model.hidden_size + table) / memory_rate,
        (0, model.prediction_layers) if model.mixture is not None else (model.prediction_layers, 0),
    )


def _total(layers: _LayerKey, stage: Stage, sizes: list[tuple[float, float]], edges: _EdgeTimes) -> float:
    """Seconds of one micro-batch on a rank of `stage`, from the time of one layer of each kind."""
    total = (3.0 * edges.output if stage.output else 0.0) + (edges.embedding if stage.embedding else 0.0)
    for (recomputed_part_time, plain_time), (recomputing, not_recomputing) in zip(
        _counts(layers, stage, edges), sizes, strict=False
    ):
        total += recomputed_part_time * recomputing + plain_time * not_recomputing
    return total


def _stage_time(layers: _LayerKey, stage: Stage, layer_times: list[_LayerTimes], edges: _EdgeTimes) -> MicroBatchTime:
    """Time of one micro-batch on one pipeline rank."""
    parts = [
        (count, one)
        for counts, unit in zip(_counts(layers, stage, edges), layer_times, strict=False)
        for count, one in zip(counts, unit, strict=True)
        if count
    ]
    total = MicroBatchTime(
        *(sum(count * one[index] for count, one in parts) for index in range(len(MicroBatchTime._fields)))
    )
    extra = edges.output if stage.output else 0.0
    embedding_seconds = edges.embedding if stage.embedding else 0.0
    return total._replace(
        forward=total.forward + extra,
        backward_input=total.backward_input + extra,
        backward_weight=total.backward_weight + extra + embedding_seconds,
    )


_FEW_LAUNCHES = (ActivationCheckpointing.NONE, ActivationCheckpointing.SELECTIVE)
"""Recomputations that launch few kernels again."""


class _LayerComm(NamedTuple):
    """Collectives of one micro-batch in one layer, before the fitted factors."""

    tensor_seconds: float
    """Of the tensor group, with what recomputation repeats and without what products hide."""
    context: LayerCommTime
    expert: LayerCommTime
    repeated: float
    """Part of the forward pass's exchanges of experts that recomputation repeats."""
    context_repeated: float
    """The same for the context group."""
    waits: float
    """Seconds in which ranks wait for the slowest of their groups."""


@lru_cache(maxsize=65536)
def _layer_time(
    model: Architecture,
    sequence: int,
    causal: bool,
    mixture: bool,
    recompute_method: ActivationCheckpointing,
    chosen: LayerStrategy,
    machine: Machine,
    spans: tuple[Span, Span, Span],
) -> MicroBatchTime:
    """Time of one micro-batch in one layer: kernels, collectives and launches. `spans` are as in `_LayerKey`."""
    runtime, constants = machine.runtime, machine.constants
    shape = _layer_shape(model, sequence, causal, mixture, chosen)
    kernels = layer_time(shape, machine.gpu, runtime)
    comm = _layer_comm(shape, recompute_method, chosen, machine, spans, kernels.core)
    one = MicroBatchTime(
        forward=constants.compute * kernels.forward,
        backward_input=constants.compute * kernels.backward_input,
        backward_weight=constants.compute * kernels.backward_weight,
        recompute=constants.compute * kernels.recomputed(recompute_method, runtime),
        tensor=constants.communication * comm.tensor_seconds,
        context=constants.communication * _with_recomputation(comm.context, comm.context_repeated),
        expert=constants.communication * _with_recomputation(comm.expert, comm.repeated),
        host=0.0,
    )
    one = one._replace(paired=_hidden_by_pairs(one, comm.expert, comm.repeated, constants.communication))
    # While ranks wait for each other, the host launches ahead, as it does behind kernels.
    wait = constants.host * comm.waits
    launches = 3.0 if recompute_method in _FEW_LAUNCHES else 4.0
    launch_seconds = exposed_host(launches * HOST_PER_LAYER * constants.host, one.total + wait)
    return one._replace(host=launch_seconds + wait)


def _layer_shape(model: Architecture, sequence: int, causal: bool, mixture: bool, chosen: LayerStrategy) -> LayerShape:
    return LayerShape(
        model,
        mixture,
        -(-sequence * chosen.micro_batch_size // chosen.context),
        sequence,
        chosen.context,
        chosen.tensor,
        chosen.sequence_parallel,
        chosen.expert,
        causal,
        chosen.precision,
        chosen.fp8,
        chosen.context_method is not ContextMethod.RING,
        chosen.expert_tensor,
    )


def _layer_comm(
    shape: LayerShape,
    recompute_method: ActivationCheckpointing,
    chosen: LayerStrategy,
    machine: Machine,
    spans: tuple[Span, Span, Span],
    core: float,
) -> _LayerComm:
    """Return a layer's collectives. `core` is the seconds of attention's core, which ring attention hides behind."""
    model, tokens, fabric, runtime = shape.model, shape.tokens, machine.fabric, machine.runtime
    tensor_span, context_span, expert_span = spans
    repeated = recomputed_part(recompute_method, runtime)
    tensor_repeated = recomputed_tensor_part(recompute_method, runtime, chosen.sequence_parallel)
    tensor = tensor_comm_time(tokens, model, chosen, shape.mixture, tensor_span, fabric)
    hidden = ASYNC_TENSOR_OVERLAP if chosen.tensor_overlap else runtime.overlap_tensor
    tensor_seconds = (1.0 - hidden) * _with_recomputation(tensor, tensor_repeated)
    if runtime.partitioned_checkpoints and repeated and chosen.tensor > 1:
        tensor_seconds += all_gather(tokens * model.hidden_size * chosen.precision.bytes, tensor_span, fabric)
    context = context_comm_time(tokens, model, chosen, context_span, fabric, core * machine.constants.compute)
    context_repeated = 0.0 if recompute_method is ActivationCheckpointing.SELECTIVE else repeated
    expert, gather = NO_COMM, NO_COMM
    if shape.mixture:
        expert = expert_comm_time(tokens, model, chosen, expert_span, fabric, runtime)
        gather = expert_gather_time(tokens, model, chosen, tensor_span, fabric)
        tensor_seconds += _with_recomputation(gather, repeated)
    waits = (
        _waits(tensor, tensor_repeated, tensor_span)
        + _waits(context, context_repeated, context_span)
        + _waits(expert, repeated, expert_span)
        + _waits(gather, repeated, tensor_span)
    )
    return _LayerComm(tensor_seconds, context, expert, repeated, context_repeated, waits)


def _waits(part: LayerCommTime, repeated: float, span: Span) -> float:
    """Seconds that a layer's blocking collectives over one group wait for the slowest of its ranks."""
    return (part.blocking_forward * (1 + repeated) + part.blocking_backward) * jitter(span.size)


def _hidden_by_pairs(one: MicroBatchTime, expert: LayerCommTime, recomputed: float, factor: float) -> float:
    """Seconds of a layer's exchanges that overlapped passes hide.

    Two passes run in turns: while one waits for its rows, the other computes up to its own exchange. So the forward
    pass hides the exchanges of a backward pass behind its kernels, and the reverse (arXiv 2412.19437, section 3.2.1).
    """
    forward, backward = factor * expert.forward, factor * (expert.backward + recomputed * expert.forward)
    kernels = one.backward_input + one.backward_weight + one.recompute
    return min(forward, kernels) + min(backward, one.forward)


def _with_recomputation(traffic: LayerCommTime, recomputed_part_time: float) -> float:
    return traffic.forward * (1.0 + recomputed_part_time) + traffic.backward


def exposed_host(launch_seconds: float, busy: float) -> float:
    """Seconds by which launching kernels exceeds their `busy` seconds, with a smooth transition."""
    return float((launch_seconds**4 + busy**4) ** 0.25) - busy
