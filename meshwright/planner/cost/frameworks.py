"""Properties of training frameworks: bytes per parameter, supported kernels, overlap of communication.

An estimate is for a runtime on an accelerator. The default is Meshwright's runtime. The others are those of the
published runs that the constants are calibrated with, and that a `runtime.command` job may use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from meshwright.planner.cost.comm_groups import RankOrder
from meshwright.planner.units import FP32_BYTES, GIB

ASYNC_TENSOR_OVERLAP = 0.5
"""Fraction of tensor parallelism's communication that its own products hide, as measured in torchtitan's runs."""


@dataclass(frozen=True, slots=True)
class Framework:
    """One framework."""

    name: str
    family: str = ""
    """The runtime whose constants it shares. Default: its name."""
    weights: float = 2.0
    """Bytes of a parameter as compute uses it."""
    gradients: float = FP32_BYTES
    """Bytes of a parameter's accumulated gradient."""
    optimizer: float = 12.0
    """Bytes of a parameter's master copy and optimizer moments."""
    reduced: float = FP32_BYTES
    """Bytes of a gradient as it is reduced."""
    sharded_weights: float = 0.0
    """Bytes of a parameter's shard with ZeRO-3, without its master copy. 0 if the master copy is the shard."""
    reduces_every_micro_batch: bool = False
    """Whether ZeRO-2 scatters gradients after every micro-batch instead of accumulating full gradients."""
    flash: bool = True
    """Whether attention does not store the score matrix."""
    dropout: bool = False
    """Whether dropout masks are stored."""
    fused: bool = True
    """Whether element-wise operations are fused with their neighbors."""
    compiled: bool = False
    """Whether torch.compile compiles layers. It fuses element-wise operations, and computes again what norms and
    activation functions would store in addition to their inputs and the inputs of products."""
    norm_input: float = 2.0
    """Bytes per element of the input that a norm stores."""
    selective_part: float = 1.0
    """Fraction of a layer's bytes that selective recomputation stores, without attention's scores (torchtitan: every
    second product).
    """
    kernels: int = 25
    """Kernels that one layer's forward pass launches. A stored score matrix and dropout need many small ones."""
    balances_context: bool = True
    """Whether context parallelism splits a sequence so that causal attention costs the same on every rank."""
    loss_bytes: float = 12.0
    """Bytes per logit: its copies in the loss."""
    split_loss_bytes: float = 12.0
    """The same if tensor parallelism splits the vocabulary."""
    loss_passes: float = 24.0
    """Bytes of memory traffic per logit: what the loss and its gradient read and write in passes of their own."""
    softmax_width: float = 0.0
    """Width of a head at which the softmax of flash attention takes as long as its products. Where nobody has measured
    it, 0: attention then has one rate for all widths."""
    keeps_gathered: bool = False
    """Whether sequence parallelism stores gathered inputs for the backward pass instead of gathering them again."""
    gathers_stage_once: bool = False
    """Whether ZeRO-3 in a pipeline gathers an entire stage per step instead of one layer at a time."""
    stores_masters: bool = False
    """Whether parameters are stored as masters and cast for each micro-batch, and `MemoryOptions` matter. Only
    Meshwright's runtime does this."""
    keeps_normed: bool = False
    """Whether a norm also stores its output, in the compute format, and one statistic per token."""
    frees_halfway: bool = False
    """Whether the first half of a backward pass frees what the second half does not need."""
    selects_products: bool = False
    """Whether selective recomputation stores the outputs of matrix products and attention, instead of all but
    scores."""
    copies_routed: bool = False
    """Whether every rank of a tensor group has full copies of the tokens for experts, if it does not spread them."""
    ring_gradients: float = 0.0
    """Bytes per element of the gradients of other ranks' keys and values during ring attention."""
    fp8_weights: float = 2.0
    """Bytes of a parameter's fp8 copies, as it is and transposed, if a step quantizes weights once."""
    keeps_fp8: bool = True
    """Whether fp8 products store their inputs in fp8 for the backward pass."""
    quantizes_each: bool = False
    """Whether every fp8 product stores its own quantized input, also if several products have the same input."""
    fp8_in_graph: bool = False
    """Whether the graphs of compiled layers contain their fp8 products. The compiler then stores neither quantized
    inputs nor copies of weights: it quantizes both again, in the kernels that lay them out for the backward pass."""
    accumulation: float = 0.0
    """Bytes of memory traffic by which adding the gradient of an expert's weight to its accumulator exceeds writing it
    once, for each micro-batch."""
    adds_gradients: float = 0.0
    """Bytes of memory traffic per parameter of a pass of its own that adds a micro-batch's gradients to the accumulated
    ones. 0 if the backward pass's products add them, or do so in its shadow."""
    gathered_tensors: int = 0
    """Tensors of a layer whose parts ZeRO copies one by one, for each replica, after it gathered the updated ones. 0 if
    it gathers into the parameters or moves large parts."""
    overlap_gradients: float = 0.8
    """Fraction of the gradient reduction that a long enough backward pass hides."""
    overlap_tensor: float = 0.0
    """Fraction of tensor parallelism's communication that its own products hide."""
    sliced_sends: bool = True
    """Whether each tensor-parallel rank sends its slice to the next stage, without sequence parallelism too."""
    overlap_pipeline: bool = False
    """Whether sends between stages hide behind computation."""
    overlap_experts: float = 0.0
    """Fraction of the experts' all-to-all that other computation hides, whatever the schedule."""
    sums_in_nvlink_switches: bool = True
    """Whether NCCL may sum in NVLink's switches (NVLS). torch turns that off for deterministic kernels."""
    sends_once_per_node: bool = False
    """Whether a token crosses the network once for all of its experts on a node, which then forwards it (DeepEP).
    Otherwise each of its experts gets a copy."""
    fp8_dispatch: bool = True
    """Whether tokens travel to their experts in fp8 if products are in fp8."""
    partitioned_checkpoints: bool = False
    """Whether the stored input of a recomputed layer is split over the tensor-parallel group and gathered again."""
    order: RankOrder = RankOrder.DATA_INNER
    """The order in which ranks fill nodes."""
    context: float = 1.5 * GIB
    """Bytes of the CUDA context, libraries and communication buffers on every rank."""
    fragmentation: float = 0.05
    """Fraction of allocated memory that is lost to fragmentation."""

    def __hash__(self) -> int:
        """Hash only the name, which is enough and fast: runtimes are part of many keys."""
        return hash(self.name)


