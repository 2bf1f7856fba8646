"""Memory of each rank of every pipeline stage, by part, and the stage that needs the most.

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
    requantizes,
    saved_bytes,
    weight_half_bytes_of_stage,
)
from meshwright.planner.cost.comm_time import key_value_width
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
    """In the compute format, including the copies that each micro-batch in flight stores."""
    master: float
    """Copies that updates are applied to, if the compute format is another one."""
    gradients: float
    optimizer: float
    """Moments, and the state of an outer optimizer."""
    activations: float
    """Stored from the forward to the backward pass, for all micro-batches in flight."""
    working: float
    """Largest amount that a backward pass recomputes at once."""
    logits: float
    gathered: float
    """Other replicas' parts of parameters, and of gradients that wait for their reduction."""
    buffers: float
    """Sends and receives between stages, tokens on their way to experts, a bucket of gradients."""
    context: float
    """CUDA context, libraries and communicators."""
    fragmentation: float
    reused: float = 0.0
    """Of `gradients`, those that take memory which activations leave: they are not there when memory is fullest."""

    @property
    def peak_gradients(self) -> float:
        """Gradients when memory is fullest."""
        return self.gradients - self.reused

    @property
    def states(self) -> float:
        """Parameters, their masters, gradients and optimizer state."""
        return self.parameters + self.master + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Peak bytes."""
        working = max(self.working, self.logits)
        needed = self.states - self.reused + self.activations + working + self.gathered + self.buffers
        return needed + self.context + self.fragmentation

    @property
    def counted(self) -> float:
        """Peak bytes of tensors, without context and fragmentation."""
        return self.total - self.context - self.fragmentation


_Parts = tuple[int, float, float, float, float, float, float, float, float, float, float, float, float]


class _Common(NamedTuple):
    """Values that are the same for all stages of a layout."""

    tokens: int
    """Tokens of one micro-batch on a rank."""
    dense: LayerActivations
    mixed: LayerActivations
    output: float
    """Bytes per token that the end of the model stores in addition to its layers and the logits."""
    sends: float
    """Bytes that one neighbor sends."""
    layer: float
    """Bytes of buffers for one layer's communication, on every stage."""
    experts: float
    """Bytes of buffers for the communication of a mixture of experts."""
    logits: float


def worst_stage(work: Workload, strategy: Strategy, runtime: Framework) -> Memory:
    """Return the memory of the stage whose ranks need the most. Of equal stages, the first.

    Raises:
        ValueError: the layers cannot be split over the pipeline's ranks.
    """
    common = _common(work, strategy, runtime)
    stage_parts = [_parts(work, strategy, runtime, stage, common) for stage in _candidates(work, strategy)]
    return Memory(*max(stage_parts, key=_total))


def memory_within(work: Workload, strategy: Strategy, runtime: Framework, limit: float) -> Memory | None:
    """Return the memory of the fullest stage if all stages are within `limit` bytes, else None.

    Stops at the first stage above the limit, because most of the layouts that a search tries do not fit.

    Raises:
        ValueError: the layers cannot be split over the pipeline's ranks.
    """
    common = _common(work, strategy, runtime)
    fullest_parts, largest_total = None, -1.0
    for stage in _candidates(work, strategy):
        parts = _parts(work, strategy, runtime, stage, common)
        total = _total(parts)
        if total > limit:
            return None
        if total > largest_total:
            fullest_parts, largest_total = parts, total
    return Memory(*fullest_parts) if fullest_parts is not None else None


def model_states_fit(work: Workload, strategy: Strategy, runtime: Framework, limit: float) -> bool:
    """Whether parameters, gradients and optimizer state fit in `limit` bytes, independent of recomputation."""
    model, tensor, parts = work.model, strategy.tensor, strategy.expert_parts
    byte_limit = (limit - runtime.context) / (1.0 + runtime.fragmentation)
    for stage in stages_of(model, strategy).heaviest:
        states = states_of(stage_parameters(model, stage, tensor, parts), strategy, runtime, stage)
        if sum(states) - states.cast > byte_limit:
            return False
    return True


def memory_by_stage(work: Workload, strategy: Strategy, runtime: Framework) -> list[Memory]:
    """Return the memory of all stages, in order."""
    common = _common(work, strategy, runtime)
    return [Memory(*_parts(work, strategy, runtime, stage, common)) for stage in stages_of(work.model, strategy).every]


def _candidates(work: Workload, strategy: Strategy) -> tuple[Stage, ...]:
    """The stages that can be the fullest.

    With a split backward pass any stage can: later ranks store fewer activations and more inputs of weight gradients.
    """
    stages = stages_of(work.model, strategy)
    return stages.every if strategy.schedule_kind.defers_weights_at_peak else stages.heaviest


