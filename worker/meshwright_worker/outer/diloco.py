"""DiLoCo (arXiv 2311.08105): the mean change of a round is the gradient of an outer step with Nesterov momentum.

With T the parameters that a round began with and T_i those that island i came to:

    D = mean of (T - T_i);  m = momentum m + D;  T = T - rate (D + momentum m).

With rate 1 and momentum 0 this is local SGD.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.api.training import OuterSpec
from meshwright_worker.mesh import ISLAND, Mesh
from meshwright_worker.optimizer import Optimizer
from meshwright_worker.outer.averaging import any_island
from meshwright_worker.outer.flat import joined_up, spread_out
from meshwright_worker.outer.outer import locals_of
from meshwright_worker.parallel.collectives import sum_through
from meshwright_worker.parallel.shards import Shard


class DiLoCo:
    """Keeps where the round began, and the momentum: two numbers a parameter that this rank updates.

    Args:
        shards: what this rank updates.
        optimizer: the inner one, whose state each island keeps from round to round.
        mesh: its `ISLAND` group.
        spec: outer learning rate and momentum.
    """

    def __init__(self, shards: Sequence[Shard], optimizer: Optimizer, mesh: Mesh, spec: OuterSpec) -> None:
        self._shards = shards
        self._optimizer = optimizer
        self._group, self._device = mesh.group(ISLAND), mesh.device
        self.weight = 1 / self._group.size()
        self._spec = spec
        self._began = [local.clone() for local in locals_of(shards)]
        self._momentum = [torch.zeros_like(local) for local in locals_of(shards)]

    def before(self) -> None:
        """See `Outer.before`."""

    def update(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """See `Outer.update`."""
        self._optimizer.step(gradients, rate)

    def meet(self, *, stop: bool) -> bool:
        """See `Outer.meet`."""
        parameters = locals_of(self._shards)
        with torch.no_grad():
            change = joined_up(torch._foreach_sub(self._began, parameters)).mul_(self.weight)
            sum_through(self._device, change, self._group)
            momentum = joined_up(self._momentum).mul_(self._spec.momentum).add_(change)
            spread_out(momentum, self._momentum)
            step = change.add_(momentum, alpha=self._spec.momentum)
            spread_out(joined_up(self._began).sub_(step, alpha=self._spec.learning_rate), parameters)
        self._begin()
        return any_island(stop, self._device, self._group)

    def loaded(self, step: int) -> None:
        """See `Outer.loaded`: checkpoints are taken between rounds."""
        self._begin()

    def tensors(self) -> dict[tuple[str, str], torch.Tensor]:
        """See `Outer.tensors`."""
        return {
            (shard.name, "momentum"): momentum for shard, momentum in zip(self._shards, self._momentum, strict=True)
        }

    def updated(self) -> tuple[Sequence[Shard], Optimizer] | None:
        """See `Outer.updated`."""
        return self._shards, self._optimizer

    def close(self) -> None:
        """See `Outer.close`."""

    def _begin(self) -> None:
        torch._foreach_copy_(self._began, locals_of(self._shards))
