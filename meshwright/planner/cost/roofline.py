"""Seconds of one layer's computation on one rank, kernel by kernel.

A product of m x k by k x n costs its FLOPs at the rate of large products, plus its bytes at the rate of memory.
Efficiency therefore falls if tensor parallelism, short sequences or small micro-batches make a side short. Element-wise
operations, and a stored score matrix, cost their bytes. Launching costs the host a constant per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import exp

from meshwright.api.precision import Precision
from meshwright.api.training import ActivationCheckpointing
from meshwright.models.architecture import Architecture
from meshwright.models.counts import attended_keys
from meshwright.planner.cost.accelerators import Accelerator
from meshwright.planner.cost.frameworks import Framework
from meshwright.planner.units import FP32_BYTES

MEMORY_PART = 0.80
"""Fraction of the nominal memory bandwidth that a streaming kernel reaches."""
FLASH_PART = 0.56
"""Fraction of large products' rate that flash attention reaches, forward and backward together."""
BATCHED_PART = 0.6
"""The same for the batched products around a stored score matrix."""
COMPILED_LOSS_PASSES = 14.0
"""Bytes of memory traffic per logit that take as long as a compiled loss in chunks, which reads 2 + 2 and writes 2.

Its exponentials take longer than that: 15.2 ms for 32,768 tokens and 128,256 logits (`benchmarks/results`, one H200).
"""
TILE_ROWS = 128
"""Rows of one tile of a grouped product on tensor cores (CUTLASS, and DeepGEMM in DeepSeek-V3)."""
QUANTIZED_FORWARD = 5.0
"""Bytes of memory traffic that quantize one 16-bit number to fp8: the largest value is found, then it is converted."""
QUANTIZED_BACKWARD = 3.0
"""The same for a weight in the backward pass, for a layout along the other dimension, with the scale of the forward
pass."""
TRANSPOSED = 2.0
"""Bytes of memory traffic that copy one fp8 number into the other layout, which the product of a weight's gradient
needs.
"""
KERNEL_GAP = 5e-6
"""Seconds between the end of a kernel and the start of the next."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The part of one micro-batch that one rank computes, in one kind of layer."""

    model: Architecture
    mixture: bool
    tokens: int
    """Tokens of the micro-batch on this rank, after context parallelism, before sequence parallelism."""
    sequence: int
    """Full length of the sequence for attention."""
    context: int
    tensor: int
    sequence_parallel: bool
    expert: int
    causal: bool
    precision: Precision
    fp8: bool = False
    balanced: bool = True
    """Whether causal attention has the same cost on all ranks of a context-parallel group."""
    expert_tensor: bool = True
    """See `Strategy.expert_tensor`."""


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of a layer's kernels for one micro-batch."""

    forward: float
    backward_input: float
    backward_weight: float
    core: float
    """Part of `forward` for attention's core, which selective recomputation runs again."""
    elementwise: float
    """Part of `forward` outside matrix products and attention, with the casts of experts' weights."""

    def recomputed(self, how: ActivationCheckpointing, runtime: Framework) -> float:
        """Seconds of the recomputation before the backward pass."""
        if how is ActivationCheckpointing.NONE:
            return 0.0
        if how is not ActivationCheckpointing.SELECTIVE:
            return self.forward
        if runtime.selects_products:
            return self.elementwise
        kept_fraction = runtime.selective_part
        return self.core if kept_fraction >= 1.0 else (1.0 - kept_fraction) * (self.forward - self.core)


@lru_cache(maxsize=65536)
def layer_time(shape: LayerShape, gpu: Accelerator, runtime: Framework) -> LayerTime:
    """Seconds of one layer's kernels: products, attention's core, element-wise operations."""
    products = sum(_matmul_seconds(*matmul, shape.precision, shape.fp8, gpu) for matmul in matmuls_of(shape))
    memory_rate = gpu.bandwidth * MEMORY_PART
    weights = expert_weights(shape)
    quantizes = shape.fp8 and not runtime.fp8_weights
    cast = weights * (_cast_bytes(shape.precision, runtime) + QUANTIZED_FORWARD * quantizes) / memory_rate
    quantized_again = weights * QUANTIZED_BACKWARD * quantizes / memory_rate
    quantized_forward, quantized_backward = quantized_bytes(shape, runtime) if shape.fp8 else (0.0, 0.0)
    core_forward, core_backward = _attention_core_seconds(shape, gpu, runtime)
    moved = elementwise_bytes(shape, runtime) / memory_rate + runtime.kernels * KERNEL_GAP
    return LayerTime(
        forward=products + core_forward + moved + cast + quantized_forward / memory_rate,
        backward_input=products + core_backward + moved + quantized_again + quantized_backward / memory_rate,
        backward_weight=products + runtime.kernels / 2 * KERNEL_GAP + weights * runtime.accumulation / memory_rate,
        core=core_forward,
        elementwise=moved + cast,
    )


