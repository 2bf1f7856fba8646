"""Peak memory of every pipeline stage's ranks, by closed forms.

Model states follow ZeRO (arXiv 1910.02054, section 3); activations follow Korthikanti et al. (arXiv 2205.05198,
section 4), counted again for this decoder: SwiGLU, grouped-query attention, no dropout, and attention that never
stores its score matrix. Every stage is evaluated: which one is worst depends on the embedding, the logits, the layer
split and the number of micro-batches in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.api.spec import Precision
from meshwright.layout import Layout, split_layers
from meshwright.models.architecture import Architecture

FP32 = 4
ADAM = 8
"""Bytes per parameter of AdamW's two moments in fp32."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What one run asks of memory, beside its layout."""

    architecture: Architecture
    sequence_length: int
    micro_batch_size: int
    """Sequences of one micro-batch on one replica."""
    micro_batches: int
    """Micro-batches per step and replica."""
    zero_stage: int = 0
    precision: Precision = Precision.FP32
    sequence_parallel: bool = True

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.sequence_length * self.micro_batch_size

    @property
    def element(self) -> int:
        """Bytes of one number of compute."""
        return 2 if self.precision is Precision.BF16 else FP32


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Peak memory of each rank of one pipeline stage, in bytes, by what holds it."""

    stage: int
    parameters: int
    """fp32 parameters, and their copies in the format of compute."""
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits


def worst_stage(workload: Workload, layout: Layout) -> StageMemory:
    """The stage whose ranks need most; the first of equals.

    Between the first stage, which holds the embedding, and the last, which holds the output, layers and micro-batches
    in flight only become fewer, so the second stage stands for all of them.
    """
    stages = sorted({0, min(1, layout.pipeline - 1), layout.pipeline - 1})
    return max((stage_memory(workload, layout, stage) for stage in stages), key=lambda m: (m.total, -m.stage))


def stage_memory(workload: Workload, layout: Layout, stage: int) -> StageMemory:
    """The estimate for ranks of `stage` (counted from 0).

    Raises:
        ValueError: there are more stages than layers.
    """
    layers = len(split_layers(workload.architecture.layers, layout.pipeline)[stage])
    states = _model_states(workload, layout, stage, layers)
    return StageMemory(
        stage=stage,
        parameters=states[0],
        gradients=states[1],
        optimizer=states[2],
        activations=_activations(workload, layout, stage, layers),
        logits=_logits(workload, layout) if stage == layout.pipeline - 1 else 0,
    )


def rank_parameters(architecture: Architecture, layout: Layout, stage: int, layers: int) -> int:
    """Parameters on one rank of a stage before any sharding over replicas; norms are whole on every rank."""
    hidden = architecture.hidden_size
    norms = 2 * hidden
    split = layers * (architecture.layer_parameters - norms)
    first, last = stage == 0, stage == layout.pipeline - 1
    tables = int(first) + int(last) - int(first and last and architecture.tie_embeddings)
    split += tables * architecture.vocab_size * hidden
    return -(-split // layout.tensor) + layers * norms + int(last) * hidden


def _model_states(workload: Workload, layout: Layout, stage: int, layers: int) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer state.

    Stage 2 keeps fp32 shards and the gathered parameters; stage 3 gathers a layer at a time, and the next one early.
    """
    own = rank_parameters(workload.architecture, layout, stage, layers)
    shard = -(-own // layout.data) if workload.zero_stage else own
    largest = rank_parameters(workload.architecture, layout, stage, 1)
    gathered = {0: 0, 2: own, 3: min(own, 2 * largest)}[workload.zero_stage]
    if workload.zero_stage == 0 and workload.precision is Precision.BF16:
        gathered = own
    return FP32 * shard + workload.element * gathered, FP32 * shard, ADAM * shard


def _activations(workload: Workload, layout: Layout, stage: int, layers: int) -> int:
    """Bytes kept from forward to backward by 1F1B's micro-batches in flight: at most `pipeline - stage` of them."""
    in_flight = min(workload.micro_batches, layout.pipeline - stage)
    received = workload.tokens * workload.architecture.hidden_size * workload.element
    return in_flight * (layers * layer_activations(workload, layout.tensor) + (received if layout.pipeline > 1 else 0))


def layer_activations(workload: Workload, tensor: int) -> int:
    """Bytes one decoder layer keeps of one micro-batch on each of `tensor` ranks.

    Inputs of the two norms (split along the sequence with sequence parallelism), the gathered inputs of the two
    column-parallel products, and what attention and SwiGLU keep, which is split over the ranks: queries, keys, values
    and attention's output; gate, its SiLU, up, and their product.
    """
    model = workload.architecture
    keys_and_values = 2 * model.kv_heads * model.head_size
    residual = -(-2 * model.hidden_size // (tensor if workload.sequence_parallel else 1))
    gathered = 2 * model.hidden_size
    split = 2 * model.hidden_size + keys_and_values + 4 * model.intermediate_size
    return workload.tokens * workload.element * (residual + gathered + -(-split // tensor))


def _logits(workload: Workload, layout: Layout) -> int:
    """Bytes of one micro-batch's logits: as computed, as fp32 log-probabilities, and their gradient in fp32."""
    vocabulary = -(-workload.architecture.vocab_size // layout.tensor)
    return workload.tokens * vocabulary * (workload.element + 2 * FP32)
