"""DiLoCo (arXiv 2311.08105): the mean change of a round is the gradient of an outer step with Nesterov momentum.

With T the parameters at the start of a round and T_i those of island i at its end:

    D = mean of (T - T_i);  m = momentum m + D;  T = T - rate (D + momentum m).

With rate 1 and momentum 0 this is local SGD.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.api.training import OuterSpec
from meshwright_worker.distributed.collectives import all_reduce_on, flatten_tensors, unflatten_into
from meshwright_worker.distributed.mesh import ISLAND, Mesh
from meshwright_worker.local_sgd.outer_optimizer import local_tensors
from meshwright_worker.local_sgd.parameter_averaging import any_island
from meshwright_worker.optimizers.optimizer import Optimizer
from meshwright_worker.parallel.shards import ParameterShard


class DiLoCo:
    """Stores the parameters at the start of the round and the momentum: two numbers per parameter that this rank
    updates.

    Args:
        shards: what this rank updates.
        optimizer: the inner one; each island keeps its state from round to round.
        mesh: its `ISLAND` group.
        spec: outer learning rate and momentum.
    """

    def __init__(self, shards: Sequence[ParameterShard], optimizer: Optimizer, mesh: Mesh, spec: OuterSpec) -> None:
        self._shards = shards
        self._optimizer = optimizer
        self._group, self._device = mesh.group(ISLAND), mesh.device
        self.weight = 1 / self._group.size()
        self._spec = spec
        self._round_start = [local.clone() for local in local_tensors(shards)]
        self._momentum = [torch.zeros_like(local) for local in local_tensors(shards)]

    def begin_step(self) -> None:
        """See `OuterOptimizer.begin_step`."""

    def update(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """See `OuterOptimizer.update`."""
        self._optimizer.step(gradients, rate)

    def synchronize(self, *, stop: bool) -> bool:
        """See `OuterOptimizer.synchronize`."""
        parameters = local_tensors(self._shards)
        with torch.no_grad():
            change = flatten_tensors(torch._foreach_sub(self._round_start, parameters)).mul_(self.weight)
            all_reduce_on(self._device, change, self._group)
            momentum = flatten_tensors(self._momentum).mul_(self._spec.momentum).add_(change)
            unflatten_into(momentum, self._momentum)
            step = change.add_(momentum, alpha=self._spec.momentum)
            unflatten_into(flatten_tensors(self._round_start).sub_(step, alpha=self._spec.learning_rate), parameters)
        self._start_round()
        return any_island(stop, self._device, self._group)

    def on_parameters_loaded(self, step: int) -> None:
        """See `OuterOptimizer.on_parameters_loaded`: checkpoints are taken between rounds."""
        # A rank with both ends of a model has tied embeddings twice, and has loaded the momentum of the last.
        loaded = {shard.name: momentum for shard, momentum in zip(self._shards, self._momentum, strict=True)}
        for shard, momentum in zip(self._shards, self._momentum, strict=True):
            if loaded[shard.name] is not momentum:
                momentum.copy_(loaded[shard.name])
        self._start_round()

    def tensors(self) -> dict[tuple[str, str], torch.Tensor]:
        """See `OuterOptimizer.tensors`."""
        return {
            (shard.name, "momentum"): momentum for shard, momentum in zip(self._shards, self._momentum, strict=True)
        }

    def checkpointed_optimizer(self) -> tuple[Sequence[ParameterShard], Optimizer] | None:
        """See `OuterOptimizer.checkpointed_optimizer`."""
        return self._shards, self._optimizer

    def close(self) -> None:
        """See `OuterOptimizer.close`."""

    def _start_round(self) -> None:
        torch._foreach_copy_(self._round_start, local_tensors(self._shards))
