"""Bytes on each rank of every pipeline stage, by what holds them; the worst stage is found, not assumed.

States follow ZeRO (arXiv 1910.02054, section 3) with the runtime's bytes per parameter; activations follow
`activations`, times the micro-batches that the schedule keeps in flight on each stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from meshwright.planner.cost.activations import LayerActivations, kept_bytes, layer_activations, working_bytes
from meshwright.planner.cost.choices import Choices, ContextMethod, Numbers, Offload, Recompute, Schedule, Work
from meshwright.planner.cost.runtime import Runtime
from meshwright.planner.cost.stages import Stage, StageParameters, stage_parameters, stages_of
from meshwright.schedules.closed_forms import in_flight

DOUBLE = frozenset({Schedule.DUAL_PIPE})
"""Schedules that hold every parameter on two ranks."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of each rank of one stage."""

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    """Master copies and moments."""
    activations: float
    """Kept from forward to backward, of all micro-batches in flight."""
    working: float
    """What a backward pass recomputes, at its largest."""
    logits: float
    gathered: float
    """ZeRO-3's gathered parameters and the gradients that wait for their reduction."""
    buffers: float
    """Sends and receives between stages, and tokens on their way to experts."""
    context: float
    """CUDA context, libraries, communicators."""
    fragmentation: float

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """The peak."""
        working = max(self.working, self.logits)
        return (
            self.states + self.activations + working + self.gathered + self.buffers + self.context + self.fragmentation
        )


_Parts = tuple[int, float, float, float, float, float, float, float, float, float, float]


class _Common(NamedTuple):
    """What is alike for all stages of a layout."""

    tokens: int
    """Of one micro-batch on a rank."""
    dense: LayerActivations
    mixed: LayerActivations
    sends: float
    """Bytes of what one neighbour sends."""
    layer: float
    """Bytes that one layer's communication needs on every stage."""
    experts: float
    """The same of a mixture's."""
    logits: float
    replicas: int
    expert_replicas: int


def worst_stage(work: Work, choices: Choices, runtime: Runtime) -> Memory:
    """The stage whose ranks need most; the first of equals.

    Raises:
        ValueError: the layers cannot be split over the pipeline's ranks.
    """
    common = _common(work, choices, runtime)
    listed = [_parts(work, choices, runtime, stage, common) for stage in stages_of(work.model, choices).heaviest]
    return Memory(*max(listed, key=_total))


def every_stage(work: Work, choices: Choices, runtime: Runtime) -> list[Memory]:
    """All stages in order."""
    common = _common(work, choices, runtime)
    return [Memory(*_parts(work, choices, runtime, stage, common)) for stage in stages_of(work.model, choices).every]


