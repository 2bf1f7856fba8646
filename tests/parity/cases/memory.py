"""What saves memory or changes number formats on one rank, in every dimension."""

from __future__ import annotations

from typing import Any

from tests.parity.case import Case

_LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("tensor and sequence parallelism", {"tensor": 2}),
    ("1F1B", {"pipeline": 2}),
    ("data parallelism", {"data": 2}),
    ("ZeRO-2", {"data": 2, "zero": 2}),
    ("ZeRO-3", {"data": 2, "zero": 3}),
    ("tensor x pipeline x ZeRO-3", {"tensor": 2, "pipeline": 2, "data": 2, "zero": 3}),
]

_SAVED: list[tuple[str, dict[str, Any]]] = [
    ("full activation checkpointing", {"activation_checkpointing": "Full"}),
    ("selective activation checkpointing", {"activation_checkpointing": "Selective"}),
    ("checkpointing of every 2 layers", {"activation_checkpointing": "EveryK", "checkpoint_every": 2}),
    ("checkpointing of sqrt(L) layers", {"activation_checkpointing": "Sqrt"}),
    ("activation offload", {"activation_offload": True}),
    ("checkpointing and offload", {"activation_checkpointing": "EveryK", "activation_offload": True}),
]


def _exact(technique: str, training: dict[str, Any], smoke: set[int]) -> list[Case]:
    """The technique in every layout, held to one process that does without it."""
    return [
        Case(f"{technique}, {name}", {**layout, "training": training}, smoke=number in smoke)
        for number, (name, layout) in enumerate([("one process", {}), *_LAYOUTS])
    ]


CASES: list[Case] = []
for _number, (_technique, _training) in enumerate(_SAVED):
    CASES += _exact(_technique, _training, {1 + _number % 5, 5})
