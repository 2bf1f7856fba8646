"""Memory of each rank of every pipeline stage, by part, and the stage that needs most.

The search, the operator's validation of a job and `meshwright plan` all use this estimate. States come from
`model_states`. Activations come from `activations`, times the micro-batches in flight on each stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from meshwright.api.parallelism import ContextMethod
from meshwright.api.precision import Precision
from meshwright.api.training import ActivationCheckpointing
from meshwright.planner.cost.activations import (
    LayerActivations,
    layer_activations,
    output_bytes,
    recompute_bytes,
    saved_bytes,
    weight_half_bytes_of_stage,
)
from meshwright.planner.cost.frameworks import Framework
from meshwright.planner.cost.model_states import States, states_of
from meshwright.planner.cost.schedule_cost import (
    in_flight_bytes,
    micro_batches_in_flight,
    pending_losses,
    pending_weight_gradients,
)
from meshwright.planner.cost.stages import Stage, StageParameters, stage_parameters, stages_of
from meshwright.planner.cost.strategy import LayerStrategy, Strategy, Workload
from meshwright.planner.units import FP32_BYTES


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of each rank of one stage."""

    stage: int
    parameters: float
    """As compute uses them; every micro-batch in flight may keep its own copies."""
    master: float
    """What updates add up in, where compute has another format."""
    gradients: float
    optimizer: float
    """Moments, and an outer optimizer's state."""
    activations: float
    """Kept from forward to backward, of all micro-batches in flight."""
    working: float
    """What a backward pass recomputes, at its largest."""
    logits: float
    gathered: float
    """Other replicas' parts of parameters, and of gradients that wait for their reduction."""
    buffers: float
    """Sends and receives between stages, tokens on their way to experts, a bucket of gradients."""
    context: float
    """CUDA context, libraries, communicators."""
    fragmentation: float

    @property
    def states(self) -> float:
        """Parameters, their masters, gradients and optimizer state."""
        return self.parameters + self.master + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """The peak."""
        working = max(self.working, self.logits)
        return (
            self.states + self.activations + working + self.gathered + self.buffers + self.context + self.fragmentation
        )

    @property
    def counted(self) -> float:
        """Of the peak, what tensors take: without context and fragmentation."""
        return self.total - self.context - self.fragmentation


_Parts = tuple[int, float, float, float, float, float, float, float, float, float, float, float]


class _Common(NamedTuple):
    """What is the same for all stages of a layout."""

    tokens: int
    """Of one micro-batch on a rank."""
    dense: LayerActivations
    mixed: LayerActivations
    output: float
    """Bytes per token that the end of the model stores in addition to its layers and the logits."""
    sends: float
    """Bytes of what one neighbour sends."""
    layer: float
    """Bytes that one layer's communication needs on every stage."""
    experts: float
    """The same of a mixture's."""
    logits: float


def worst_stage(work: Workload, choices: Strategy, runtime: Framework) -> Memory:
    """The stage whose ranks need most; the first of equals.

    Raises:
        ValueError: the layers cannot be split over the pipeline's ranks.
    """
    common = _common(work, LayerStrategy.of(choices), choices.settings.loss_chunk, runtime)
    stage_parts = [_parts(work, choices, runtime, stage, common) for stage in _candidates(work, choices)]
    return Memory(*max(stage_parts, key=_total))


def memory_within(work: Workload, choices: Strategy, runtime: Framework, limit: float) -> Memory | None:
    """The fullest stage's ranks where all are within `limit` bytes, None where some need more.

    Asked of many layouts of which most do not fit: the first stage that is too full answers.

    Raises:
        ValueError: the layers cannot be split over the pipeline's ranks.
    """
    common = _common(work, LayerStrategy.of(choices), choices.settings.loss_chunk, runtime)
    fullest_parts, largest_total = None, -1.0
    for stage in _candidates(work, choices):
        parts = _parts(work, choices, runtime, stage, common)
        total = _total(parts)
        if total > limit:
            return None
        if total > largest_total:
            fullest_parts, largest_total = parts, total
    return Memory(*fullest_parts) if fullest_parts is not None else None