def _common(work: Work, choices: Choices, runtime: Runtime) -> _Common:
    model, tensor, numbers = work.model, choices.tensor, choices.numbers
    rest = (work.sequence_length, tensor, choices.sequence_parallel, numbers, runtime)
    dense = layer_activations(model, False, *rest)
    mixed = layer_activations(model, True, *rest) if model.experts is not None else dense
    tokens = -(-work.sequence_length * choices.micro_batch_size // choices.context)
    element = 4.0 if numbers is Numbers.FP32 else 2.0
    per_logit = runtime.loss_bytes if tensor == 1 else runtime.split_loss_bytes
    # Whole inputs and partial outputs of one layer's products, and their gradients, beside the split ones.
    whole = 4.0 * element * tokens * model.hidden if tensor > 1 else 0.0
    experts = 0.0
    if model.experts is not None and choices.expert > 1:
        # Tokens sent to experts and received from other ranks.
        experts = 2.0 * tokens * model.experts.per_token * model.hidden * element / tensor
    waiting = choices.micro_batches if runtime.receives_every_micro_batch else 2
    return _Common(
        tokens=tokens,
        dense=dense,
        mixed=mixed,
        sends=waiting * tokens * dense.boundary,
        layer=whole + _context_buffers(work, choices, tokens, element),
        experts=experts,
        logits=tokens * model.vocab / tensor * per_logit,
        replicas=choices.replicas,
        expert_replicas=max(1, choices.replicas // choices.expert),
    )


def _parts(work: Work, choices: Choices, runtime: Runtime, stage: Stage, common: _Common) -> _Parts:
    """The fields of `Memory` for the ranks of one stage, in its order."""
    own = stage_parameters(work.model, stage, choices.tensor, choices.expert)
    parameters, gradients, optimizer, gathered = _states(own, choices, runtime, common)
    kept, working = _activations(work, choices, runtime, stage, common)
    flight = in_flight(
        choices.schedule.value, choices.pipeline, choices.micro_batches, choices.virtual_stages, stage.rank
    )
    activations = flight * kept
    if runtime.casts_per_micro_batch and choices.zero_stage == 0 and choices.numbers is not Numbers.FP32:
        parameters, activations = 0.0, activations + flight * parameters
    if choices.offload_activations is not Offload.NONE:
        activations = min(activations, 2 * kept / max(1, stage.layers))
    logits = common.logits if stage.output else 0.0
    neighbours = (stage.rank > 0) + (stage.rank < choices.pipeline - 1)
    buffers = neighbours * common.sends + common.layer + (common.experts if stage.mixtures else 0.0)
    if choices.numbers is Numbers.FP8:
        buffers += runtime.fp8_weights * own.total
    transient = working if working > logits else logits
    held = parameters + gradients + optimizer + activations + transient + gathered + buffers
    return (
        stage.rank,
        parameters,
        gradients,
        optimizer,
        activations,
        working,
        logits,
        gathered,
        buffers,
        runtime.context,
        runtime.fragmentation * held,
    )


def _total(parts: _Parts) -> float:
    _, parameters, gradients, optimizer, activations, working, logits, gathered, buffers, context, lost = parts
    return parameters + gradients + optimizer + activations + max(working, logits) + gathered + buffers + context + lost


def _states(
    own: StageParameters, choices: Choices, runtime: Runtime, common: _Common
) -> tuple[float, float, float, float]:
    """Bytes of (parameters, gradients, optimizer state, what is gathered).

    ZeRO-1 shards optimizer state, ZeRO-2 gradients too unless micro-batches accumulate in whole ones, ZeRO-3
    parameters too: it then gathers one unit and the next, or, in a pipeline, where gathering for every micro-batch
    may cost more than it saves, a whole stage once.
    """
    copies = 2.0 if choices.schedule in DOUBLE else 1.0
    zero, whole = choices.zero_stage, own.dense + own.experts
    shard = own.dense / common.replicas + own.experts / common.expert_replicas
    single = choices.numbers is Numbers.FP32
    weights, master = (4.0, runtime.optimizer - 4.0) if single else (runtime.weights, runtime.optimizer)
    optimizer = master * (shard if zero else whole)
    if choices.offload_optimizer is not Offload.NONE:
        optimizer = 0.0
    if zero == 3:
        stored = 4.0 if single else runtime.sharded_weights
        pipelined = choices.pipeline > 1 and runtime.gathers_stage_once
        unit = whole if pipelined else min(whole, 2 * own.largest_unit)
        reduced = runtime.reduced * (whole if pipelined else min(whole, own.largest_unit))
        gathered = copies * (weights * unit + reduced)
        accumulated = whole if runtime.accumulates_whole and choices.micro_batches > 1 else shard
        return copies * stored * shard, copies * runtime.gradients * accumulated, optimizer, gathered
    sharded_gradients = zero == 2 and (choices.micro_batches == 1 or runtime.reduces_every_micro_batch)
    gradients = copies * runtime.gradients * (shard if sharded_gradients else whole)
    return copies * weights * whole, gradients, optimizer, 0.0


def _activations(work: Work, choices: Choices, runtime: Runtime, stage: Stage, common: _Common) -> tuple[float, float]:
    """Bytes of one micro-batch on a rank of the stage: (kept until its backward pass, recomputed at once)."""
    kept = working = 0.0
    if stage.dense:
        kept = kept_bytes(common.dense, stage.dense, choices, runtime)
        working = working_bytes(common.dense, stage.dense, choices)
    if stage.mixtures:
        kept += kept_bytes(common.mixed, stage.mixtures, choices, runtime)
        working = max(working, working_bytes(common.mixed, stage.mixtures, choices))
    if stage.output:
        kept += work.model.prediction_layers * kept_bytes(common.mixed, 1, choices, runtime)
        kept += common.dense.boundary if choices.recompute is Recompute.NONE else 0.0
    return common.tokens * kept, common.tokens * working


def _context_buffers(work: Work, choices: Choices, tokens: int, element: float) -> float:
    """Other ranks' keys and values of one layer: all of them when gathered, one neighbour's and the next in a ring."""
    if choices.context == 1 or choices.context_method is ContextMethod.ULYSSES:
        return 0.0
    model = work.model
    kept = model.kv_heads * (model.head_size + model.value_size) / choices.tensor
    if model.latent is not None:
        kept = float(model.latent.kv_rank + model.latent.rope_size)
    parts = choices.context if choices.context_method is ContextMethod.ALL_GATHER else 2
    return parts * tokens * kept * element