def quantized_bytes(shape: LayerShape, runtime: Framework) -> tuple[float, float]:
    """Bytes of memory traffic that quantize the operands of fp8 products, except experts' weights: forward, backward.

    Forward these are inputs and, in runtimes that do so for every micro-batch, weights. Backward, gradients are
    quantized, and gradients and inputs are copied to the other layout.
    """
    forward = backward = 0.0
    dense = len(_dense_matmuls(shape))
    for index, (rows, columns, inner, count, _) in enumerate(matmuls_of(shape)):
        weights = inner * columns if index < dense and not runtime.fp8_weights else 0.0
        forward += QUANTIZED_FORWARD * (count * rows * inner + weights)
        backward += count * rows * ((QUANTIZED_FORWARD + TRANSPOSED) * columns + TRANSPOSED * inner)
        backward += QUANTIZED_BACKWARD * weights
    return forward, backward


def expert_weights(shape: LayerShape) -> float:
    """Weights of the experts of one rank in a layer.

    What a micro-batch does with each weight takes no more time with more rows. For dense weights it is a small part of
    their products (`stage_time.weight_pass_bytes`). Experts have as many more weights as rows have experts to choose
    from.
    """
    moe = shape.model.mixture
    if not shape.mixture or moe is None:
        return 0.0
    matrices = 3 if shape.model.gated else 2
    width = moe.intermediate_size / (shape.tensor if shape.expert_tensor else 1)
    return moe.experts / shape.expert * matrices * shape.model.hidden_size * width


def _cast_bytes(precision: Precision, runtime: Framework) -> float:
    """Bytes of memory traffic that copies a weight into the compute format, in every forward pass of a micro-batch.

    FSDP gathers in that format, and copies out of its buffer instead.
    """
    return FP32_BYTES + precision.bytes if runtime.stores_masters and precision.bytes < FP32_BYTES else 0.0


def tile_rows(rows: float) -> float:
    """Rows that a grouped product computes for a group of about `rows`: whole tiles, the last of which is half full.

    The number of rows differs from group to group, so on average half a tile is empty, and of small groups some have no
    rows.
    """
    return rows + TILE_ROWS / 2 if rows >= TILE_ROWS / 2 else TILE_ROWS * (1.0 - exp(-rows))


Matmul = tuple[float, float, float, float, float]
"""(rows, columns, inner, how many, rows that the kernel computes)."""


def matmuls_of(shape: LayerShape) -> list[Matmul]:
    """The layer's matrix products on one rank."""
    products = [(rows, columns, inner, 1.0, rows) for rows, columns, inner in _dense_matmuls(shape)]
    model, moe, t = shape.model, shape.model.mixture, shape.tensor
    if shape.mixture and moe is not None:
        local = max(1.0, moe.experts / shape.expert)
        # The tensor group splits either the experts' widths or their rows.
        widths, parts = (t, 1) if shape.expert_tensor else (1, t)
        each = shape.tokens * moe.per_token / local / parts
        columns = 2 if model.gated else 1
        computed = tile_rows(each)
        products.append((each, columns * moe.intermediate_size / widths, model.hidden_size, local, computed))
        products.append((each, model.hidden_size, moe.intermediate_size / widths, local, computed))
    return products


def _dense_matmuls(shape: LayerShape) -> list[tuple[float, float, float]]:
    """(rows, columns, inner) of the products of attention, a feed-forward layer or shared experts, and a router."""
    model, t, rows = shape.model, shape.tensor, float(shape.tokens)
    matmuls: list[tuple[float, float, float]] = []
    latent = model.latent
    if latent is None:
        widths = (model.heads + model.kv_heads) * model.head_size + model.kv_heads * model.value_size
        matmuls.append((rows, widths / t, model.hidden_size))
    else:
        key_size = model.head_size + latent.rope_size
        matmuls.append((rows, latent.query_rank + latent.kv_rank + latent.rope_size, model.hidden_size))
        matmuls.append((rows, model.heads * key_size / t, latent.query_rank or model.hidden_size))
        matmuls.append((rows, model.heads * (model.head_size + model.value_size) / t, latent.kv_rank))
    matmuls.append((rows, model.hidden_size, model.heads * model.value_size / t))
    columns = 2 if model.gated else 1
    moe = model.mixture
    width = model.intermediate_size if not shape.mixture or moe is None else moe.shared_intermediate_size
    if width:
        matmuls.append((rows, columns * width / t, model.hidden_size))
        matmuls.append((rows, model.hidden_size, width / t))
    if shape.mixture and moe is not None:
        matmuls.append((rows, moe.experts, model.hidden_size))
    return matmuls


