"""Bytes that the forward pass stores for the backward pass, per token and layer.

This is the count of Korthikanti et al. (arXiv 2205.05198, section 4), tensor by tensor, extended to gated feed-forward
layers, grouped queries, latent attention, mixtures of experts and flash attention. For GPT's layer it gives their
table 2: s·b·h·(34 + 5·a·s/h) without parallelism, and the values with tensor and sequence parallelism.

`weight_half_bytes_*` are the bytes that the first half of a split backward pass stores for the second: the input and
the output's gradient of every matrix product (M_W of arXiv 2401.10241, section 2), except in routers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from meshwright.api.precision import Precision
from meshwright.api.training import ActivationCheckpointing
from meshwright.models.architecture import Architecture
from meshwright.planner.cost.frameworks import Framework
from meshwright.planner.cost.stages import Stage
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.units import FP32_BYTES

INDEX = 8.0
"""Bytes of a row's number."""
ROUTER_TENSORS = 4
"""fp32 numbers per token and expert that this runtime's router stores: logits, scores, and inputs of two losses."""


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes per token (of the rank's part of the sequence) in one layer."""

    kept: float
    """With nothing recomputed."""
    core: float
    """Attention's scores, which selective recomputation does not store."""
    boundary: float
    """Only the layer's input."""
    selected: float = 0.0
    """With selective recomputation."""


@lru_cache(maxsize=65536)
def layer_activations(
    model: Architecture,
    mixture: bool,
    sequence: int,
    tensor: int,
    sequence_parallel: bool,
    precision: Precision,
    fp8: bool,
    runtime: Framework,
    spread: bool = True,
    requantizes: bool = False,
) -> LayerActivations:
    """The count for one kind of layer.

    Args:
        model: the architecture.
        mixture: whether the layer has a mixture of experts.
        sequence: length of a sequence.
        tensor: ranks of the tensor group.
        sequence_parallel: whether they split what is outside of products by tokens.
        precision: the compute format.
        fp8: whether products are in fp8.
        runtime: the framework.
        spread: whether a mixture's experts are distributed over ranks.
        requantizes: as the function `requantizes`.
    """
    element = precision.bytes
    mask = 1.0 if runtime.dropout else 0.0
    # Routing and collectives break a layer's graph: what the parts store is counted as without compilation.
    compiled = runtime.compiled and not mixture and tensor == 1
    quantized = fp8 and runtime.keeps_fp8
    stored = 0.0 if requantizes and compiled else 1.0 if quantized else element
    copies, split_copies = _quantized_inputs(model, mixture) if quantized and runtime.quantizes_each else (2, 0)
    matmul_inputs = copies * stored * model.hidden_size
    norms = 4 if model.output_norms else 2
    unsplit = norms * _norm(model, element, runtime, compiled=compiled) + 2 * mask * model.hidden_size
    if sequence_parallel:
        unsplit /= tensor
        matmul_inputs /= 1 if runtime.keeps_gathered else tensor
    core = 0.0 if runtime.flash else model.heads * sequence * (2 * element + mask) / tensor
    attention = _attention(model, element, runtime)
    feed_forward = _feed_forward(model, mixture, stored, element, fused=runtime.fused or compiled)
    split = (attention + stored * split_copies + feed_forward) / tensor
    routed_bytes = _routed(model, stored, element, runtime) if mixture else 0.0
    if not runtime.copies_routed or (spread and sequence_parallel):
        routed_bytes /= tensor
    boundary = element * model.hidden_size / (tensor if sequence_parallel or runtime.partitioned_checkpoints else 1)
    kept = unsplit + matmul_inputs + split + routed_bytes + core
    if not runtime.selects_products:
        return LayerActivations(kept, core, boundary, (kept - core) * runtime.selective_part)
    selected = boundary + attention / tensor + _products(model, mixture, element, tensor) + core
    return LayerActivations(kept, core, boundary, min(kept, selected))


def _products(model: Architecture, mixture: bool, element: float, tensor: int) -> float:
    """Bytes of what selective recomputation stores beside the layer's input and what attention stores: attention's
    input and output, and the outputs of the products in and after it.
    """
    split = element * (_matmul_output_width(model, mixture) + _latent_outputs(model)) / tensor
    return split + 2 * element * model.hidden_size


def requantizes(strategy: Strategy, runtime: Framework) -> bool:
    """Whether compiled dense layers quantize the operands of fp8 products again instead of storing them.

    What breaks a layer's graph at each product prevents that: maxima over a tensor or context group, and gradients of
    weights that are deferred.
    """
    if not (strategy.fp8 and runtime.fp8_in_graph) or strategy.tensor > 1 or strategy.context > 1:
        return False
    return strategy.pipeline == 1 or not strategy.schedule_kind.splits_backward


def _quantized_inputs(model: Architecture, mixture: bool) -> tuple[int, int]:
    """Inputs of products if each quantizes its own: (copies of the norms' outputs, width of other inputs), except those
    of the feed-forward layer's second product and of experts.
    """
    shared = not mixture or (model.mixture is not None and model.mixture.shared_intermediate_size > 0)
    feed_forward = 2 if model.gated and shared else 1
    output, latent = model.heads * model.value_size, model.latent
    if latent is None:
        return 3 + feed_forward, output
    return 2 + feed_forward, output + latent.query_rank + latent.kv_rank


def output_bytes(
    model: Architecture, tensor: int, sequence_parallel: bool, precision: Precision, runtime: Framework, boundary: float
) -> float:
    """Bytes per token that the final norm and the output projection store. `boundary` is that of a layer."""
    if not runtime.keeps_normed:
        return boundary
    split = tensor if sequence_parallel else 1
    gathered = 1 if runtime.keeps_gathered else split
    return _norm(model, precision.bytes, runtime) / split + precision.bytes * model.hidden_size / gathered


def _norm(model: Architecture, element: float, runtime: Framework, *, compiled: bool = False) -> float:
    """Bytes that one norm stores: its input in at least fp32, its output, and one statistic per token.

    A compiled one stores the input as it came, and computes the rest again.
    """
    if compiled:
        return model.hidden_size * element + FP32_BYTES
    if not runtime.keeps_normed:
        return model.hidden_size * runtime.norm_input
    return model.hidden_size * (max(element, runtime.norm_input) + element) + FP32_BYTES


def _latent_outputs(model: Architecture) -> int:
    """Outputs of latent attention's products that are not attention's inputs yet."""
    latent = model.latent
    return 0 if latent is None else latent.query_rank + latent.kv_rank


def _matmul_output_width(model: Architecture, mixture: bool) -> int:
    """Outputs of a feed-forward layer's first products, and the rows that a mixture's experts return."""
    columns, moe = 2 if model.gated else 1, model.mixture
    if not mixture or moe is None:
        return columns * model.intermediate_size
    routed_bytes = moe.per_token * (columns * moe.intermediate_size + model.hidden_size)
    return columns * moe.shared_intermediate_size + routed_bytes + moe.experts


def _attention(model: Architecture, element: float, runtime: Framework) -> float:
    """Queries, keys, values, and attention's output as the output projection's input."""
    latent = model.latent
    output = element * model.heads * model.value_size
    statistics = FP32_BYTES * model.heads if runtime.flash else 0.0
    if latent is None:
        keys = element * model.kv_heads * (model.head_size + model.value_size)
        return element * model.heads * model.head_size + keys + output + statistics
    key_size = model.head_size + latent.rope_size
    expanded = element * model.heads * (2 * key_size + model.value_size)
    compressed = 2 * element * (latent.query_rank + latent.kv_rank)
    return expanded + compressed + output + statistics


def _feed_forward(model: Architecture, mixture: bool, stored: float, element: float, *, fused: bool) -> float:
    """Inputs of the activation function and of the second product."""
    per_width = (2 * element if model.gated else element) + stored
    if model.gated and not fused:
        per_width += element
    moe = model.mixture
    if not mixture or moe is None:
        return per_width * model.intermediate_size
    return per_width * (moe.shared_intermediate_size + moe.per_token * moe.intermediate_size)


def _routed(model: Architecture, stored: float, element: float, runtime: Framework) -> float:
    """Copies of a token for its experts, their results, and what the router stores."""
    moe = model.mixture
    if moe is None:
        return 0.0
    copies = moe.per_token * model.hidden_size * (stored + element)
    if not runtime.copies_routed:
        return copies + FP32_BYTES * moe.experts
    return copies + moe.per_token * 2 * INDEX + ROUTER_TENSORS * FP32_BYTES * moe.experts


def saved_bytes(per_token: LayerActivations, layers: int, strategy: Strategy) -> float:
    """Bytes per token that `layers` layers keep until their backward pass."""
    recompute_method = strategy.checkpointing
    if recompute_method is ActivationCheckpointing.NONE:
        return layers * per_token.kept
    if recompute_method is ActivationCheckpointing.SELECTIVE:
        return layers * per_token.selected
    recomputed_layers = min(layers, strategy.checkpoint_layers) if strategy.checkpoint_layers is not None else layers
    groups = -(-recomputed_layers // strategy.recompute_group(recomputed_layers)) if recomputed_layers else 0
    return groups * per_token.boundary + (layers - recomputed_layers) * per_token.kept


def recompute_bytes(per_token: LayerActivations, layers: int, strategy: Strategy, runtime: Framework) -> float:
    """Bytes per token that one backward pass needs in addition to what is stored: the group that is recomputed."""
    if strategy.checkpointing is ActivationCheckpointing.SELECTIVE:
        return per_token.kept - per_token.selected if runtime.selects_products else per_token.core
    if strategy.checkpointing is ActivationCheckpointing.NONE:
        return 0.0
    return min(layers, strategy.recompute_group(layers)) * per_token.kept


def weight_half_bytes_of_stage(model: Architecture, stage: Stage, strategy: Strategy) -> float:
    """Bytes of a rank of a stage."""
    split = (strategy.tensor, strategy.precision)
    weight_half_bytes = stage.dense * weight_half_bytes_of_layer(model, False, *split)
    if stage.mixtures:
        weight_half_bytes += stage.mixtures * weight_half_bytes_of_layer(model, True, *split)
    if stage.output:
        weight_half_bytes += weight_half_bytes_of_output(model, *split, strategy.settings.loss_chunk)
    return weight_half_bytes


@lru_cache(maxsize=65536)
def weight_half_bytes_of_layer(model: Architecture, mixture: bool, tensor: int, precision: Precision) -> float:
    """Bytes of one layer. Every rank has the full input of a split block and the full gradient of its output. The input
    of a feed-forward layer's second product and the gradients of the first products' outputs are split.
    """
    whole, split = _attention_widths(model)
    moe = model.mixture if mixture else None
    blocks = [(1, model.intermediate_size)]
    if moe is not None:
        blocks = [(moe.per_token, moe.intermediate_size)]
        blocks += [(1, moe.shared_intermediate_size)] if moe.shared_intermediate_size else []
    for times, width in blocks:
        whole += times * 2 * model.hidden_size
        split += times * (3.0 if model.gated else 2.0) * width
    return precision.bytes * (whole + split / tensor)


def weight_half_bytes_of_output(
    model: Architecture, tensor: int, precision: Precision, loss_chunk: int | None
) -> float:
    """Bytes of the output projection. 0 with a chunked loss, which computes all gradients in its forward pass."""
    if loss_chunk is not None:
        return 0.0
    return precision.bytes * (model.hidden_size + model.vocab_size / tensor)


def _attention_widths(model: Architecture) -> tuple[float, float]:
    """Number of elements that every rank of a tensor group has, and number that are split over the group."""
    hidden, latent = model.hidden_size, model.latent
    attention_output = model.heads * model.value_size
    if latent is None:
        projected = (model.heads + model.kv_heads) * model.head_size + model.kv_heads * model.value_size
        return 2.0 * hidden, attention_output + projected
    latent_width = 2 * (latent.query_rank + latent.kv_rank) + latent.rope_size
    key_widths = model.heads * (model.head_size + latent.rope_size)
    expanded = key_widths + model.heads * (model.head_size + model.value_size)
    return 2.0 * hidden + latent_width, attention_output + expanded
