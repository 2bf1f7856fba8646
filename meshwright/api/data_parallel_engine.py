"""The implementation of data parallelism for each name in the API. Does not import torch."""

from __future__ import annotations

from enum import Enum, auto

from meshwright.api.data_parallel import DataParallelStrategy
from meshwright.api.parallelism import ParallelismSpec


class DataParallelEngine(Enum):
    """An implementation of data parallelism."""

    ALL_REDUCE = auto()
    """Every replica has everything, and gradients are all-reduced (`ddp.py`)."""
    FLAT = auto()
    """Flat shards of optimizer state and gradients between steps (`zero.py`)."""
    FSDP = auto()
    """FSDP2, which gathers and frees parameters layer by layer (`fsdp.py`)."""


_OF_STAGE = {
    0: DataParallelEngine.ALL_REDUCE,
    1: DataParallelEngine.FLAT,
    2: DataParallelEngine.FSDP,
    3: DataParallelEngine.FSDP,
}


def data_parallel_engine(parallelism: ParallelismSpec) -> DataParallelEngine:
    """The engine of `dataParallel.strategy`, or of `zeroStage` if it is left out."""
    if parallelism.data_parallel.strategy is DataParallelStrategy.ZERO:
        return DataParallelEngine.FLAT
    return _OF_STAGE[parallelism.zero_stage]
