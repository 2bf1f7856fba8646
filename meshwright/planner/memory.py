"""Peak memory of every pipeline stage's ranks, by closed forms.

Model states follow ZeRO (arXiv 1910.02054, section 3). Activations follow the method of Korthikanti et al. (arXiv
2205.05198, section 4): what autograd keeps from forward to backward is counted tensor by tensor, here for RMSNorm,
grouped-query attention without a stored score matrix, SwiGLU and no dropout; a test counts the same on the modules.
Every kind of stage is evaluated: which one is worst depends on the embedding, the logits, the layer split and the
micro-batches in flight. What the driver, communication libraries and fragmentation take is `hardware.USABLE_FRACTION`.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.api.parallelism import ContextMethod
from meshwright.api.precision import Precision
from meshwright.layout import Layout, split_layers
from meshwright.models.architecture import Architecture
from meshwright.models.mixture import is_mixture, router_parameters

FP32 = 4
HALF = (Precision.BF16, Precision.FP16)
"""Formats of two bytes."""
ADAM = 8
"""Bytes per parameter of AdamW's two moments in fp32."""
INDEX = 8
"""Bytes of a row's number."""
ROUTER_TENSORS = 4
"""fp32 tensors of [tokens, experts] that a router keeps: logits, scores and the gradients' inputs of both losses."""


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
    context: int = 1
    """Ranks that share each sequence."""
    context_method: ContextMethod = ContextMethod.RING_ZIG_ZAG

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank, before sequence parallelism."""
        return -(-self.sequence_length // self.context) * self.micro_batch_size

    @property
    def element(self) -> int:
        """Bytes of one number of compute."""
        return 2 if self.precision in HALF else FP32


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of each rank of one pipeline stage, in bytes, by what holds it."""

    stage: int
    parameters: int
    """fp32 parameters, and what is gathered of other replicas' shards."""
    gradients: int
    optimizer: int
    activations: int
    """Kept from forward to backward, with bf16 copies of weights, and what travels between stages."""
    logits: int
    reduction: int
    """Buffers of the gradients' reduction, after the last backward pass: never beside activations and logits."""

    @property
    def total(self) -> int:
        """The peak."""
        working = max(self.activations + self.logits, self.reduction)
        return self.parameters + self.gradients + self.optimizer + working


def worst_stage(workload: Workload, layout: Layout) -> StageMemory:
    """The stage whose ranks need most; the first of equals.

    Between the first stage, which holds the embedding, and the last, which holds the output, layers and micro-batches
    in flight only become fewer, so the second stage stands for all of them; but for mixtures, which come late.
    """
    stages = sorted({0, min(1, layout.pipeline - 1), layout.pipeline - 1})
    if workload.architecture.mixture is not None:
        stages = list(range(layout.pipeline))
    return max((stage_memory(workload, layout, stage) for stage in stages), key=lambda m: (m.total, -m.stage))


