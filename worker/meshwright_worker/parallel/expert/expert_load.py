"""The expert loads of a step, on every rank: their report, and the update of the balancing biases.

The counts are part of the step's one reduction, which the host waits for anyway. Loads are counted over the entire step
and all ranks of the island, so the biases are the same in every layout (arXiv 2408.15664).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from meshwright.models.architecture import Architecture
from meshwright.models.mixture import mixture_layers
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.models.moe import MixtureOfExperts, iter_moe_layers
from meshwright_worker.rank.task import ExpertLoad


class ExpertLoads:
    """The mixtures of this rank's stages.

    Args:
        stages: the modules of the stages.
        model: the entire model.
        mesh: all ranks.
        tokens: the divisor of every summed loss, `tokens_of_step`.
        islands: number of islands; each counts its own part of a step's tokens.
    """

    def __init__(
        self, stages: Sequence[nn.Module], model: Architecture, mesh: Mesh, tokens: int, islands: int = 1
    ) -> None:
        self._mesh = mesh
        self._tokens = tokens
        self._islands = islands
        self._layers = mixture_layers(model.mixture, model.layers)
        self._mixture = model.mixture
        self._local_mixtures = {
            self._layers.index(int(name.split(".")[1])): mixture
            for stage in stages
            for name, mixture in iter_moe_layers(stage)
        }
        self.any = bool(self._layers)
        """Whether the model has mixtures, on this or another rank."""
        self.scale_losses(1.0)

    def scale_losses(self, factor: float | torch.Tensor) -> None:
        """Scale the balancing losses like the cross-entropy, from the next micro-batch's backward pass on.

        `factor` is a number or fp64 [] on the device.
        """
        for mixture in self._local_mixtures.values():
            mixture.routing_stats.loss_weight = factor / self._tokens

    def take(self) -> torch.Tensor:
        """Return this rank's counts since the last call, fp64 [numbers]: to be summed over an island."""
        count = self._mixture.experts if self._mixture is not None else 0
        table = torch.zeros(len(self._layers), count + 3, dtype=torch.float64, device=self._mesh.device)
        for row, mixture in self._local_mixtures.items():
            routing_stats = mixture.routing_stats.take(table.device)
            # Of ranks that route the same tokens, only one counts them.
            if mixture.routing_replicas == 1 or self._mesh.coordinates.tensor == 0:
                table[row] += routing_stats
        return table.flatten()

    def move_biases(self, sums: torch.Tensor) -> None:
        """Update the routers' biases by their loads. `sums` is the sum of `take` over the island's ranks."""
        for row, mixture in self._local_mixtures.items():
            self._move_bias(mixture, sums.view(len(self._layers), -1)[row, : mixture.mixture.experts])

    def to_reports(self, sums: Sequence[float]) -> tuple[ExpertLoad, ...]:
        """Return the loads, layer by layer; `sums` as for `move_biases`, on the host."""
        width = len(sums) // max(1, len(self._layers))
        rows = [sums[first : first + width] for first in range(0, len(sums), max(1, width))]
        return tuple(self._load(layer, row) for layer, row in zip(self._layers, rows, strict=True))

    def _move_bias(self, mixture: MixtureOfExperts, load: torch.Tensor) -> None:
        bias = mixture.router.bias
        if bias is not None:
            bias += mixture.mixture.bias_rate * torch.sign(load.mean() - load).to(bias.dtype)

    def _load(self, layer: int, numbers: Sequence[float]) -> ExpertLoad:
        *counts, dropped, auxiliary, z = numbers
        choices = sum(counts)
        return ExpertLoad(
            layer=layer,
            imbalance=max(counts) * len(counts) / choices if choices else 0.0,
            dropped=dropped / choices if choices else 0.0,
            auxiliary_loss=auxiliary * self._islands / self._tokens,
            z_loss=z * self._islands / self._tokens,
        )
