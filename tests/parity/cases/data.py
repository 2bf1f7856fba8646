"""Every way of keeping replicas equal, alone and with tensor and pipeline parallelism, accumulation, uneven shards."""

from __future__ import annotations

from typing import Any

from meshwright.api.precision import Precision
from tests.parity.case import Case

_SMALL = {"bucket_elements": 4000}
"""Several buckets, and tensors larger than one."""
_UNEVEN = {"intermediate_size": 45, "vocab_size": 259}


def _of(technique: str, zero: int, smoke: bool = True, **replicas: Any) -> list[Case]:
    """The technique alone, with what does not divide and, in smoke, in every dimension at once."""
    options = {"zero": zero, "replicas": {**_SMALL, **replicas}}
    return [
        Case(technique, {"data": 2, **options}, smoke=smoke),
        Case(technique, {"data": 3, **options, "micro_batches": 2}, {**_UNEVEN, "batch": 12}),
        *([Case(technique, {"data": 2, "pipeline": 2, "tensor": 2, "micro_batches": 4, **options})] if smoke else []),
    ]


def _hybrid(technique: str, zero: int, **replicas: Any) -> list[Case]:
    options = {"zero": zero, "replicas": {**_SMALL, "shard_size": 2, **replicas}}
    return [
        Case(technique, {"data": 4, **options}, smoke=True),
        Case(technique, {"data": 4, "micro_batches": 1, **options}, {**_UNEVEN, "clip": 0.1}),
    ]


def _sharded_masters(zero: int, gradients: str) -> list[Case]:
    """Masters in own rows, against one process whose parameters are masters; in every dimension and schedule."""
    technique = f"ZeRO-{zero}, sharded masters, {gradients} gradients"
    options: dict[str, Any] = {
        "zero": zero,
        "replicas": {**_SMALL, "strategy": "ZeRO"},
        "training": {"sharded_masters": {"gradients": gradients}},
    }
    rounded: dict[str, Any] = {"exact": False, "tolerance": 5e-2}
    bf16 = {"precision": Precision.BF16}
    layouts: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"data": 2}, {}),
        ({"data": 3, "micro_batches": 2}, {**_UNEVEN, "batch": 12}),
        ({"data": 2, "pipeline": 2, "tensor": 2, "micro_batches": 4}, {}),
        ({"context": 2, "pipeline": 2, "parallelism": {"schedule": "ZBH1"}}, {}),
        ({"data": 2, "pipeline": 2, "micro_batches": 4, "parallelism": {"schedule": "ZBV"}}, {"layers": 4}),
    ]
    return [
        Case(technique, {**layout, **options}, {**common, **bf16}, smoke=number == 0, **rounded)
        for number, (layout, common) in enumerate(layouts)
    ]


def _reducing_each() -> list[Case]:
    """Gradients of each micro-batch reduced: accumulated, in flight, split, over copies of shards, and of experts."""
    uneven = {**_UNEVEN, "batch": 12}
    layouts: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"data": 2, "zero": 3, "micro_batches": 4}, {}),
        ({"data": 3, "zero": 2, "micro_batches": 2}, uneven),
        ({"data": 4, "zero": 3, "replicas": {"shard_size": 2}, "micro_batches": 2}, _UNEVEN),
        ({"data": 2, "pipeline": 2, "zero": 3, "tensor": 2, "micro_batches": 4}, {}),
        ({"data": 2, "pipeline": 2, "zero": 2, "micro_batches": 4}, {}),
        ({"data": 2, "pipeline": 2, "zero": 3, "micro_batches": 4, "parallelism": {"schedule": "ZBH1"}}, {}),
        ({"data": 2, "pipeline": 2, "zero": 2, "micro_batches": 4, "parallelism": {"schedule": "ZBV"}}, {"layers": 4}),
        (
            {
                **{"data": 4, "pipeline": 2, "zero": 3, "replicas": {"shard_size": 2}},
                **{"micro_batches": 2, "parallelism": {"schedule": "ZBH1"}},
            },
            _UNEVEN,
        ),
        ({"data": 4, "expert": 2, "zero": 3}, {"mixture": "Mixtral"}),
        (
            {"data": 2, "expert": 2, "pipeline": 2, "zero": 3, "parallelism": {"schedule": "ZBH1"}},
            {"mixture": "Mixtral"},
        ),
        ({"data": 2, "pipeline": 2, "zero": 3, "micro_batches": 4, "parallelism": {"schedule": "Automatic"}}, {}),
        ({"data": 2, "zero": 3, "training": {"parameter_offload": True}}, {}),
    ]
    technique, option = "FSDP2, gradients reduced every micro-batch", {"reduce_every_micro_batch": True}
    pipelined: dict[str, Any] = {"data": 2, "pipeline": 2, "zero": 3, "micro_batches": 4, "replicas": option}
    return [
        *(
            Case(
                technique,
                {**layout, "replicas": {**layout.get("replicas", {}), **option}},
                common,
                smoke=number < 2,
            )
            for number, (layout, common) in enumerate(layouts)
        ),
        *(
            Case(
                f"{technique}, in bf16",
                {**pipelined, "parallelism": {"schedule": schedule}},
                {"precision": Precision.BF16},
                exact=False,
                tolerance=5e-2,
            )
            for schedule in ("1F1B", "ZBH1")
        ),
    ]


