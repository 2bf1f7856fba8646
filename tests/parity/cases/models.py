"""Families of models, each in the layouts that split what is particular to it."""

from __future__ import annotations

from typing import Any

from tests.parity.case import Case

GPT: dict[str, Any] = {
    "gated": False,
    "activation": "GELUTanh",
    "norm": "LayerNorm",
    "biases": True,
    "positions": 24,
    "kv_heads": 4,
}
QWEN2: dict[str, Any] = {"attention_biases": True}
QWEN3: dict[str, Any] = {"query_key_norms": True, "head_size": 16, "value_size": 12}
GEMMA: dict[str, Any] = {
    "output_norms": True,
    "embedding_factor": 5.0,
    "query_key_norms": True,
    "activation": "GELUTanh",
    "tie_embeddings": True,
    "sliding_window": 6,
    "full_attention_every": 2,
    "window_rope_theta": 100.0,
    "rope_scaling": {"kind": "Linear", "factor": 4.0},
}
LLAMA31: dict[str, Any] = {"rope_scaling": {"factor": 8.0, "original_length": 8}}
YARN: dict[str, Any] = {
    "rope_scaling": {
        "kind": "YaRN",
        "factor": 4.0,
        "original_length": 64,
        "high_frequency_factor": 8.0,
        "score_factor": 1.3,
    }
}
LATENT: dict[str, Any] = {"kv_heads": 4, "latent": {"kv_rank": 12, "rope_size": 4}}
LATENT_QUERIES: dict[str, Any] = {
    "kv_heads": 4,
    "value_size": 6,
    "latent": {"kv_rank": 12, "rope_size": 4, "query_rank": 20},
}

_FAMILIES = {
    "GPT": GPT,
    "GPT with tied embeddings": {**GPT, "tie_embeddings": True},
    "attention biases (Qwen2)": QWEN2,
    "query and key norms (Qwen3)": QWEN3,
    "rotary scaling (Llama 3.1)": LLAMA31,
    "Gemma 3": GEMMA,
    "latent attention": LATENT,
    "latent attention with latent queries": LATENT_QUERIES,
}
_LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tensor": 2, "sequence": False},
    "tp-sp": {"tensor": 2},
    "pp": {"pipeline": 2},
    "dp": {"data": 2},
    "zero2": {"data": 2, "zero": 2},
    "zero3": {"data": 2, "zero": 3},
    "tp-sp-zero3": {"tensor": 2, "data": 2, "zero": 3},
    "tp-pp-dp": {"tensor": 2, "pipeline": 2, "data": 2, "sequence": False},
    "tp-sp-pp-zero2": {"tensor": 2, "pipeline": 2, "data": 2, "zero": 2},
}
_LORA: dict[str, Any] = {
    "training": {"lora": {"rank": 3, "targets": ["Query", "Key", "Value", "Output", "Gate", "Up", "Down"]}}
}
_SMOKE = {
    ("GPT", "tp"),
    ("GPT", "tp-sp"),
    ("GPT", "pp"),
    ("GPT", "zero3"),
    ("GPT with tied embeddings", "tp-sp"),
    ("attention biases (Qwen2)", "tp-sp-zero3"),
    ("query and key norms (Qwen3)", "tp"),
    ("query and key norms (Qwen3)", "tp-sp"),
    ("rotary scaling (Llama 3.1)", "tp-sp"),
    ("Gemma 3", "tp"),
    ("Gemma 3", "tp-sp"),
    ("Gemma 3", "pp"),
    ("Gemma 3", "zero3"),
    ("latent attention", "tp"),
    ("latent attention", "tp-sp"),
    ("latent attention with latent queries", "tp-sp-zero3"),
    ("latent attention with latent queries", "pp"),
}

CASES = [
    Case(family, layout, model, smoke=(family, name) in _SMOKE, vanishing="key.bias" if model.get("positions") else "-")
    for family, model in _FAMILIES.items()
    for name, layout in _LAYOUTS.items()
    if (family, name) in _SMOKE
]
CASES += [
    Case("rotary scaling (YaRN)", layout, {**LATENT_QUERIES, **YARN}, smoke=name == "tp-sp")
    for name, layout in _LAYOUTS.items()
    if name == "tp-sp"
]
CASES += [
    Case("LoRA", layout, {**_LORA, **model}, smoke=not model and name in ("tp", "tp-sp", "zero3", "pp"))
    for model in ({}, {"attention_biases": True, "query_key_norms": True})
    for name, layout in _LAYOUTS.items()
    if name in (("tp", "tp-sp", "zero3", "pp") if not model else ("tp-sp-zero3",))
]
CASES += [
    Case(
        "latent attention with a mixture (DeepSeek)",
        layout,
        {**LATENT, "mixture": "DeepSeek-V2"},
        smoke=name == "tp-sp",
    )
    for name, layout in {"tp-sp": {"tensor": 2}, "tp-ep": {"tensor": 2, "data": 2, "expert": 2}}.items()
]
CASES += [
    Case("biases without LayerNorm", {}, {"biases": True}, refused="`model.norm: LayerNorm`"),
    Case("fewer positions than tokens", {}, {**GPT, "positions": 8}, refused="`model.positions: 8`"),
    Case(
        "odd rotary width",
        {},
        {"head_size": 7},
        refused="`model.headSize: 7` must be even, because rotary positions rotate pairs of elements; nearest: 6, 8",
    ),
    Case(
        "latent attention with grouped heads",
        {},
        {**LATENT, "kv_heads": 2},
        refused="`model.latent` is not supported with `kvHeads` below `heads`",
    ),
    Case("rotary scaling of learned positions", {}, {**GPT, **LLAMA31}, refused="`model.ropeScaling`"),
]
