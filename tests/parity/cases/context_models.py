"""Sequences shared by ranks, family by family: what is particular to each goes through every method of attention."""

from __future__ import annotations

from typing import Any

from meshwright.api.data import Packing
from meshwright.api.parallelism import ContextMethod
from tests.parity.case import Case
from tests.parity.cases.models import GPT, LATENT, LATENT_QUERIES, LLAMA31, QWEN2, QWEN3, YARN

_METHODS = {
    ContextMethod.RING: "ring attention (contiguous)",
    ContextMethod.RING_ZIG_ZAG: "ring attention (zig-zag)",
    ContextMethod.ULYSSES: "Ulysses",
    ContextMethod.ALL_GATHER: "all-gather context parallelism",
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "GPT": GPT,
    "Qwen2": QWEN2,
    "Qwen3": QWEN3,
    "Llama 3.1": LLAMA31,
    "latent attention": LATENT_QUERIES,
    "YaRN": {**LATENT_QUERIES, **YARN},
    "DeepSeek-V2": {**LATENT, "mixture": "DeepSeek-V2"},
    "DeepSeek-V3": {**LATENT_QUERIES, "mixture": "DeepSeek-V3"},
}
_PACKED: dict[str, Any] = {"packing": Packing.DOCUMENTS}
_SMOKE = {
    ("GPT", ContextMethod.RING_ZIG_ZAG),
    ("Qwen3", ContextMethod.ULYSSES),
    ("latent attention", ContextMethod.RING),
    ("latent attention", ContextMethod.ULYSSES),
    ("DeepSeek-V3", ContextMethod.ALL_GATHER),
}
"""Looked-up positions, norms of heads that are exchanged, values narrower than keys, routers of parts of rows."""


def _case(family: str, method: ContextMethod, more: dict[str, Any] | None = None, smoke: bool = False) -> Case:
    model = _FAMILIES[family]
    vanishing = "key.bias" if model.get("positions") else "-"
    technique = f"{_METHODS[method]} x {family}"
    return Case(technique, {"context": 2, "method": method, **(more or {})}, model, smoke=smoke, vanishing=vanishing)


CASES = [_case(family, method, smoke=True) for family, method in sorted(_SMOKE)]
CASES += [
    Case(
        "heads that do not exchange x latent attention",
        {"context": 8, "method": ContextMethod.ULYSSES},
        LATENT,
        refused="`parallelism.context: 8` times `parallelism.tensor: 1` must divide `model.heads: 4`",
    ),
    Case(
        "uneven row x DeepSeek-V3",
        {"context": 2},
        {**LATENT, "mixture": "DeepSeek-V3", "length": 21},
        refused="because experts are balanced by sequence: change the length or the degree; nearest: 20, 22",
    ),
    Case(
        "capacity x context x ST-MoE",
        {"context": 2, "method": ContextMethod.ULYSSES},
        {"mixture": "ST-MoE"},
        refused="`model.mixture.capacityFactor: 1.25` needs `parallelism.context: 1`",
    ),
    Case(
        "fewer positions than tokens x context",
        {"context": 2, "method": ContextMethod.RING},
        {**GPT, "length": 32},
        refused="`model.positions: 24` must be at least `training.sequenceLength: 32`",
    ),
]