def _common(work: Workload, strategy: Strategy, runtime: Framework) -> _Common:
    loss_chunk = strategy.settings.loss_chunk
    return _common_of(work, LayerStrategy.of(strategy), loss_chunk, runtime, requantizes(strategy, runtime))


@lru_cache(maxsize=65536)
def _common_of(
    work: Workload, strategy: LayerStrategy, loss_chunk: int | None, runtime: Framework, quantizes_again: bool
) -> _Common:
    model, tensor, precision = work.model, strategy.tensor, strategy.precision
    layer_arguments = (
        work.sequence_length,
        tensor,
        strategy.sequence_parallel,
        precision,
        strategy.fp8,
        runtime,
        strategy.expert > 1 or not strategy.expert_tensor,
        quantizes_again,
    )
    dense = layer_activations(model, False, *layer_arguments)
    mixed = layer_activations(model, True, *layer_arguments) if model.mixture is not None else dense
    tokens = -(-work.sequence_length * strategy.micro_batch_size // strategy.context)
    element = precision.bytes
    # Full inputs and partial outputs of one layer's products, and their gradients, in addition to the split ones.
    unsplit_bytes = 4.0 * element * tokens * model.hidden_size if tensor > 1 else 0.0
    experts = 0.0
    if model.mixture is not None and strategy.expert > 1:
        # Tokens sent to experts and received from other ranks.
        experts = 2.0 * tokens * model.mixture.per_token * model.hidden_size * element / tensor
    return _Common(
        tokens=tokens,
        dense=dense,
        mixed=mixed,
        output=output_bytes(model, tensor, strategy.sequence_parallel, precision, runtime, dense.boundary),
        sends=2 * tokens * dense.boundary,
        layer=unsplit_bytes + _context_buffers(work, strategy, tokens, element + runtime.ring_gradients),
        experts=experts,
        logits=_logits(work, strategy, loss_chunk, runtime, tokens),
    )


def _logits(work: Workload, strategy: LayerStrategy, chunk: int | None, runtime: Framework, tokens: int) -> float:
    """Bytes of a micro-batch's logits, or of a chunk's logits with the gradients that a chunked loss computes at
    once.
    """
    width = work.model.vocab_size / strategy.tensor
    per_logit = runtime.loss_bytes if strategy.tensor == 1 else runtime.split_loss_bytes
    if strategy.precision is Precision.FP64:
        per_logit *= 2.0
    element, matrix = strategy.precision.bytes, width * work.model.hidden_size
    if chunk is None or (chunk >= tokens and not runtime.compiled):
        return tokens * width * per_logit
    gradients, hidden = max(FP32_BYTES, element) * matrix, element * tokens * work.model.hidden_size
    if not runtime.compiled:
        return chunk * width * per_logit + gradients + hidden
    # Logits and their gradient stay in the compute format.
    if chunk < tokens:
        # The gradient of the chunk before is still there, and the chunk's gradient of the matrix is added to the sum.
        return 3.0 * chunk * width * element + gradients + element * matrix + hidden
    # The gradient of the only chunk's logits is multiplied into those of matrix and hidden states when the logits are
    # gone. That of the matrix keeps the compute format until the backward pass makes one in fp32 of it.
    logits = tokens * width * element
    return hidden + max(2.0 * logits, logits + element * matrix + hidden, gradients + element * matrix + hidden)


def _parts(work: Workload, strategy: Strategy, runtime: Framework, stage: Stage, common: _Common) -> _Parts:
    """The fields of `Memory` for the ranks of one stage, in its order."""
    stage_params = stage_parameters(work.model, stage, strategy.tensor, strategy.expert_parts)
    states = states_of(stage_params, strategy, runtime, stage)
    saved, working = _activations(work, strategy, runtime, stage, common)
    weight_half = (
        common.tokens * weight_half_bytes_of_stage(work.model, stage, strategy) if runtime.frees_halfway else saved
    )
    activations = in_flight_bytes(strategy, stage.rank, saved, weight_half)
    if stage.output:
        activations += _saved_after_layers(work, strategy, runtime, common)
    parameters = states.parameters
    if states.cast:
        copies, recomputed_cast = _cast_copies(stage_params, strategy, states, stage, runtime)
        not_halfway = micro_batches_in_flight(strategy, stage.rank) - pending_weight_gradients(strategy, stage.rank)
        parameters, working = parameters + not_halfway * copies, working + recomputed_cast
    if strategy.activation_offload:
        layers_resident = (
            2 * strategy.recompute_group(stage.layers)
            if strategy.checkpointing is not ActivationCheckpointing.NONE
            else 2
        )
        activations = min(activations, layers_resident * saved / max(1, stage.layers))
    logits = common.logits if stage.output else 0.0
    neighbors = (stage.rank > 0) + (stage.rank < strategy.pipeline - 1)
    buffers = neighbors * common.sends + common.layer + (common.experts if stage.mixtures else 0.0) + states.bucket
    if strategy.fp8:
        buffers += runtime.fp8_weights * stage_params.total
    transient = working if working > logits else logits
    reused = min(states.gradients, activations + transient) if _makes_gradients_anew(strategy, runtime) else 0.0
    allocated = parameters + states.master + states.gradients - reused + states.optimizer + activations + transient
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
        reused,
    )


