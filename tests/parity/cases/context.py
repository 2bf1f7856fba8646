"""Sequences shared by the ranks of a context group, and rows packed with documents, with all else beside them."""

from __future__ import annotations

from typing import Any

from meshwright.api.data import Packing
from meshwright.api.parallelism import ContextMethod
from tests.parity.case import Case
from tests.parity.cases.models import LATENT, LATENT_QUERIES

_NAMES = {
    ContextMethod.RING: "ring attention (contiguous)",
    ContextMethod.RING_ZIG_ZAG: "ring attention (zig-zag)",
    ContextMethod.ULYSSES: "Ulysses",
    ContextMethod.ALL_GATHER: "all-gather context parallelism",
}
_PACKED: dict[str, Any] = {"packing": Packing.DOCUMENTS}
_VARLEN: dict[str, Any] = {"training": {"varlen_attention": True}}
"""In the layout only: one process computes block by block."""
_UNEVEN: dict[str, Any] = {"length": 21}
_UNEVEN_PAIRS: dict[str, Any] = {"length": 22}
"""Of 11 pairs of tokens: sequence parallelism over 2 ranks splits what a rank holds."""
_MIXED: dict[str, Any] = {"context": 4, "method": ContextMethod.RING_ULYSSES, "ulysses": 2}

_WINDOW: dict[str, Any] = {"sliding_window": 5}
"""Of a row of 16 tokens or more: it ends within a rank's part, and within that of the rank before."""

_EVERY_DIMENSION: list[dict[str, Any]] = [
    {"tensor": 2, "data": 2, "zero": 3},
    {"tensor": 2, "pipeline": 2},
    {"pipeline": 2, "data": 2, "zero": 3},
]


def _with(method: ContextMethod, beside: dict[str, Any], common: dict[str, Any], smoke: bool = False) -> Case:
    return Case(_NAMES[method], {"context": 2, "method": method, **beside}, common, smoke=smoke)


CASES = [_with(method, {}, common, smoke=True) for method in _NAMES for common in ({}, _PACKED)]
CASES += [_with(method, {}, _UNEVEN, smoke=method is not ContextMethod.ALL_GATHER) for method in _NAMES]
CASES += [_with(method, {}, _PACKED | _UNEVEN, smoke=method is ContextMethod.ALL_GATHER) for method in _NAMES]
# Of 4 ranks with 2 key and value heads, two share each.
CASES += [_with(method, {"context": 4}, common) for method in _NAMES for common in ({}, _PACKED | _UNEVEN)]
# Of one replica, whose shards only the ranks of its sequences share.
CASES += [_with(method, {"zero": 3}, {}) for method in _NAMES]
CASES += [_with(ContextMethod.RING_ZIG_ZAG, beside, _PACKED | _UNEVEN_PAIRS) for beside in _EVERY_DIMENSION]
CASES += [
    Case("ring x Ulysses", _MIXED | beside, common, smoke=not beside)
    for beside, common in (({}, {}), ({}, _PACKED), ({}, _UNEVEN), ({"data": 2, "zero": 3}, _UNEVEN))
]
CASES += [
    Case("ring x Ulysses", _MIXED | {"context": 6, "ulysses": 3}, {"kv_heads": 6, "heads": 6, "hidden_size": 48}),
    Case("ring x Ulysses", _MIXED | {"tensor": 2}, {"kv_heads": 4, "heads": 4}),
    Case("packed documents", {"data": 2}, _PACKED, smoke=True),
    Case("packed documents", {"pipeline": 2}, _PACKED, smoke=True),
    Case("packed documents", {"tensor": 2, "pipeline": 2, "data": 2, "zero": 3}, _PACKED),
]
CASES += [
    Case("varlen attention", {**_VARLEN, **layout}, {**_PACKED, **common}, smoke=smoke)
    for layout, common, smoke in [
        ({"data": 2}, {}, True),
        ({"tensor": 2, "pipeline": 2, "data": 2, "zero": 3}, {}, False),
        ({"pipeline": 2, "parallelism": {"rematerialize": True}}, LATENT, False),
        *(({"context": 2, "method": method}, _UNEVEN, method is ContextMethod.RING_ZIG_ZAG) for method in _NAMES),
        *(({"context": 4, "method": method}, LATENT_QUERIES, False) for method in _NAMES),
        (_MIXED, {}, False),
        ({"context": 2, "tensor": 2, "data": 2, "zero": 3}, _UNEVEN_PAIRS, False),
    ]
]
CASES += [
    Case(f"{_NAMES[method]} x sliding window", {"context": ranks, "method": method}, _WINDOW | common, smoke=smoke)
    for method in _NAMES
    for ranks, common, smoke in ((2, {}, True), (4, _PACKED | _UNEVEN, False))
]
CASES += [
    Case("sliding window", layout, _WINDOW | common, smoke=smoke)
    for layout, common, smoke in (
        ({"pipeline": 2, "context": 2}, {"full_attention_every": 2, "layers": 4}, True),
        ({"tensor": 2, "data": 2, "zero": 3}, {"full_attention_every": 2} | _PACKED, False),
        ({"tensor": 2, "data": 2, "zero": 3}, {}, False),
        ({"pipeline": 2, "parallelism": {"rematerialize": True}}, LATENT, False),
        ({"data": 2}, {"training": {"attention_dropout": 0.2}}, True),
        ({"data": 2, **_VARLEN}, _PACKED, True),
        (_MIXED, _PACKED | {"length": 32}, False),
        ({"context": 2, "method": ContextMethod.RING_ZIG_ZAG, **_VARLEN}, _PACKED | _UNEVEN, False),
    )
]
CASES += [
    Case(
        f"{_NAMES[method]} x experts",
        {"context": 2, "method": method, **beside},
        {"mixture": mixture},
        smoke=smoke,
    )
    # Experts spread over the ranks of a sequence, and over those of several.
    for method, mixture, beside, smoke in [
        (ContextMethod.RING_ZIG_ZAG, "DeepSeek-V3", {"expert": 2}, True),
        (ContextMethod.ULYSSES, "Mixtral", {"expert": 2, "tensor": 2}, False),
        (ContextMethod.ALL_GATHER, "DeepSeek-V2", {"expert": 4, "data": 2, "zero": 3}, False),
    ]
]
CASES += [
    Case("uneven row x experts", {"context": 2}, {"mixture": "Mixtral", **_UNEVEN}, refused="nearest: 20, 22"),
    Case(
        "row too short",
        {"context": 16},
        refused="`parallelism.context: 16` must leave each rank at least two tokens of `training.sequenceLength: 16`",
    ),
    Case("row too short", {"context": 6, "tensor": 2}, refused="nearest: 4"),
    Case("heads that do not exchange", {"context": 3, "method": ContextMethod.ULYSSES}, refused="nearest: 2, 4"),
    Case(
        "heads that do not exchange",
        {"context": 4, "tensor": 2, "method": ContextMethod.ULYSSES},
        refused="`parallelism.context: 4` times `parallelism.tensor: 2`",
    ),
    Case(
        "uneven inner degree",
        {"context": 4, "method": ContextMethod.RING_ULYSSES, "ulysses": 3},
        refused="and must divide `parallelism.context: 4`; nearest: 2, 4",
    ),
    Case("varlen attention without documents", {**_VARLEN, "data": 2}, refused="`data.packing: Documents`"),
    Case("balance without documents", {"data": 2, "balance": True}, refused="`data.packing: Documents`"),
]