def model_states_fit(work: Workload, choices: Strategy, runtime: Framework, limit: float) -> bool:
    """Whether parameters, gradients and optimizer state fit in `limit` bytes, independent of recomputation."""
    model, tensor, parts = work.model, choices.tensor, choices.expert_parts
    byte_limit = (limit - runtime.context) / (1.0 + runtime.fragmentation)
    for stage in stages_of(model, choices).heaviest:
        states = states_of(stage_parameters(model, stage, tensor, parts), choices, runtime, stage)
        if sum(states) - states.cast > byte_limit:
            return False
    return True


def memory_by_stage(work: Workload, choices: Strategy, runtime: Framework) -> list[Memory]:
    """All stages in order."""
    common = _common(work, LayerStrategy.of(choices), choices.settings.loss_chunk, runtime)
    return [Memory(*_parts(work, choices, runtime, stage, common)) for stage in stages_of(work.model, choices).every]


def _candidates(work: Workload, choices: Strategy) -> tuple[Stage, ...]:
    """The stages of which one is the fullest. With a split backward pass, later ranks store less of one kind and more
    of the other, so that any stage may be.
    """
    stages = stages_of(work.model, choices)
    return stages.every if choices.schedule_kind.defers_weights_at_peak else stages.heaviest


@lru_cache(maxsize=65536)
def _common(work: Workload, choices: LayerStrategy, loss_chunk: int | None, runtime: Framework) -> _Common:
    model, tensor, precision = work.model, choices.tensor, choices.precision
    layer_arguments = (
        work.sequence_length,
        tensor,
        choices.sequence_parallel,
        precision,
        choices.fp8,
        runtime,
        choices.expert > 1 or not choices.expert_tensor,
    )
    dense = layer_activations(model, False, *layer_arguments)
    mixed = layer_activations(model, True, *layer_arguments) if model.mixture is not None else dense
    tokens = -(-work.sequence_length * choices.micro_batch_size // choices.context)
    element = precision.bytes
    # Full inputs and partial outputs of one layer's products, and their gradients, in addition to the split ones.
    unsplit_bytes = 4.0 * element * tokens * model.hidden_size if tensor > 1 else 0.0
    experts = 0.0
    if model.mixture is not None and choices.expert > 1:
        # Tokens sent to experts and received from other ranks.
        experts = 2.0 * tokens * model.mixture.per_token * model.hidden_size * element / tensor
    return _Common(
        tokens=tokens,
        dense=dense,
        mixed=mixed,
        output=output_bytes(model, tensor, choices.sequence_parallel, precision, runtime, dense.boundary),
        sends=2 * tokens * dense.boundary,
        layer=unsplit_bytes + _context_buffers(work, choices, tokens, element + runtime.ring_gradients),
        experts=experts,
        logits=_logits(work, choices, loss_chunk, runtime, tokens),
    )


def _logits(work: Workload, choices: LayerStrategy, chunk: int | None, runtime: Framework, tokens: int) -> float:
    """Bytes of a micro-batch's logits, or of a chunk's logits with the gradients that a chunked loss computes at
    once.
    """
    width = work.model.vocab_size / choices.tensor
    per_logit = runtime.loss_bytes if choices.tensor == 1 else runtime.split_loss_bytes
    if choices.precision is Precision.FP64:
        per_logit *= 2.0
    if chunk is None or chunk >= tokens:
        return tokens * width * per_logit
    gradients = max(FP32_BYTES, choices.precision.bytes) * width * work.model.hidden_size
    return chunk * width * per_logit + gradients + choices.precision.bytes * tokens * work.model.hidden_size


def _parts(work: Workload, choices: Strategy, runtime: Framework, stage: Stage, common: _Common) -> _Parts:
    """The fields of `Memory` for the ranks of one stage, in its order."""
    stage_params = stage_parameters(work.model, stage, choices.tensor, choices.expert_parts)
    states = states_of(stage_params, choices, runtime, stage)
    saved, working = _activations(work, choices, runtime, stage, common)
    weight_half = (
        common.tokens * weight_half_bytes_of_stage(work.model, stage, choices) if runtime.frees_halfway else saved
    )
    activations = in_flight_bytes(choices, stage.rank, saved, weight_half)
    if stage.output:
        activations += _saved_after_layers(work, choices, runtime, common)
    parameters = states.parameters
    if states.cast:
        copies, recomputed_cast = _cast_copies(stage_params, choices, states, stage)
        not_halfway = micro_batches_in_flight(choices, stage.rank) - pending_weight_gradients(choices, stage.rank)
        parameters, working = parameters + not_halfway * copies, working + recomputed_cast
    if choices.activation_offload:
        layers_resident = (
            2 * choices.recompute_group(stage.layers)
            if choices.checkpointing is not ActivationCheckpointing.NONE
            else 2
        )
        activations = min(activations, layers_resident * saved / max(1, stage.layers))
    logits = common.logits if stage.output else 0.0
    neighbours = (stage.rank > 0) + (stage.rank < choices.pipeline - 1)
    buffers = neighbours * common.sends + common.layer + (common.experts if stage.mixtures else 0.0) + states.bucket
    if choices.fp8:
        buffers += runtime.fp8_weights * stage_params.total
    transient = working if working > logits else logits
    allocated = parameters + states.master + states.gradients + states.optimizer + activations + transient
    allocated += states.gathered + buffers
    return (
        stage.rank,
        parameters,
        states.master,
        states.gradients,
        states.optimizer,
        activations,
        working,
        logits,
        states.gathered,
        buffers,
        runtime.context,
        runtime.fragmentation * allocated,
    )


def _total(parts: _Parts) -> float:
    working, logits = parts[6], parts[7]
    return sum(parts) - parts[0] - (logits if working > logits else working)


def _saved_after_layers(work: Workload, choices: Strategy, runtime: Framework, common: _Common) -> float:
    """Bytes of the final norm, and of the logarithms of probabilities but for one micro-batch's: `Memory.logits` has
    those.
    """
    if choices.settings.rematerialize:
        return 0.0
    count = pending_losses(choices)
    always = runtime.keeps_normed or choices.checkpointing is ActivationCheckpointing.NONE
    saved = count * common.output if always else 0.0
    if choices.settings.loss_chunk is None:
        saved += (count - 1) * max(FP32_BYTES, choices.precision.bytes) * work.model.vocab_size / choices.tensor
    return common.tokens * saved


def _cast_copies(stage_params: StageParameters, choices: Strategy, states: States, stage: Stage) -> tuple[float, float]:
    """Bytes of copies in the compute format: (stored by each micro-batch in flight, created during recomputation)."""
    if choices.checkpointing is ActivationCheckpointing.NONE and not choices.settings.rematerialize:
        return states.cast, 0.0
    tables = states.cast * min(1.0, stage_params.tables / max(1.0, stage_params.total))
    if choices.settings.rematerialize:
        return 0.0, states.cast
    group = 1 if choices.checkpointing is ActivationCheckpointing.SELECTIVE else choices.recompute_group(stage.layers)
    return tables, (states.cast - tables) * min(1.0, group / max(1, stage.layers))


def _activations(
    work: Workload, choices: Strategy, runtime: Framework, stage: Stage, common: _Common
) -> tuple[float, float]:
    """Bytes of one micro-batch on a rank of the stage: (stored until its backward pass, recomputed at once)."""
    saved = working = 0.0
    if stage.dense:
        saved = saved_bytes(common.dense, stage.dense, choices)
        working = recompute_bytes(common.dense, stage.dense, choices, runtime)
    if stage.mixtures:
        saved += saved_bytes(common.mixed, stage.mixtures, choices)
        working = max(working, recompute_bytes(common.mixed, stage.mixtures, choices, runtime))
    if stage.output:
        saved += work.model.prediction_layers * saved_bytes(common.mixed, 1, choices)
    if choices.settings.rematerialize:
        # A stage stores only its input, and a rank recomputes one of its stages at a time.
        working += saved / choices.virtual_stages
        saved = choices.virtual_stages * common.dense.boundary
    return common.tokens * saved, common.tokens * working


def _context_buffers(work: Workload, choices: LayerStrategy, tokens: int, element: float) -> float:
    """Bytes of other ranks' keys and values of one layer: of all ranks if gathered, of two neighbors in a ring.

    `element` is the size of an element, including its gradient if that is sent too.
    """
    if choices.context == 1 or choices.context_method is ContextMethod.ULYSSES:
        return 0.0
    model = work.model
    saved = model.kv_heads * (model.head_size + model.value_size) / choices.tensor
    if model.latent is not None:
        saved = float(model.latent.kv_rank + model.latent.rope_size)
    parts = choices.context if choices.context_method is ContextMethod.ALL_GATHER else 2
    return parts * tokens * saved * element