def _matmul_seconds(
    m: float, n: float, k: float, count: float, computed: float, precision: Precision, fp8: bool, gpu: Accelerator
) -> float:
    element = 1.0 if fp8 else precision.bytes
    moved = element * (m * k + k * n) + precision.bytes * m * n
    flops = 2.0 * computed * n * k
    return count * (flops / (gpu.peak(precision, fp8=fp8) * gpu.sustained) + moved / (gpu.bandwidth * MEMORY_PART))


def logits_time(
    tokens: int,
    model: Architecture,
    tensor: int,
    gpu: Accelerator,
    precision: Precision,
    runtime: Framework,
    *,
    chunked: bool = False,
) -> float:
    """Seconds of the output projection and a third of its loss on one rank: of one of three passes. Never in fp8."""
    product = _matmul_seconds(tokens, model.vocab_size / tensor, model.hidden_size, 1, tokens, precision, False, gpu)
    passes = COMPILED_LOSS_PASSES if chunked and runtime.compiled else runtime.loss_passes
    moved = passes / 3.0 * tokens * model.vocab_size / tensor
    return product + moved / (gpu.bandwidth * MEMORY_PART)


def _attention_core_seconds(shape: LayerShape, gpu: Accelerator, runtime: Framework) -> tuple[float, float]:
    """Seconds of scores, softmax and weighted sum: forward and backward.

    If ranks of a context-parallel group keep consecutive parts and their queries (a plain ring), the last rank attends
    to nearly all keys, and the others wait for it.
    """
    model = shape.model
    key_size = model.head_size + (model.latent.rope_size if model.latent else 0)
    heads = model.heads / shape.tensor
    if runtime.flash:
        keys_attended = attended_keys(model, shape.sequence, causal=shape.causal)
        flops = 2.0 * shape.tokens * heads * (key_size + model.value_size) * keys_attended
        half = gpu.peak(shape.precision)
        if shape.causal and shape.context > 1 and not (runtime.balances_context and shape.balanced):
            busiest = 2.0 * shape.context / (shape.context + 1)
            slides = model.sliding_window > 0 and not model.full_attention_layers
            flops *= min(busiest, model.sliding_window / keys_attended) if slides else busiest
        forward = flops / (half * gpu.sustained * flash_part((key_size + model.value_size) / 2.0, runtime))
        return forward, 2.5 * forward
    scores = shape.tokens * heads * shape.sequence
    flops = 2.0 * scores * (key_size + model.value_size)
    multiplied = flops / (gpu.peak(shape.precision, fp8=shape.fp8) * gpu.sustained * BATCHED_PART)
    passes = 13.0 if runtime.dropout else 8.0
    moved = passes * scores / (gpu.bandwidth * MEMORY_PART)
    return multiplied + moved, 2.0 * multiplied + 1.2 * moved


def flash_part(width: float, runtime: Framework) -> float:
    """Fraction of large products' rate that flash attention with heads of this width reaches in both passes.

    Products take longer for wide heads, the softmax of a score does not. On one H200, cuDNN took 1.50 and 4.39 ms for
    the passes over 2.15e9 scores of heads of 64, and 0.54 and 1.51 ms for 0.54e9 of heads of 128. At the rate of large
    products 0.37 and 1.21 ps remain for each score in both: as much as the products of 89 numbers.
    """
    return width / (width + runtime.softmax_width) if runtime.softmax_width else FLASH_PART


def elementwise_bytes(shape: LayerShape, runtime: Framework) -> float:
    """Bytes that norms, residuals, biases, dropout and activation functions move in one forward pass."""
    model = shape.model
    rows = shape.tokens / shape.tensor if shape.sequence_parallel else shape.tokens
    residual = (22.0 if runtime.dropout else 16.0) * model.hidden_size * rows
    residual += 8.0 * model.hidden_size * rows if model.output_norms else 0.0
    moe = model.mixture
    width: float = model.intermediate_size
    if shape.mixture and moe is not None:
        width = moe.shared_intermediate_size + moe.per_token * moe.intermediate_size
        residual += 8.0 * model.hidden_size * shape.tokens * moe.per_token
    inner = (6.0 if model.gated else 4.0) * width * shape.tokens / shape.tensor
    heads = 4.0 * (model.heads + 2 * model.kv_heads) * model.head_size * shape.tokens / shape.tensor
    fused = runtime.fused or (runtime.compiled and not shape.mixture)
    return (residual + inner + heads) * (1.0 if fused else 2.0)