_FRAMEWORKS = (
    Framework(
        "meshwright",
        order=RankOrder.PIPELINE_INNER,
        norm_input=FP32_BYTES,
        fused=False,
        # Cast to fp32 (2 + 4), largest (4), difference (8), exponential (8), sum (4), division (8), cast back (4 + 2).
        loss_passes=44.0,
        softmax_width=89.0,
        keeps_gathered=True,
        stores_masters=True,
        keeps_normed=True,
        frees_halfway=True,
        selects_products=True,
        copies_routed=True,
        fp8_dispatch=False,
        accumulation=10.0,
        ring_gradients=FP32_BYTES,
        fp8_weights=0.0,
        quantizes_each=True,
    ),
    Framework("megatron-lm", flash=False, dropout=True, kernels=60, overlap_gradients=0.0),
    Framework(
        "megatron-deepspeed",
        flash=False,
        dropout=True,
        kernels=60,
        gradients=2.0,
        reduced=2.0,
        sharded_weights=2.0,
        reduces_every_micro_batch=True,
        overlap_gradients=0.0,
        partitioned_checkpoints=True,
        context=5.0 * GIB,
    ),
    Framework(
        "megatron-core",
        overlap_tensor=0.5,
        overlap_pipeline=True,
        overlap_gradients=0.9,
        overlap_experts=0.3,
        accumulation=6.0,
    ),
    Framework(
        "torchtitan",
        order=RankOrder.PIPELINE_INNER,
        selective_part=0.44,
        loss_bytes=13.0,
        split_loss_bytes=18.0,
        gathers_stage_once=True,
        fp8_weights=0.0,
        keeps_fp8=False,
        balances_context=False,
        fragmentation=0.07,
    ),
    Framework(
        "nanotron",
        gradients=6.0,
        adds_gradients=10.0,
        gathered_tensors=6,
        keeps_gathered=True,
        overlap_gradients=0.5,
        context=0.5 * GIB,
        fragmentation=0.02,
    ),
    Framework("zero-bubble", flash=False, dropout=True, kernels=60, fragmentation=0.0),
)

_TITAN = next(runtime for runtime in _FRAMEWORKS if runtime.name == "torchtitan")
_MEGATRON_CORE = next(runtime for runtime in _FRAMEWORKS if runtime.name == "megatron-core")
_VARIANTS = (
    replace(_TITAN, name="torchtitan-async", overlap_tensor=ASYNC_TENSOR_OVERLAP, family="torchtitan"),
    replace(_TITAN, name="torchtitan-eager", fused=False, kernels=40, family="torchtitan"),
    replace(_FRAMEWORKS[2], name="vtrain-single"),
    replace(_MEGATRON_CORE, name="megatron-core-deepep", sends_once_per_node=True, family="megatron-core"),
)

FRAMEWORKS: Mapping[str, Framework] = MappingProxyType({runtime.name: runtime for runtime in _FRAMEWORKS + _VARIANTS})
