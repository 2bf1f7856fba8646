"""The techniques whose every legal pair is in the matrix.

Techniques of one factor exclude each other: there is one schedule, one family of models. What a technique needs beside
itself (a degree, a mixture for its experts) is given unless another technique of the case gives it, see `together`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from meshwright.api.data import Packing
from meshwright.api.parallelism import ContextMethod
from meshwright.api.precision import Precision
from tests.parity.cases.models import GEMMA, GPT, LATENT, LATENT_QUERIES, LLAMA31, QWEN2, QWEN3, YARN

SCRATCH = str(Path(gettempdir()) / "meshwright-parity")
ISLANDS = 2
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Technique:
    """Arguments of `small_run`: of its layout alone, of one process too, and what holds where no other has its say."""

    factor: str
    name: str
    layout: Options = field(default_factory=dict)
    common: Options = field(default_factory=dict)
    unless: Options = field(default_factory=dict)
    tolerance: float | None = None
    """Of those that round on purpose."""


def _of(factor: str, options: Mapping[str, tuple[Options, ...]]) -> list[Technique]:
    return [Technique(factor, name, *fields) for name, fields in options.items()]


_FEW: Options = {"pipeline": 2, "micro_batches": 2}
_MANY: Options = {"pipeline": 2, "micro_batches": 4}
_WHOLE: Options = {"parallelism": {"expert_tensor": False}}
_ONE: Options = {"pipeline": 2, "micro_batches": 1}
_FOLDED: Options = {"layers": 4}
_UNCLIPPED: Options = {"clip": 0.0}
_SMALL: Options = {"bucket_elements": 4000}


def _schedule(name: str, micro_batches: Options = _FEW, **more: Any) -> Options:
    return {**micro_batches, "parallelism": {"schedule": name, **more}}


def _replicas(zero: int, data: int = 2, **options: Any) -> Options:
    return {"data": data, "zero": zero, "replicas": {**_SMALL, **options}}


def _sharing(method: ContextMethod, **more: Any) -> Options:
    return {"context": 2, "method": method, **more}


def _mixture(name: str) -> tuple[Options, Options]:
    return {}, {"mixture": name}


def _training(**options: Any) -> tuple[Options, Options]:
    return {"training": options}, {}


def _fp8(name: str, **options: Any) -> Technique:
    # Scales are of a micro-batch, so one process has the same ones.
    return Technique("products", f"fp8, {name}", {}, {"training": {"fp8": options}}, tolerance=2e-2)


_ALONE: Options = {"training": {"master_weights": False}}
"""Parameters and moments in bf16 too, rounded stochastically."""


def _islands(method: str, **options: Any) -> Options:
    return {"outer": {"method": method, "islands": ISLANDS, **options}}


def _compressed(name: str, tolerance: float | None, **options: Any) -> Technique:
    layout = {"data": 2, "replicas": {**_SMALL, "compression": name, **options}}
    return Technique("compression", f"gradients by {name}", layout, tolerance=tolerance)


TECHNIQUES: list[Technique] = [
    *_of(
        "tensor",
        {
            "tensor parallelism": ({"tensor": 2, "sequence": False},),
            "tensor and sequence parallelism": ({"tensor": 2},),
            "asynchronous tensor parallelism": ({"tensor": 2, "parallelism": {"tensor_overlap": True}},),
        },
    ),
    *_of(
        "schedule",
        {
            "naive pipeline": (_schedule("Naive"),),
            "GPipe": (_schedule("GPipe"),),
            "1F1B": (_schedule("1F1B"),),
            "interleaved 1F1B": (_schedule("Interleaved1F1B"), _FOLDED),
            "looped BFS": (_schedule("LoopedBFS"), _FOLDED),
            "ZB-H1": (_schedule("ZBH1"),),
            "ZB-H2": (_schedule("ZBH2", _MANY),),
            "ZB-V": (_schedule("ZBV"), _FOLDED),
            "automatic zero bubble": (_schedule("Automatic", _MANY, activation_limit=3),),
            "DualPipe": (_schedule("DualPipe", _MANY),),
            "DualPipeV": (_schedule("DualPipeV", _MANY), _FOLDED),
            "PipeDream": (_schedule("PipeDream", _ONE), _UNCLIPPED),
            "PipeDream-2BW": (_schedule("PipeDream2BW"), _UNCLIPPED),
        },
    ),
    *_of(
        "context",
        {
            "ring attention (contiguous)": (_sharing(ContextMethod.RING),),
            "ring attention (zig-zag)": (_sharing(ContextMethod.RING_ZIG_ZAG),),
            "Ulysses": (_sharing(ContextMethod.ULYSSES),),
            "all-gather context parallelism": (_sharing(ContextMethod.ALL_GATHER),),
            "ring x Ulysses": (_sharing(ContextMethod.RING_ULYSSES, context=4, ulysses=2), {"kv_heads": 4}),
        },
    ),
    *_of(
        "replicas",
        {
            # FSDP1's names are other names of the same code, so a pair with one is a pair with both.
            "DDP (FSDP1 NO_SHARD)": (_replicas(0, strategy="NO_SHARD"),),
            "ZeRO-1": (_replicas(1),),
            "ZeRO-2": (_replicas(2, strategy="ZeRO"),),
            "FSDP2, ZeRO-2 (FSDP1 SHARD_GRAD_OP)": (_replicas(2, strategy="SHARD_GRAD_OP"),),
            "FSDP2, ZeRO-3 (FSDP1 FULL_SHARD)": (_replicas(3, strategy="FULL_SHARD"),),
            "hpZ": (_replicas(3, 4, reshard_size=2),),
        },
    ),
    *_of("shards", {"HSDP": ({"data": 4, "replicas": {**_SMALL, "shard_size": 2}}, {}, {"zero": 3})}),
    *_of("overlap", {"reductions after backward": ({"data": 2, "replicas": {**_SMALL, "overlap": False}},)}),
    _compressed("FP16", 2e-3),
    _compressed("BF16", 2e-2),
    # A scale a bucket: with a bucket a tensor, errors are in proportion to the tensor.
    _compressed("Int8", 3e-2, bucket_elements=1),
    # Of all elements, and so exact: what is left out follows its own rule, which tests of compression hold it to.
    _compressed("TopK", None, compression_density=1.0),
    _compressed("PowerSGD", 0.3, compression_rank=24),
    *_of(
        "model",
        {
            "GPT": ({}, GPT),
            "Qwen2": ({}, QWEN2),
            "Qwen3": ({}, QWEN3),
            "Gemma 3": ({}, GEMMA),
            "Llama 3.1": ({}, LLAMA31),
            "latent attention": ({}, LATENT),
            "latent queries": ({}, LATENT_QUERIES),
            "YaRN": ({}, {**LATENT_QUERIES, **YARN}),
        },
    ),
    *_of("embeddings", {"tied embeddings": ({}, {"tie_embeddings": True})}),
    *_of("mixture", {name: _mixture(name) for name in ("Switch", "Mixtral", "ST-MoE", "DeepSeek-V2", "DeepSeek-V3")}),
    *_of("experts", {"expert parallelism": ({"data": 2, "expert": 2}, {}, {"mixture": "Mixtral"})}),
    *_of(
        "widths",
        {"experts whole in a tensor group": ({"tensor": 2, **_WHOLE}, {}, {"mixture": "Mixtral"})},
    ),
    *_of(
        "checkpointing",
        {
            "full checkpointing": _training(activation_checkpointing="Full"),
            "selective checkpointing": _training(activation_checkpointing="Selective"),
            "checkpointing of every 2 layers": _training(activation_checkpointing="EveryK", checkpoint_every=2),
            "checkpointing of sqrt(L) layers": _training(activation_checkpointing="Sqrt"),
        },
    ),
    *_of("rematerialization", {"re-materialization": ({"parallelism": {"rematerialize": True}}, {}, _FEW)}),
    *_of("activations", {"activation offload": _training(activation_offload=True)}),
    *_of(
        "optimizer",
        {
            "Muon": ({}, {"optimizer": {"name": "Muon"}}),
            "optimizer offload": ({"optimizer": {"offload": "CPU"}},),
            "optimizer offload to a file": ({"optimizer": {"offload": "File", "offload_path": SCRATCH}},),
        },
    ),
    *_of(
        "parameters",
        {
            "parameter offload": ({"data": 2, "training": {"parameter_offload": True}}, {}, {"zero": 3}),
            "parameter offload to a file": (
                {"data": 2, "training": {"parameter_offload": True, "parameter_offload_path": SCRATCH}},
                {},
                {"zero": 3},
            ),
        },
    ),
    *_of("loss", {"chunked loss": _training(loss_chunk_tokens=12)}),
    *_of(
        "dropout",
        {
            "dropout": ({}, {"training": {"dropout": 0.1}}),
            "attention dropout": ({}, {"training": {"attention_dropout": 0.2}}),
        },
    ),
    *_of(
        "packing",
        {
            "packed documents": ({}, {"packing": Packing.DOCUMENTS}),
            # In the layout only: one process computes block by block.
            "varlen attention": ({"training": {"varlen_attention": True}}, {"packing": Packing.DOCUMENTS}),
        },
    ),
    *_of("window", {"sliding window": ({}, {"sliding_window": 6})}),
    *_of(
        "adapters",
        {"LoRA": ({}, {"training": {"lora": {"rank": 3, "targets": ["Query", "Value", "Output", "Gate", "Down"]}}})},
    ),
    _fp8("tensorwise"),
    _fp8("rowwise", scaling="Rowwise"),
    _fp8("delayed", update="Delayed", history=2),
    _fp8("static", update="Static", gradient_amax=0.01),
    # In the layout only: one process gathers nothing.
    Technique(
        "products",
        "fp8, gathered in fp8",
        {"data": 2, "training": {"fp8": {"all_gather": True}}},
        {"training": {"fp8": {}}},
        {"zero": 3},
        tolerance=2e-2,
    ),
    # Sums of another order are rounded to the other side, as far as a bit of these formats goes.
    Technique("precision", "bf16", {}, {"precision": Precision.BF16}, tolerance=5e-2),
    Technique("precision", "fp16", {}, {"precision": Precision.FP16}, tolerance=1e-2),
    Technique("precision", "bf16 alone", {}, {"precision": Precision.BF16, **_ALONE}, tolerance=5e-2),
    *_of(
        "islands",
        {
            # Local SGD is the same code with equal weights, so a pair with one is a pair with both.
            "federated averaging": (_islands("FedAvg", every_steps=3),),
            "DiLoCo": (_islands("DiLoCo", every_steps=1, learning_rate=0.6, momentum=0.8),),
            "asynchronous SGD": (_islands("AsyncSGD", every_steps=3, staleness=1),),
        },
    ),
    *_of("accumulation", {"gradient accumulation": ({}, {}, {"micro_batches": 2})}),
]
BY_NAME = {technique.name: technique for technique in TECHNIQUES}
LATER = (frozenset({"varlen attention", "fp8, gathered in fp8", "sliding window"}), frozenset({"Gemma 3"}))
"""Techniques whose pairs have rows of their own, after those of all others: adding one changes no row that was there,
nor the name under which its numbers are recorded. Those of a set come after those of the sets before it.
"""


def later_than(generation: int) -> frozenset[str]:
    """The techniques of all sets of `LATER` but the first `generation`."""
    return frozenset[str]().union(*LATER[generation:])