def _makes_gradients_anew(strategy: Strategy, runtime: Framework) -> bool:
    """Whether a step begins without gradients, and its only backward pass makes them while it frees activations.

    Ranks that share gradients with others have buckets for them.
    """
    alone = strategy.micro_batches == 1 and strategy.pipeline == 1 and strategy.shard_ranks == 1
    return alone and runtime.stores_masters


def _total(parts: _Parts) -> float:
    working, logits = parts[6], parts[7]
    return sum(parts) - parts[0] - (logits if working > logits else working) - 2.0 * parts[12]


def _saved_after_layers(work: Workload, strategy: Strategy, runtime: Framework, common: _Common) -> float:
    """Bytes of the final norm, and of the logarithms of probabilities but for one micro-batch's: `Memory.logits` has
    those.
    """
    if strategy.settings.rematerialize:
        return 0.0
    count = pending_losses(strategy)
    always = runtime.keeps_normed or strategy.checkpointing is ActivationCheckpointing.NONE
    saved = count * common.output if always else 0.0
    if strategy.settings.loss_chunk is None:
        saved += (count - 1) * max(FP32_BYTES, strategy.precision.bytes) * work.model.vocab_size / strategy.tensor
    return common.tokens * saved


def _cast_copies(
    stage_params: StageParameters, strategy: Strategy, states: States, stage: Stage, runtime: Framework
) -> tuple[float, float]:
    """Bytes of copies in the compute format: (stored by each micro-batch in flight, created during recomputation)."""
    tables = states.cast * min(1.0, stage_params.tables / max(1.0, stage_params.total))
    # Without experts, whose weights stay outside of a layer's graph, only the tables have copies.
    cast = tables if requantizes(strategy, runtime) and not stage.mixtures else states.cast
    if strategy.checkpointing is ActivationCheckpointing.NONE and not strategy.settings.rematerialize:
        return cast, 0.0
    if strategy.settings.rematerialize:
        return 0.0, cast
    group = 1 if strategy.checkpointing is ActivationCheckpointing.SELECTIVE else strategy.recompute_group(stage.layers)
    return tables, (cast - tables) * min(1.0, group / max(1, stage.layers))


def _activations(
    work: Workload, strategy: Strategy, runtime: Framework, stage: Stage, common: _Common
) -> tuple[float, float]:
    """Bytes of one micro-batch on a rank of the stage: (stored until its backward pass, recomputed at once)."""
    saved = working = 0.0
    if stage.dense:
        saved = saved_bytes(common.dense, stage.dense, strategy)
        working = recompute_bytes(common.dense, stage.dense, strategy, runtime)
    if stage.mixtures:
        saved += saved_bytes(common.mixed, stage.mixtures, strategy)
        working = max(working, recompute_bytes(common.mixed, stage.mixtures, strategy, runtime))
    if stage.output:
        saved += work.model.prediction_layers * saved_bytes(common.mixed, 1, strategy)
    if strategy.settings.rematerialize:
        # A stage stores only its input, and a rank recomputes one of its stages at a time.
        working += saved / strategy.virtual_stages
        saved = strategy.virtual_stages * common.dense.boundary
    return common.tokens * saved, common.tokens * working


def _context_buffers(work: Workload, strategy: LayerStrategy, tokens: int, element: float) -> float:
    """Bytes of other ranks' keys and values of one layer: of all ranks if gathered, of two neighbors in a ring.

    `element` is the size of an element, including its gradient if that is sent too.
    """
    if strategy.context == 1 or strategy.context_method is ContextMethod.ULYSSES:
        return 0.0
    saved = key_value_width(work.model) / strategy.tensor
    parts = strategy.context if strategy.context_method is ContextMethod.ALL_GATHER else 2
    return parts * tokens * saved * element