def stage_memory(workload: Workload, layout: Layout, stage: int) -> StageMemory:
    """The estimate for ranks of `stage` (counted from 0).

    Raises:
        ValueError: there are more stages than layers.
    """
    layers = len(split_layers(workload.architecture.layers, layout.pipeline)[stage])
    own = rank_parameters(workload.architecture, layout, stage, layers)
    replicas = layout.replicas
    sharded = workload.zero_stage > 0 and replicas > 1
    experts = expert_parameters(workload.architecture, layout, stage)
    shard = -(-(own - experts) // replicas) - (-experts * layout.expert // replicas) if sharded else own
    accumulates = workload.zero_stage < 2 or not sharded or workload.micro_batches > 1
    # Stage 1 shards optimizer state alone: parameters stay whole, and are reduced and gathered bucket by bucket.
    whole = not sharded or workload.zero_stage == 1
    return StageMemory(
        stage=stage,
        parameters=FP32 * own if whole else FP32 * shard + _gathered(workload, layout, stage, own),
        gradients=FP32 * (own if accumulates else shard),
        optimizer=ADAM * shard,
        activations=_activations(workload, layout, stage, layers, own if whole else 0),
        logits=_logits(workload, layout) if stage == layout.pipeline - 1 else 0,
        reduction=FP32 * own if whole and replicas > 1 else 0,
    )


def rank_parameters(architecture: Architecture, layout: Layout, stage: int, layers: int) -> int:
    """Parameters on one rank of a stage before any sharding over replicas; norms and routers are whole on each."""
    whole = architecture.whole_parameters
    split = layers * (architecture.layer_parameters - whole) + _tables(architecture, layout, stage)
    positions = architecture.positions * architecture.hidden_size if stage == 0 else 0
    final_norm = architecture.norm_parameters if stage == layout.pipeline - 1 else 0
    mixture, mixtures = architecture.mixture, _mixtures(architecture, layout, stage)
    routers = 0
    if mixture is not None:
        shared = 3 * architecture.hidden_size * mixture.shared_intermediate_size
        split -= mixtures * (architecture.feed_forward_parameters - shared)
        routers = mixtures * router_parameters(mixture, architecture.hidden_size)
    experts = expert_parameters(architecture, layout, stage)
    return -(-split // layout.tensor) + layers * whole + positions + final_norm + routers + experts


def expert_parameters(architecture: Architecture, layout: Layout, stage: int) -> int:
    """Of `rank_parameters`, those of routed experts: spread over the expert group, whose ranks share out replicas."""
    mixture = architecture.mixture
    if mixture is None:
        return 0
    one = 3 * architecture.hidden_size * mixture.intermediate_size
    return -(-_mixtures(architecture, layout, stage) * mixture.experts * one // (layout.tensor * layout.expert))


def _mixtures(architecture: Architecture, layout: Layout, stage: int) -> int:
    """Layers of a stage that are mixtures of experts."""
    return sum(
        is_mixture(architecture.mixture, layer) for layer in split_layers(architecture.layers, layout.pipeline)[stage]
    )


def _tables(architecture: Architecture, layout: Layout, stage: int) -> int:
    """Parameters of embedding and output projection in a stage; one table when they are tied."""
    ends = int(stage == 0) + int(stage == layout.pipeline - 1)
    return min(ends, 1 if architecture.tie_embeddings else 2) * architecture.vocab_size * architecture.hidden_size


def _gathered(workload: Workload, layout: Layout, stage: int, own: int) -> int:
    """Bytes of gathered parameters: all with ZeRO 2; with ZeRO 3 one layer, the next, and what is in no layer."""
    if workload.zero_stage == 2:
        return workload.element * own
    tables = -(-_tables(workload.architecture, layout, stage) // layout.tensor)
    layer = -(-workload.architecture.layer_parameters // layout.tensor)
    mixtures = _mixtures(workload.architecture, layout, stage)
    if mixtures:
        # Attention and the experts here, whose width the dense layer's takes no part in.
        layer += expert_parameters(workload.architecture, layout, stage) // mixtures
    return workload.element * min(own, tables + 2 * layer)


def _activations(workload: Workload, layout: Layout, stage: int, layers: int, cast: int) -> int:
    """Bytes of 1F1B's micro-batches in flight, at most `pipeline - stage` of them, and of what travels between stages.

    In bf16 each micro-batch keeps its own copy of the `cast` parameters that are stored in fp32. Buffers for what
    neighbours send exist for every micro-batch of a step.
    """
    in_flight = min(workload.micro_batches, layout.pipeline - stage)
    copies = workload.element * cast if workload.precision in HALF else 0
    slices = layout.tensor if workload.sequence_parallel else 1
    boundary = -(-workload.tokens * workload.architecture.hidden_size * workload.element // slices)
    neighbours = int(stage > 0) + int(stage < layout.pipeline - 1)
    sent = in_flight * boundary if stage < layout.pipeline - 1 else 0
    mixtures = _mixtures(workload.architecture, layout, stage)
    of_layers = layers * layer_activations(workload, layout.tensor)
    if mixtures:
        of_layers += mixtures * (mixture_activations(workload, layout) - _feed_forward_activations(workload, layout))
    kept = in_flight * (of_layers + copies)
    return kept + sent + neighbours * workload.micro_batches * boundary + _exchanged(workload, layout.tensor)


def _exchanged(workload: Workload, tensor: int) -> int:
    """Bytes of other ranks' keys and values, and of their gradients in fp32, while one layer works on them."""
    method = workload.context_method
    if workload.context == 1 or method is ContextMethod.ULYSSES:
        return 0
    parts = workload.context if method is ContextMethod.ALL_GATHER else 2
    numbers = 2 * workload.architecture.kv_heads * workload.architecture.head_size // tensor
    return parts * workload.tokens * numbers * (workload.element + FP32)


def layer_activations(workload: Workload, tensor: int) -> int:
    """Bytes one decoder layer keeps of one micro-batch on each of `tensor` ranks.

    Twice, for each norm: its fp32 input, the inverse root mean square and the normed input, split along the sequence
    with sequence parallelism; and the whole of its output, which the column-parallel products share. Split over the
    ranks always: queries, keys, values, attention's output and log-sum-exp; gate, its SiLU, up, and their product, or
    without a gate what goes into the non-linearity and what comes out.
    """
    model, element = workload.architecture, workload.element
    slices = tensor if workload.sequence_parallel else 1
    norm = -(-(FP32 * model.hidden_size + FP32 + element * model.hidden_size) // slices)
    whole = element * model.hidden_size
    keyed = model.kv_heads if model.latent is None else model.heads
    widths = (model.heads + keyed) * (model.key_size + model.value_size)
    attention = element * widths + FP32 * model.heads
    feed_forward = element * (4 if model.gated else 2) * model.intermediate_size
    return workload.tokens * (2 * (norm + whole) + -(-(attention + feed_forward) // tensor))


def mixture_activations(workload: Workload, layout: Layout) -> int:
    """Bytes one mixture of experts keeps of one micro-batch, in place of a dense layer's, when loads are even.

    For each token and expert that it uses: the copied row, gate, its SiLU, up and their product, and the row that comes
    back, beside its place among the choices; for each token scores and logits of all experts, and shared experts.
    """
    model, element = workload.architecture, workload.element
    mixture = model.mixture
    if mixture is None:
        return 0
    slices = layout.tensor if workload.sequence_parallel and layout.expert > 1 else 1
    rows = 2 * element * model.hidden_size + 2 * INDEX
    inner = element * 4 * (mixture.per_token * mixture.intermediate_size + mixture.shared_intermediate_size)
    routed = mixture.per_token * rows + ROUTER_TENSORS * FP32 * mixture.experts
    return workload.tokens * (-(-inner // layout.tensor) + -(-routed // slices))


def _feed_forward_activations(workload: Workload, layout: Layout) -> int:
    return workload.tokens * -(-workload.element * 4 * workload.architecture.intermediate_size // layout.tensor)


def _logits(workload: Workload, layout: Layout) -> int:
    """Bytes of one micro-batch's log-probabilities and of two gradients of them, all in fp32."""
    return workload.tokens * -(-workload.architecture.vocab_size // layout.tensor) * 3 * FP32
