"""Muon (Keller Jordan et al., 2024; "Muon is scalable", arXiv 2502.16982): orthogonalized momentum of matrices.

Orthogonalization is not element-wise: it needs the full matrix. A rank that has a part gathers the momentum of one
matrix at a time, orthogonalizes it as every rank of its group does, and keeps its part: the result equals that of one
process. A stack of matrices (experts) that is split between them needs no gathering. Updates are scaled to the root
mean square of AdamW's updates (0.2), so both share one learning rate. AdamW updates everything else: embeddings of
tokens and positions, the output projection, and parameters that are not matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement

from meshwright.api.training import OptimizerSpec
from meshwright_worker.optimizers.adamw import AdamW
from meshwright_worker.optimizers.optimizer import clear_gradients
from meshwright_worker.parallel.shards import ParameterShard

MOMENTUM = "momentum"
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_RMS_OF_ADAMW = 0.2
_TABLES = ("embedding.weight", "positions.weight", "output.weight")


class Muon:
    """The optimizer of one rank: Muon for its layers' matrices, AdamW for the rest.

    Args:
        shards: the rank's shards.
        spec: rates, decay and momentum.
        working: the format of the orthogonalization; bf16 is enough.
        device: for the orthogonalization and its collectives; shards may be in host memory.
    """

    def __init__(
        self, shards: Sequence[ParameterShard], spec: OptimizerSpec, working: torch.dtype, device: torch.device
    ) -> None:
        self._spec = spec
        self._working = working
        self._device = device
        self._shards = shards
        self._momenta = {id(shard): torch.zeros_like(shard.local) for shard in shards if uses_muon(shard)}
        rest = [shard for shard in shards if not uses_muon(shard)]
        self._adamw = AdamW(rest, spec) if rest else None

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """See `Optimizer.step`. Collective if matrices are split."""
        rest = []
        for shard, gradient in zip(self._shards, gradients, strict=True):
            if id(shard) in self._momenta:
                self._update(shard, gradient, rate)
            else:
                rest.append(gradient)
        if self._adamw is not None:
            self._adamw.step(rest, rate)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """See `Optimizer.clear_gradients`."""
        clear_gradients(self._shards)

    def moments(self, shard: ParameterShard) -> dict[str, torch.Tensor]:
        """See `Optimizer.moments`."""
        if id(shard) in self._momenta:
            return {MOMENTUM: self._momenta[id(shard)]}
        assert self._adamw is not None
        return self._adamw.moments(shard)

    def set_step_count(self, steps: int) -> None:
        """See `Optimizer.set_step_count`."""
        if self._adamw is not None:
            self._adamw.set_step_count(steps)

    def _update(self, shard: ParameterShard, gradient: torch.Tensor, rate: float) -> None:
        momentum, beta = self._momenta[id(shard)], self._spec.momentum
        momentum.lerp_(gradient, 1 - beta)
        nesterov = gradient.lerp(momentum, beta).to(self._device)
        whole, box = _matrices(shard, nesterov)
        update = newton_schulz(whole.to(self._working))[box].to(shard.local)
        scale = _RMS_OF_ADAMW * math.sqrt(max(whole.shape[-2:]))
        shard.local.mul_(1 - rate * self._spec.weight_decay).add_(update, alpha=-rate * scale)


def uses_muon(shard: ParameterShard) -> bool:
    """Return whether a parameter is a matrix, or a stack of matrices, of a layer."""
    return shard.local.ndim > 1 and shard.name not in _TABLES


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Run five steps of the degree-five Newton-Schulz iteration: singular values of [..., m, n] approach 1."""
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: torch.Tensor = x.mT if tall else x
    return result


def _matrices(shard: ParameterShard, local: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """Return the full matrices that contain `local`, and its position in them. Collective if they are split."""
    everything = tuple(slice(None) for _ in local.shape)
    if shard.whole is None:
        return local, everything
    placements = shard.whole.placements
    stack = local.ndim > 2 and all(p.dim == 0 for p in placements if isinstance(p, ShardPlacement))
    if stack:
        return local, everything
    mesh, shape, stride = shard.whole.device_mesh, shard.whole.shape, shard.whole.stride()
    gathered = DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)
    whole: torch.Tensor = gathered.full_tensor()
    return whole, shard.box
