"""What every way of keeping replicas equal offers to the step, and the choice of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from meshwright.protocol import RunConfig
from meshwright.runs.engine import Engine, engine_of
from meshwright.schedules.division import WHOLE_BACKWARD
from meshwright_worker.mesh import Mesh
from meshwright_worker.parallel.compression.memory import Memory
from meshwright_worker.parallel.ddp import BucketedAllReduce
from meshwright_worker.parallel.flat import FlatShards
from meshwright_worker.parallel.shards import Shard


class Replicas(Protocol):
    """Makes the gradients of replicas one, and hands out what each has updated."""

    @property
    def shards(self) -> Sequence[Shard]:
        """What this rank updates, norms, clips and saves: its parameters, or its parts of them."""

    @property
    def memory(self) -> Memory | None:
        """What compressed sums left out and a checkpoint must hold; None without compression."""

    def reduce(self) -> list[torch.Tensor]:
        """The gradients of the shards, summed over replicas, after the step's last backward pass. Collective."""

    def publish(self) -> None:
        """Give every replica the parameters that the others have updated or loaded. Collective."""


class Reduced:
    """FSDP has summed gradients over replicas already, or there is only one of them.

    Args:
        shards: of all stages.
    """

    memory = None

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards

    def reduce(self) -> list[torch.Tensor]:
        """See `Replicas.reduce`."""
        return [shard.gradient() for shard in self.shards]

    def publish(self) -> None:
        """See `Replicas.publish`."""


def replicas_of(run: RunConfig, shards: Sequence[Shard], mesh: Mesh) -> Replicas:
    """The way of `parallelism.dataParallel` for the shards of all stages of this rank."""
    engine = engine_of(run.parallelism)
    if mesh.replicas.size() == 1 or engine is Engine.FSDP:
        return Reduced(shards)
    # Other schedules compute gradients of weights apart, past autograd's hooks, or a part of them on another rank.
    hooks = run.pipeline == 1 or run.parallelism.order in WHOLE_BACKWARD
    if engine is Engine.FLAT:
        return FlatShards(shards, mesh, run.parallelism, run.micro_batches, watch=hooks)
    spec = run.parallelism.data_parallel
    return BucketedAllReduce(shards, mesh, spec, run.micro_batches, overlap=hooks and spec.overlap)
