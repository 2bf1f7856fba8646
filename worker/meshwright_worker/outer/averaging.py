"""Local SGD (arXiv 1805.09767) and federated averaging (FedAvg, arXiv 1602.05629).

Each island takes a round's steps alone, with its own optimizer state, which it keeps. Then parameters are averaged: all
islands alike, or by how many samples each has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from meshwright_worker.mesh import ISLAND, Mesh
from meshwright_worker.optimizer import Optimizer
from meshwright_worker.outer.flat import joined_up, spread_out
from meshwright_worker.outer.outer import locals_of
from meshwright_worker.parallel.collectives import sum_through
from meshwright_worker.parallel.shards import Shard


class Averaging:
    """Averages parameters over islands.

    Args:
        shards: what this rank updates.
        optimizer: of the island.
        mesh: its `ISLAND` group.
        samples: of this island; the average is weighted by them.
    """

    def __init__(self, shards: Sequence[Shard], optimizer: Optimizer, mesh: Mesh, samples: int = 1) -> None:
        self._shards = shards
        self._optimizer = optimizer
        self._group, self._device = mesh.group(ISLAND), mesh.device
        total = torch.tensor([samples], dtype=torch.float64, device=mesh.device)
        dist.all_reduce(total, group=self._group)
        self.weight = samples / float(total.item())

    def before(self) -> None:
        """See `Outer.before`."""

    def update(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """See `Outer.update`."""
        self._optimizer.step(gradients, rate)

    def meet(self, *, stop: bool) -> bool:
        """See `Outer.meet`."""
        average(locals_of(self._shards), self.weight, self._group, self._device)
        return any_island(stop, self._device, self._group)

    def loaded(self, step: int) -> None:
        """See `Outer.loaded`: nothing is kept."""

    def tensors(self) -> dict[tuple[str, str], torch.Tensor]:
        """See `Outer.tensors`: nothing is kept."""
        return {}

    def updated(self) -> tuple[Sequence[Shard], Optimizer] | None:
        """See `Outer.updated`."""
        return self._shards, self._optimizer

    def close(self) -> None:
        """See `Outer.close`."""


@torch.no_grad()
def average(tensors: Sequence[torch.Tensor], weight: float, group: dist.ProcessGroup, device: torch.device) -> None:
    """Replace tensors of one number format by their sum over islands, each times its weight. Collective on `device`."""
    if tensors:
        mean = joined_up(tensors) * weight
        sum_through(device, mean, group)
        spread_out(mean, tensors)


def any_island(stop: bool, device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether `stop` holds on any rank of the group. Collective."""
    flag = torch.tensor([float(stop)], device=device)
    dist.all_reduce(flag, group=group)
    return float(flag.item()) > 0
