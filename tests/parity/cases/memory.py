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

_OFFLOADED: dict[str, Any] = {"optimizer": {"offload": "CPU"}}
_DROPOUT: dict[str, Any] = {"training": {"dropout": 0.1, "attention_dropout": 0.2}}
_RECOMPUTED: dict[str, Any] = {"training": {**_DROPOUT["training"], "activation_checkpointing": "Full"}}
_MUON: dict[str, Any] = {"optimizer": {"name": "Muon"}}

_SAVED: list[tuple[str, dict[str, Any]]] = [
    ("full activation checkpointing", {"activation_checkpointing": "Full"}),
    ("selective activation checkpointing", {"activation_checkpointing": "Selective"}),
    ("checkpointing of every 2 layers", {"activation_checkpointing": "EveryK", "checkpoint_every": 2}),
    ("checkpointing of sqrt(L) layers", {"activation_checkpointing": "Sqrt"}),
    ("activation offload", {"activation_offload": True}),
    ("chunked loss", {"loss_chunk_tokens": 24}),
    ("checkpointing and offload", {"activation_checkpointing": "EveryK", "activation_offload": True}),
]


def _exact(technique: str, training: dict[str, Any], smoke: set[int]) -> list[Case]:
    """The technique in every layout, compared with one process that does not use it."""
    return [
        Case(f"{technique}, {name}", {**layout, "training": training}, smoke=number in smoke)
        for number, (name, layout) in enumerate([("one process", {}), *_LAYOUTS])
        if number in smoke
    ]


CASES: list[Case] = [
    Case(
        "tied embeddings, chunked loss", {"tensor": 2, "training": {"loss_chunk_tokens": 24}}, {"tie_embeddings": True}
    ),
    *(
        Case(f"optimizer state in main memory, {name}", {**layout, **_OFFLOADED}, smoke=True)
        for number, (name, layout) in enumerate(_LAYOUTS)
        if number == 3
    ),
    *(
        Case(f"Muon, {name}", layout, _MUON, smoke=True)
        for number, (name, layout) in enumerate(_LAYOUTS)
        if number in (0, 3)
    ),
]
CASES += [
    Case(f"dropout, {name}", layout, _DROPOUT, smoke=True)
    for number, (name, layout) in enumerate(_LAYOUTS)
    if number in (0, 1, 2, 5)
]
CASES += [
    Case("dropout, checkpointing", {**layout, **_RECOMPUTED}, _DROPOUT, smoke=number == 0)
    for number, (_, layout) in enumerate(_LAYOUTS)
    if number == 0
]
CASES += [
    Case("parameter offload", {"data": 2, "zero": 3, "training": {"parameter_offload": True}}, smoke=True),
    Case("parameter offload", {"pipeline": 2, "data": 2, "zero": 2, "training": {"parameter_offload": True}}),
    Case(
        "parameter offload, one replica",
        {"training": {"parameter_offload": True}},
        refused="`training.parameterOffload: true` needs FSDP over at least two ranks",
    ),
    Case(
        "parameter offload, sequence parallelism",
        {"tensor": 2, "data": 2, "zero": 3, "training": {"parameter_offload": True}},
    ),
    Case(
        "parameter offload, one replica of an island",
        {
            "data": 2,
            "zero": 3,
            "outer": {"method": "DiLoCo", "islands": 2, "every_steps": 1},
            "training": {"parameter_offload": True},
        },
        refused="so that at least two ranks (of each island with `training.outer`)",
    ),
    # Compiling takes half a minute: one row, and it is in no quick run.
    Case("torch.compile", {"data": 2, "zero": 3, "training": {"compile": True}}, {"layers": 2}, exact=False),
    Case("dropout, 4 micro-batches", {"micro_batches": 4}, _DROPOUT),
    Case(
        "attention dropout, context parallelism",
        {"context": 2, "training": {"attention_dropout": 0.1}},
        refused="`training.attentionDropout: 0.1`",
    ),
    Case(
        "Muon, no master weights",
        {"precision": "bf16", "optimizer": {"name": "Muon"}, "training": {"master_weights": False}},
        refused="`training.optimizer.name: Muon`",
    ),
    Case("no master weights, fp32", {"training": {"master_weights": False}}, refused="`training.masterWeights: false`"),
    Case(
        "Muon, offload", {"optimizer": {"name": "Muon", "offload": "CPU"}}, refused="`training.optimizer.offload: CPU`"
    ),
    Case("offload, no path", {"optimizer": {"offload": "File"}}, refused="`training.optimizer.offloadPath`"),
]
# Products round to 3 bits, so a number that rounding puts on the other side shows: 1 in 16 of an element.
_FP8: list[tuple[str, dict[str, Any]]] = [
    ("fp8, tensorwise", {}),
    ("fp8, rowwise", {"scaling": "Rowwise"}),
    ("fp8, delayed", {"update": "Delayed", "history": 2}),
    ("fp8, static", {"update": "Static", "gradient_amax": 0.01}),
]
# The micro-batches are those of one process, since scales are of a micro-batch.
_FP8_LAYOUTS: list[dict[str, Any]] = [
    {"tensor": 2},
    {"tensor": 2, "sequence": False},
    {"data": 2, "zero": 3, "micro_batches": 1},
    {"tensor": 2, "pipeline": 2},
]
CASES += [
    Case(technique, layout, {"training": {"fp8": fp8}}, smoke=number == index, exact=False, tolerance=2e-2)
    for index, (technique, fp8) in enumerate(_FP8)
    for number, layout in enumerate(_FP8_LAYOUTS)
]
_GATHERED: list[dict[str, Any]] = [
    {"data": 2, "zero": 3, "micro_batches": 1},
    {"data": 2, "tensor": 2, "zero": 3, "micro_batches": 1},
    {"data": 2, "pipeline": 2, "zero": 2, "micro_batches": 1},
]
CASES += [
    Case(
        "fp8, gathered in fp8",
        {**layout, "training": {"fp8": {"all_gather": True}}},
        {"training": {"fp8": {}}},
        smoke=number == 0,
        exact=False,
        tolerance=2e-2,
    )
    for number, layout in enumerate(_GATHERED)
]
CASES += [
    Case(f"fp8, gathered in fp8, {name}", layout, refused="`training.fp8.allGather: true`")
    for name, layout in {
        "rows": {"data": 2, "zero": 3, "training": {"fp8": {"scaling": "Rowwise", "all_gather": True}}},
        "delayed": {"data": 2, "zero": 3, "training": {"fp8": {"update": "Delayed", "all_gather": True}}},
        "no FSDP": {"data": 2, "zero": 1, "training": {"fp8": {"all_gather": True}}},
        "hpZ": {"data": 4, "zero": 3, "replicas": {"reshard_size": 2}, "training": {"fp8": {"all_gather": True}}},
        "offload": {"data": 2, "zero": 3, "training": {"fp8": {"all_gather": True}, "parameter_offload": True}},
    }.items()
]
for _number, (_technique, _training) in enumerate(_SAVED):
    CASES += _exact(_technique, _training, {1 + _number % 5})
