"""What a step's routers did, on every rank: the report of it, and the balancing biases that follow from it.

The counts travel with the step's one reduction, which the host waits for in any case.

Loads are counted over the whole step and all ranks that take it together, so the biases move alike in every layout
(arXiv 2408.15664).
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
        model: the whole model.
        mesh: all ranks.
        tokens: what every summed loss is divided by, `tokens_of_step`.
        islands: that train apart; each counts its own part of a step's tokens.
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
        """Whether the model, here or elsewhere, has mixtures."""
        self.scale_losses(1.0)

    def scale_losses(self, factor: float | torch.Tensor) -> None:
        """Multiply the balancing losses, as a scaled cross-entropy is, from the next micro-batch's backward pass on.

        `factor` is a number or fp64 [] on the device.
        """
        for mixture in self._local_mixtures.values():
            mixture.routing_stats.loss_weight = factor / self._tokens

    def take(self) -> torch.Tensor:
        """This rank's part of what was counted since the last call, fp64 [numbers]: to be summed over an island."""
        count = self._mixture.experts if self._mixture is not None else 0
        table = torch.zeros(len(self._layers), count + 3, dtype=torch.float64, device=self._mesh.device)
        for row, mixture in self._local_mixtures.items():
            routing_stats = mixture.routing_stats.take(table.device)
            # Ranks that route the same tokens count them once.
            if mixture.routing_replicas == 1 or self._mesh.coordinates.tensor == 0:
                table[row] += routing_stats
        return table.flatten()

    def move_biases(self, sums: torch.Tensor) -> None:
        """Let the routers' biases follow the loads. `sums` are over the island, of what its ranks gave by `take`."""
        for row, mixture in self._local_mixtures.items():
            self._move_bias(mixture, sums.view(len(self._layers), -1)[row, : mixture.mixture.experts])

    def to_reports(self, sums: Sequence[float]) -> tuple[ExpertLoad, ...]:
        """The loads, layer by layer; `sums` as of `move_biases`, on the host."""
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
