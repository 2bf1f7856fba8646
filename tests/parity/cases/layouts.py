"""Data, tensor and pipeline parallelism, ZeRO, and what of them goes together."""

from __future__ import annotations

from typing import Any

from tests.parity.case import Case

_LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("data parallelism", {"data": 2}),
    ("data parallelism", {"data": 4}),
    ("ZeRO-2 (FSDP2)", {"data": 2, "zero": 2}),
    ("ZeRO-3 (FSDP2)", {"data": 2, "zero": 3}),
    ("tensor parallelism", {"tensor": 2, "sequence": False}),
    ("tensor and sequence parallelism", {"tensor": 2}),
    ("1F1B", {"pipeline": 2}),
    ("1F1B", {"pipeline": 3, "micro_batches": 4}),
    ("tensor x pipeline", {"tensor": 2, "pipeline": 2, "micro_batches": 4}),
    ("tensor x data", {"tensor": 2, "data": 2}),
    ("tensor x ZeRO-3", {"tensor": 2, "data": 2, "zero": 3}),
    ("pipeline x data", {"pipeline": 2, "data": 2}),
    ("pipeline x ZeRO-2", {"pipeline": 2, "data": 2, "zero": 2}),
    ("pipeline x ZeRO-3", {"pipeline": 2, "data": 2, "zero": 3}),
    ("tensor x pipeline x data", {"tensor": 2, "pipeline": 2, "data": 2}),
    ("tensor x pipeline x ZeRO-3", {"tensor": 2, "pipeline": 2, "data": 2, "zero": 3}),
]

CASES = [Case(technique, layout, smoke=True) for technique, layout in _LAYOUTS]
CASES += [
    Case("tied embeddings", {"data": 2, "zero": 3}, {"tie_embeddings": True}, smoke=True),
    Case("tied embeddings", {"tensor": 2}, {"tie_embeddings": True}, smoke=True),
    Case("indivisible heads", {"tensor": 3}, refused="`model.heads: 4`"),
    Case("more stages than layers", {"pipeline": 4, "micro_batches": 4}, refused="`parallelism.pipeline: 4`"),
]
