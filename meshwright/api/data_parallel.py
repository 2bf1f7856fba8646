"""`spec.parallelism.dataParallel`: how replicas of the model stay equal."""

from __future__ import annotations

from enum import Enum, StrEnum, auto
from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel

Degree = Annotated[int, Field(ge=1, le=65536)]


class DataParallelStrategy(StrEnum):
    """How replicas stay equal. The names in capitals with underscores are those of torch's FSDP1."""

    DDP = "DDP"
    ZERO = "ZeRO"
    FSDP = "FSDP"
    NO_SHARD = "NO_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    FULL_SHARD = "FULL_SHARD"
    HYBRID_SHARD_ZERO2 = "HYBRID_SHARD_ZERO2"
    HYBRID_SHARD = "HYBRID_SHARD"

    @property
    def zero_stages(self) -> tuple[int, ...]:
        """The values of `zeroStage` that support it."""
        return _ZERO_STAGES[self]


_ZERO_STAGES = {
    DataParallelStrategy.DDP: (0,),
    DataParallelStrategy.ZERO: (1, 2),
    DataParallelStrategy.FSDP: (2, 3),
    DataParallelStrategy.NO_SHARD: (0,),
    DataParallelStrategy.SHARD_GRAD_OP: (2,),
    DataParallelStrategy.FULL_SHARD: (3,),
    DataParallelStrategy.HYBRID_SHARD_ZERO2: (2,),
    DataParallelStrategy.HYBRID_SHARD: (3,),
}


class DataParallelEngine(Enum):
    """An implementation of data parallelism."""

    ALL_REDUCE = auto()
    """Every replica has everything, and gradients are all-reduced (`ddp.py`)."""
    FLAT = auto()
    """Flat shards of optimizer state and gradients between steps (`zero.py`)."""
    FSDP = auto()
    """FSDP2, which gathers and frees parameters layer by layer (`fsdp.py`)."""


class GradientCompression(StrEnum):
    """How gradients are compressed before they are summed over replicas."""

    NONE = "None"
    FP16 = "FP16"
    BF16 = "BF16"
    INT8 = "Int8"
    TOP_K = "TopK"
    POWER_SGD = "PowerSGD"


class DataParallelSpec(ApiModel):
    """How replicas of the model stay equal."""

    strategy: DataParallelStrategy | None = None
    """`DDP` (`zeroStage` 0): gradients are summed in buckets during the backward pass. `ZeRO` (1, 2): flat shards, a
    reduce-scatter of gradients and an all-gather of updated parameters. `FSDP` (2, 3): FSDP2, layer by layer. Or a
    name of FSDP1: `NO_SHARD` (0), `SHARD_GRAD_OP` (2), `FULL_SHARD` (3), and with `shardSize` `HYBRID_SHARD` (3) and
    `HYBRID_SHARD_ZERO2` (2). Defaults to `DDP`, `ZeRO`, `FSDP`, `FSDP` for `zeroStage` 0 to 3."""
    bucket_elements: Annotated[int, Field(ge=1, le=4294967296)] = 16777216
    """Number of gradients that one collective of `DDP` and `ZeRO` sums. A larger tensor is a bucket of its own."""
    overlap: bool = True
    """Whether `DDP` and `ZeRO` stage 1 sum a bucket as soon as the last backward pass has computed it, not after all
    of them. `ZeRO` stage 2 always sums after each micro-batch, `FSDP` layer by layer."""
    reduce_every_micro_batch: bool | None = None
    """Experimental: `FSDP` reduces gradients in each micro-batch, not only in a step's last one. Ranks store shards of
    gradients, and send more. Defaults to false."""
    shard_size: Degree | None = None
    """Number of neighboring replicas that share one set of shards; sets are copies (HSDP), and gathering stays on fast
    links. Must divide `replicas`. Defaults to all. Needs `zeroStage` 1 or more."""
    reshard_size: Annotated[int, Field(ge=2, le=65536)] | None = None
    """Number of neighbors that share a second copy of a layer's shards, from which the backward pass gathers, with
    `zeroStage: 3` (hpZ of ZeRO++, arXiv 2306.10209). Must divide `replicas`. Needs `tensor: 1` and `pipeline: 1`."""
    compression: GradientCompression = GradientCompression.NONE
    """What `DDP` sends for a gradient. `FP16`, `BF16`: that format. `Int8`: 8 bits per element and a scale per
    bucket. `TopK`: only the largest elements. `PowerSGD`: two thin factors of each matrix (arXiv 1905.13727). The last
    three add what was left out to the next gradient (error feedback)."""
    compression_rank: Annotated[int, Field(ge=1, le=1024)] = 4
    """Columns of the factors of `compression: PowerSGD`."""
    compression_density: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Fraction of the elements that `compression: TopK` sends."""
