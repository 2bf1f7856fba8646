"""Which code keeps replicas equal: what the names in the API come down to. Knows no torch."""

from __future__ import annotations

from enum import Enum, auto

from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.replicas import DataParallelStrategy


class Engine(Enum):
    """One of three ways."""

    ALL_REDUCE = auto()
    """Every replica holds everything; gradients are all-reduced (`ddp.py`)."""
    FLAT = auto()
    """Flat shards of optimizer state, and of gradients, between the steps (`flat.py`)."""
    FSDP = auto()
    """FSDP2, which gathers and frees parameters layer by layer (`zero.py`)."""


_OF_STAGE = {0: Engine.ALL_REDUCE, 1: Engine.FLAT, 2: Engine.FSDP, 3: Engine.FSDP}


def engine_of(parallelism: ParallelismSpec) -> Engine:
    """The engine of `dataParallel.strategy`, or of `zeroStage` when it is left out."""
    if parallelism.data_parallel.strategy is DataParallelStrategy.ZERO:
        return Engine.FLAT
    return _OF_STAGE[parallelism.zero_stage]
