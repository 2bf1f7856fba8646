"""Every schedule, alone and with the other dimensions; what pipelines share, split and refuse."""

from __future__ import annotations

from typing import Any

from tests.parity.case import Case

Options = dict[str, Any]

SCHEDULES: dict[str, tuple[Options, Options]] = {
    "naive pipeline": ({"schedule": "Naive"}, {}),
    "GPipe": ({"schedule": "GPipe"}, {}),
    "1F1B": ({}, {}),
    "interleaved 1F1B": ({"schedule": "Interleaved1F1B"}, {"layers": 4}),
    "looped BFS": ({"schedule": "LoopedBFS"}, {"layers": 4}),
    "ZB-H1": ({"schedule": "ZBH1"}, {}),
    "ZB-H2": ({"schedule": "ZBH2"}, {}),
    "ZB-V": ({"schedule": "ZBV"}, {"layers": 4}),
    "automatic zero bubble": ({"schedule": "Automatic", "activation_limit": 3}, {}),
    "DualPipe": ({"schedule": "DualPipe"}, {}),
    "DualPipeV": ({"schedule": "DualPipeV"}, {"layers": 4}),
}
"""(fields of `parallelism`, of the model) of each."""

COMBINED: list[tuple[str, Options]] = [
    ("x tensor x ZeRO-3", {"tensor": 2, "data": 2, "zero": 3}),
]


def _case(name: str, more: str = "", layout: Options | None = None, common: Options | None = None, **how: Any) -> Case:
    fields, model = SCHEDULES[name]
    smoke = how.pop("smoke", False)
    placed = {"pipeline": 2, "micro_batches": 4, "parallelism": {**fields, **how}, **(layout or {})}
    return Case(f"{name} {more}".strip(), placed, {**model, **(common or {})}, smoke=smoke)


CASES = [_case(name, smoke=name not in ("1F1B", "GPipe")) for name in SCHEDULES]
CASES += [_case(name, more, layout) for name in ("1F1B", "ZB-H2", "ZB-V", "DualPipeV") for more, layout in COMBINED]
CASES += [_case("1F1B", "with tied embeddings", {}, {"tie_embeddings": True}, smoke=True)]
CASES += [
    _case("ZB-H1", "x ZeRO-3 on few micro-batches", {"data": 2, "zero": 3, "micro_batches": 2}, smoke=True),
    _case("DualPipe", "with tied embeddings and ZeRO-2", {"data": 2, "zero": 2}, {"tie_embeddings": True}, smoke=True),
    _case("ZB-V", "with tied embeddings and uneven stages", {}, {"tie_embeddings": True, "layers": 7}, smoke=True),
]
CASES += [
    _case(name, "with spread experts", {"data": 2, "expert": 2, **layout}, {"mixture": mixture, **more}, smoke=smoke)
    for name, mixture, layout, more, smoke in (
        ("DualPipe", "Mixtral", {}, {}, True),
        ("DualPipe", "DeepSeek-V3", {"zero": 2}, {"layers": 4}, False),
        ("DualPipeV", "DeepSeek-V3", {}, {"layers": 4}, True),
        ("interleaved 1F1B", "DeepSeek-V3", {"zero": 3}, {"layers": 4}, False),
    )
]
FOUR: Options = {"pipeline": 4, "micro_batches": 8}
CASES += [
    _case(name, "on four ranks", FOUR, {"layers": 8}, smoke=name in ("ZB-H2", "DualPipe", "DualPipeV"))
    for name in SCHEDULES
]
CASES += [
    _case(name, "on four ranks x data", {**FOUR, "data": 2, "micro_batches": 4}, {"layers": 8})
    for name in ("1F1B", "ZB-V")
]
CASES += [
    _case("1F1B", "uneven stages by hand", {}, layer_split=[1, 2], smoke=True),
    _case("ZB-V", "uneven stages by hand", {}, {"layers": 7}, layer_split=[1, 3, 2, 1]),
    _case("interleaved 1F1B", "stages of equal work", {}, {"layers": 7}, stage_balance="Flops"),
    _case("interleaved 1F1B", "three stages a rank", {}, {"layers": 6}, virtual_stages=3),
    _case("looped BFS", "three stages a rank", {}, {"layers": 7}, virtual_stages=3),
    _case("GPipe", "with re-materialization", {}, rematerialize=True, smoke=True),
    _case("ZB-V", "with re-materialization", {}, rematerialize=True),
    _case("1F1B", "with re-materialization x ZeRO-3", {"data": 2, "zero": 3}, rematerialize=True),
    _case("ZB-H1", "with re-materialization x tensor", {"tensor": 2}, rematerialize=True),
]

_REFUSED: list[tuple[str, Options, str]] = [
    ("interleaved 1F1B", {"pipeline": 3, "layers": 6}, "multiple of `parallelism.pipeline: 3` with `Interleaved1F1B`"),
    ("interleaved 1F1B", {"layers": 3}, "at most `model.layers: 3`"),
    ("ZB-V", {"layers": 3}, "at most `model.layers: 3`"),
    ("DualPipe", {"pipeline": 3, "micro_batches": 6}, "`parallelism.pipeline: 3` must be even"),
    (
        "DualPipe",
        {"micro_batches": 2},
        "`parallelism.microBatches: 2` must be at least twice `parallelism.pipeline: 2`",
    ),
    (
        "DualPipeV",
        {"micro_batches": 2},
        "`parallelism.microBatches: 2` must be at least twice `parallelism.pipeline: 2`",
    ),
]
CASES += [
    Case(
        f"{name}, impossible",
        {"pipeline": 2, "micro_batches": 4, **SCHEDULES[name][1], "parallelism": SCHEDULES[name][0], **layout},
        refused=text,
    )
    for name, layout, text in _REFUSED
]
CASES += [
    Case(f"1F1B with {field}", {"pipeline": 2, "parallelism": {field: value}}, refused=text)
    for field, value, text in (
        ("virtual_stages", 2, "`parallelism.virtualStages: 2` is only supported with the schedule `Interleaved1F1B`"),
        ("activation_limit", 2, "`parallelism.activationLimit: 2` is only supported with the schedule `Automatic`"),
        ("layer_split", [1, 1], "`parallelism.layerSplit` must add up to `model.layers: 3`"),
    )
]
