"""Training of one's own module: gradients made whole, clipped by their global norm, AdamW on this rank's parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.api.replicas import DataParallelSpec
from meshwright.api.training import OptimizerSpec
from meshwright_worker.mesh import TENSOR, Mesh
from meshwright_worker.models.initialize import local_shard
from meshwright_worker.optimizer import AdamW, learning_rate
from meshwright_worker.own.plan import ParallelPlan, partial_names, shard, split
from meshwright_worker.parallel.ddp import BucketedAllReduce
from meshwright_worker.parallel.gradients import rescale, square_sum, sum_partial
from meshwright_worker.parallel.shards import Shard
from meshwright_worker.parallel.tensor import hold_local_parts
from meshwright_worker.step import DivergedError

Loss = Callable[[nn.Module, Any], tuple[torch.Tensor, int]]
"""The loss of a batch, summed over what is predicted in it, [], and how much that is."""


class OwnTrainer:
    """A module, split by a plan over the tensor and data dimensions of a mesh, and its optimizer.

    Args:
        module: with the same weights on every rank, such as after `torch.manual_seed`.
        plan: how it is split.
        loss: how a batch becomes a loss.
        mesh: pipeline and context degree 1.
        steps: of the whole run, for the learning rate.
        optimizer: AdamW and the schedule of its rate.
        zero_stage: 0, 2 or 3.

    Raises:
        PlanError: the plan does not fit the module.
        ValueError: the mesh has pipeline stages or splits sequences.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: ParallelPlan,
        loss: Loss,
        mesh: Mesh,
        *,
        steps: int,
        optimizer: OptimizerSpec,
        zero_stage: int = 0,
    ) -> None:
        if mesh.layout.pipeline > 1 or mesh.layout.context > 1:
            raise ValueError("a module of one's own is split over tensor and data dimensions alone")
        self.module = module.to(mesh.device)
        self._loss, self._mesh, self._steps, self._spec = loss, mesh, steps, optimizer
        partial = partial_names(module, plan) if mesh.layout.tensor > 1 else set()
        if mesh.layout.tensor > 1:
            split(module, plan, mesh.devices[TENSOR])
        sharded = zero_stage > 0 and mesh.layout.replicas > 1
        if sharded:
            shard(module, plan, mesh.replicas, zero_stage=zero_stage)
            whole: dict[str, DTensor] = {n: p for n, p in module.named_parameters() if isinstance(p, DTensor)}
        else:
            whole = hold_local_parts(module)
        self.shards = [
            self._shard(name, parameter, whole.get(name), name in partial, sharded)
            for name, parameter in module.named_parameters()
        ]
        # How many micro-batches a step has, its caller decides; so gradients are summed after the last one.
        self._replicas = BucketedAllReduce(self.shards, mesh, DataParallelSpec(), 1, overlap=False)
        self._optimizer = AdamW(self.shards, optimizer)

    def step(self, number: int, batches: Sequence[Any]) -> float:
        """Train on this replica's micro-batches of step `number` (from 1); the mean loss, the same on every rank.

        Raises:
            DivergedError: loss or gradients are not finite; no parameter was changed.
        """
        total, predicted = torch.zeros((), dtype=torch.float64, device=self._mesh.device), 0
        for batch in batches:
            loss, count = self._loss(self.module, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach().double()
            predicted += count
        gradients = self._replicas.reduce()
        if self._mesh.layout.tensor > 1:
            sum_partial(self.shards, gradients, self._mesh.group(TENSOR), self._mesh.device)
        counts = float(self._mesh.coordinates.tensor == 0)
        squares = square_sum(self.shards, gradients)
        sums = torch.stack([total * counts, squares, torch.full_like(squares, predicted * counts)])
        dist.all_reduce(sums)
        loss_sum, squared, targets = sums.tolist()
        mean, norm = float(loss_sum / max(1.0, targets)), math.sqrt(squared) / max(1.0, targets)
        if not math.isfinite(mean + norm):
            raise DivergedError(f"step {number}: loss {mean}, gradient norm {norm}")
        rescale(gradients, 1.0 / max(1.0, targets), norm, self._spec.gradient_clip)
        self._optimizer.step(gradients, learning_rate(number, self._steps, self._spec))
        return mean

    def _shard(self, name: str, parameter: nn.Parameter, whole: DTensor | None, partial: bool, sharded: bool) -> Shard:
        data, _, context, tensor = self._mesh.coordinates
        is_split = whole is not None and TENSOR in (whole.device_mesh.mesh_dim_names or ())
        counted = (is_split or tensor == 0) and (sharded or data == context == 0)
        return Shard(name, parameter, local_shard(parameter)[0], whole, counted, partial, not sharded)
