"""Local SGD (arXiv 1805.09767) and federated averaging (FedAvg, arXiv 1602.05629).

Each island trains separately for a round, with its own optimizer state, which it keeps. Then parameters are averaged:
with equal weights, or weighted by each island's number of samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from meshwright_worker.distributed.collectives import all_reduce_on, flatten_tensors, unflatten_into
from meshwright_worker.distributed.mesh import ISLAND, Mesh
from meshwright_worker.local_sgd.outer_optimizer import local_tensors
from meshwright_worker.optimizers.optimizer import Optimizer
from meshwright_worker.parallel.shards import ParameterShard


class ParameterAveraging:
    """Averages parameters over islands.

    Args:
        shards: what this rank updates.
        optimizer: of the island.
        mesh: its `ISLAND` group.
        samples: of this island; the average is weighted by them.
    """

    def __init__(self, shards: Sequence[ParameterShard], optimizer: Optimizer, mesh: Mesh, samples: int = 1) -> None:
        self._shards = shards
        self._optimizer = optimizer
        self._group, self._device = mesh.group(ISLAND), mesh.device
        total = torch.tensor([samples], dtype=torch.float64, device=mesh.device)
        dist.all_reduce(total, group=self._group)
        self.weight = samples / float(total.item())

    def begin_step(self) -> None:
        """See `OuterOptimizer.begin_step`."""

    def update(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """See `OuterOptimizer.update`."""
        self._optimizer.step(gradients, rate)

    def synchronize(self, *, stop: bool) -> bool:
        """See `OuterOptimizer.synchronize`."""
        average_over_islands(local_tensors(self._shards), self.weight, self._group, self._device)
        return any_island(stop, self._device, self._group)

    def on_parameters_loaded(self, step: int) -> None:
        """See `OuterOptimizer.on_parameters_loaded`: there is no state."""

    def tensors(self) -> dict[tuple[str, str], torch.Tensor]:
        """See `OuterOptimizer.tensors`: there is no state."""
        return {}

    def checkpointed_optimizer(self) -> tuple[Sequence[ParameterShard], Optimizer] | None:
        """See `OuterOptimizer.checkpointed_optimizer`."""
        return self._shards, self._optimizer

    def close(self) -> None:
        """See `OuterOptimizer.close`."""


@torch.no_grad()
def average_over_islands(
    tensors: Sequence[torch.Tensor], weight: float, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Replace tensors of one dtype by their weighted sum over islands. Collective on `device`."""
    if tensors:
        mean = flatten_tensors(tensors) * weight
        all_reduce_on(device, mean, group)
        unflatten_into(mean, tensors)


def any_island(value: bool, device: torch.device, group: dist.ProcessGroup) -> bool:
    """Return whether `value` is true on any rank of the group. Collective."""
    flag = torch.tensor([float(value)], device=device)
    dist.all_reduce(flag, group=group)
    return float(flag.item()) > 0
