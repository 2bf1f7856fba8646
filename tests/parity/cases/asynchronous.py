"""Techniques whose steps differ from those of one process, compared with their published definition: `definitions`."""

from __future__ import annotations

from typing import Any

from tests.parity.case import Case

_UNCLIPPED = {"clip": 0.0}
_SEVERAL: dict[str, dict[str, Any]] = {
    "two": {"data": 2},
    "tensor": {"data": 2, "tensor": 2},
    "pipeline": {"data": 2, "pipeline": 2},
    "ZeRO-3": {"data": 4, "zero": 3, "micro_batches": 1},
}


def _islands(name: str, **outer: Any) -> list[Case]:
    # Of no more than a step's samples, in parts of a micro-batch.
    return [
        Case(name, {**layout, "outer": {"islands": 2, **outer}}, smoke=layout == _SEVERAL["two"])
        for layout in _SEVERAL.values()
    ]


def _stale(name: str, schedule: str, micro_batches: int) -> list[Case]:
    options = {"parallelism": {"schedule": schedule}, "micro_batches": micro_batches}
    layouts: list[dict[str, Any]] = [
        {"pipeline": 2},
        {"pipeline": 3, "micro_batches": 4 if micro_batches > 1 else 1},
        {"pipeline": 2, "tensor": 2},
        {"pipeline": 2, "data": 2},
        {"pipeline": 2, "context": 2},
    ]
    return [Case(name, {**options, **layout}, _UNCLIPPED, smoke=layout == {"pipeline": 2}) for layout in layouts]


CASES = [
    *_islands("local SGD", method="LocalSGD", every_steps=3),
    *_islands("federated averaging", method="FedAvg", every_steps=3),
    *_islands("DiLoCo", method="DiLoCo", every_steps=1, learning_rate=0.6, momentum=0.8),
    *_islands("asynchronous SGD, staleness 0", method="AsyncSGD", every_steps=3, staleness=0),
    *_islands("asynchronous SGD, staleness 1", method="AsyncSGD", every_steps=3, staleness=1),
    *_stale("PipeDream, weights stashed", "PipeDream", 1),
    *_stale("PipeDream-2BW, weights twice", "PipeDream2BW", 2),
]
