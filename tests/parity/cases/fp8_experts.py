"""Routed experts in fp8: every recipe, with experts here and spread over ranks, their widths split and their shards."""

from __future__ import annotations

from typing import Any

from tests.parity.case import Case

_RECIPES: dict[str, dict[str, Any]] = {
    "tensorwise": {},
    "rowwise": {"scaling": "Rowwise"},
    "delayed": {"update": "Delayed", "history": 2},
    "static": {"update": "Static", "gradient_amax": 0.01},
}
# A rank's micro-batches are those of one process, since scales are of a micro-batch.
_LAYOUTS: list[dict[str, Any]] = [
    {"tensor": 2},
    {"tensor": 2, "sequence": False},
    {"pipeline": 2},
    {"data": 2, "expert": 2, "micro_batches": 1},
    {"data": 2, "expert": 2, "zero": 3, "micro_batches": 1},
    {"data": 2, "expert": 2, "tensor": 2, "micro_batches": 1},
    {"data": 2, "expert": 2, "tensor": 2, "sequence": False, "micro_batches": 1},
]
_SMOKE = {("tensorwise", 5), ("rowwise", 3)}

CASES = [
    Case(
        f"fp8 experts, {name}",
        layout,
        {"mixture": "Mixtral", "training": {"fp8": fp8}},
        smoke=(name, number) in _SMOKE,
        exact=False,
        tolerance=2e-2,
    )
    for name, fp8 in _RECIPES.items()
    for number, layout in enumerate(_LAYOUTS)
]
CASES += [
    Case(
        "fp8 experts, tensorwise",
        {"pipeline": 2, "data": 2, "expert": 2, "micro_batches": 4, "parallelism": {"schedule": "DualPipeV"}},
        {"mixture": "Mixtral", "layers": 4, "batch": 16, "micro_batches": 8, "training": {"fp8": {}}},
        exact=False,
        tolerance=2e-2,
    ),
    Case(
        "fp8 experts, tensorwise",
        {"data": 2, "expert": 2, "micro_batches": 1, "training": {"fp8": {}, "activation_checkpointing": "Full"}},
        {"mixture": "Mixtral", "training": {"fp8": {}}},
        exact=False,
        tolerance=2e-2,
    ),
]