CASES = [
    *_of("DDP with buckets and overlap", 0),
    *_of("DDP without overlap", 0, smoke=False, overlap=False),
    *_of("ZeRO-1", 1),
    *_of("ZeRO-1 without overlap", 1, smoke=False, overlap=False),
    *_of("ZeRO-2", 2, strategy="ZeRO"),
    *_sharded_masters(1, "bf16"),
    *_sharded_masters(2, "fp32"),
    *_of("FSDP2, ZeRO-2", 2, smoke=False, strategy="FSDP"),
    *_of("FSDP1 NO_SHARD", 0, smoke=False, strategy="NO_SHARD"),
    *_of("FSDP1 SHARD_GRAD_OP", 2, smoke=False, strategy="SHARD_GRAD_OP"),
    *_of("FSDP1 FULL_SHARD", 3, smoke=False, strategy="FULL_SHARD"),
    *_hybrid("HSDP (ZeRO-1)", 1),
    *_hybrid("HSDP (ZeRO-2)", 2, strategy="ZeRO"),
    *_hybrid("HSDP (FSDP2, HYBRID_SHARD)", 3, strategy="HYBRID_SHARD"),
    *_hybrid("HSDP (FSDP2, HYBRID_SHARD_ZERO2)", 2, strategy="HYBRID_SHARD_ZERO2"),
    *_reducing_each(),
    Case("hpZ", {"data": 4, "zero": 3, "replicas": {"reshard_size": 2}}, smoke=True),
    Case("hpZ", {"data": 4, "zero": 3, "micro_batches": 1, "replicas": {"reshard_size": 2}}, _UNEVEN),
]

CASES += [
    Case(
        f"gradients in {name}",
        {"data": 2, "replicas": {**buckets, "compression": name}},
        exact=False,
        tolerance=tolerance,
    )
    # Int8 has one scale a bucket: the error of a tensor is held where each is its own.
    for name, tolerance, buckets in (
        ("FP16", 2e-3, _SMALL),
        ("BF16", 2e-2, _SMALL),
        ("Int8", 3e-2, {"bucket_elements": 1}),
    )
]

_REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "DDP with shards",
        {"data": 2, "zero": 3, "replicas": {"strategy": "DDP"}},
        "must match `parallelism.zeroStage: 3`: DDP",
    ),
    (
        "ZeRO without a stage",
        {"data": 2, "replicas": {"strategy": "ZeRO"}},
        "must match `parallelism.zeroStage: 0`: DDP",
    ),
    (
        "HSDP without a size",
        {"data": 4, "zero": 3, "replicas": {"strategy": "HYBRID_SHARD"}},
        "dataParallel.shardSize`",
    ),
    ("HSDP without shards", {"data": 4, "replicas": {"shard_size": 2}}, "needs `zeroStage` 1, 2 or 3"),
    (
        "HSDP that does not divide",
        {"data": 4, "zero": 3, "replicas": {"shard_size": 3}},
        "`parallelism.dataParallel.shardSize: 3` must divide `replicas: 4`, or the number of replicas of an "
        "island with `training.outer`; nearest: 2, 4",
    ),
    ("hpZ without ZeRO-3", {"data": 4, "zero": 2, "replicas": {"reshard_size": 2}}, "needs `parallelism.zeroStage: 3`"),
    (
        "hpZ with tensor parallelism",
        {"data": 4, "tensor": 2, "zero": 3, "replicas": {"reshard_size": 2}},
        "needs `parallelism.tensor: 1`",
    ),
    (
        "hpZ in a pipeline",
        {"data": 4, "pipeline": 2, "zero": 3, "replicas": {"reshard_size": 2}},
        "`parallelism.pipeline",
    ),
    (
        "hpZ that does not divide",
        {"data": 4, "zero": 3, "replicas": {"reshard_size": 3}},
        "`parallelism.dataParallel.reshardSize: 3` must divide",
    ),
    (
        "reductions every micro-batch without FSDP",
        {"data": 2, "zero": 1, "replicas": {"reduce_every_micro_batch": True}},
        "`parallelism.dataParallel.reduceEveryMicroBatch: true` needs FSDP",
    ),
    (
        "reductions every micro-batch with DualPipe",
        {
            **{"data": 2, "pipeline": 2, "zero": 3, "micro_batches": 4, "parallelism": {"schedule": "DualPipe"}},
            "replicas": {"reduce_every_micro_batch": True},
        },
        "is not supported with the schedule `DualPipe`",
    ),
    (
        "reductions every micro-batch without master weights",
        {
            **{"data": 2, "zero": 3, "replicas": {"reduce_every_micro_batch": True}},
            **{"precision": "bf16", "training": {"master_weights": False}},
        },
        "reduceEveryMicroBatch: true` needs `training.masterWeights: true`",
    ),
    (
        "compression of shards",
        {"data": 2, "zero": 1, "replicas": {"compression": "PowerSGD"}},
        "`parallelism.dataParallel.compression: PowerSGD` needs `parallelism.zeroStage: 0`",
    ),
]
_MASTERS: dict[str, Any] = {"zero": 1, "precision": "bf16", "training": {"sharded_masters": {}}}
_FLAT_MASTERS: dict[str, Any] = {**_MASTERS, "replicas": {"strategy": "ZeRO"}}
_REFUSED += [
    (
        "sharded masters without bf16",
        {"data": 2, **_FLAT_MASTERS, "precision": "fp32"},
        "`training.shardedMasters` needs `training.precision: bf16`",
    ),
    (
        "sharded masters with FSDP",
        {"data": 2, **_MASTERS, "zero": 3},
        "`training.shardedMasters` needs `parallelism.dataParallel.strategy: ZeRO`",
    ),
    (
        "sharded masters with Muon",
        {"data": 2, **_FLAT_MASTERS, "optimizer": {"name": "Muon"}},
        "`training.shardedMasters` needs `training.optimizer.name: AdamW`",
    ),
    (
        "sharded masters with offload",
        {"data": 2, **_FLAT_MASTERS, "optimizer": {"offload": "CPU"}},
        "`training.shardedMasters` needs `training.optimizer.name: AdamW` and `training.optimizer.offload: None`",
    ),
    (
        "sharded masters with islands",
        {"data": 4, **_FLAT_MASTERS, "outer": {"method": "DiLoCo", "islands": 2, "every_steps": 3}},
        "`training.shardedMasters` is not supported with `training.outer`",
    ),
    (
        "sharded masters with older weights",
        {"data": 2, **_FLAT_MASTERS, "pipeline": 2, "clip": 0.0, "parallelism": {"schedule": "PipeDream2BW"}},
        "`parallelism.zeroStage: 1` must be 0 with `PipeDream` and `PipeDream2BW`",
    ),
]
_REFUSED += [
    (
        "islands that do not divide",
        {"data": 4, "outer": {"method": "DiLoCo", "islands": 3, "every_steps": 3}},
        "`training.outer.islands: 3` must be at least 2 and divide `replicas: 4`",
    ),
    (
        "one island",
        {"outer": {"method": "LocalSGD", "every_steps": 3}},
        "`training.outer.islands` must be at least 2 and divide `replicas: 1`",
    ),
    (
        "rounds between checkpoints",
        {"data": 2, "every": 6, "outer": {"method": "LocalSGD", "every_steps": 4}},
        "`training.outer.everySteps: 4` must divide `checkpoint.everySteps: 6` (default: 100), because islands "
        "are only equal after a round; nearest: 3, 6",
    ),
    (
        "experts over islands",
        {"data": 4, "expert": 2, "outer": {"method": "AsyncSGD", "every_steps": 3}},
        "`parallelism.expert: 2` is not supported with `training.outer`",
    ),
]
CASES += [Case(technique, layout, refused=text) for technique, layout, text in _REFUSED]
