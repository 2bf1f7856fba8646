"""Training loops in bare torch: one process, `fully_shard`, and `torch.distributed.pipelining`.

Each is what one would write for this one model on this one layout: AdamW with decay on matrices, warm-up and cosine,
clipping by the global norm, and a line of log with loss and norm a step. No checkpoint, no resume, no other layout.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from benchmarks._plain_llama import PlainLlama, draw_weights
from meshwright.api.precision import Precision
from meshwright.api.training import TrainingSpec
from meshwright.layout import split_layers
from meshwright.models.architecture import Architecture
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.optimizers.learning_rate import learning_rate
from meshwright_worker.optimizers.optimizer import EPSILON


class Loop(Protocol):
    """A way to train."""

    def step(self, number: int, samples: torch.Tensor) -> float:
        """One optimizer step, from 1, on int64 [global batch, length + 1]; the loss, where it is known, or 0."""


def plain_loop(run: NativeRun, rank: int, device: torch.device, *, draw: bool = True) -> Loop:
    """The bare loop of a run's layout; torch's default process group has its ranks. One process may leave its weights
    without values.

    Raises:
        ValueError: there is no bare loop for the layout.
    """
    if run.pipeline > 1 and run.data_parallel == run.tensor == 1:
        return PlainPipeline(run.architecture, run.training, run.micro_batches, rank, run.pipeline, device)
    if run.pipeline * run.tensor * run.context > 1:
        raise ValueError("bare loops exist for one process, replicas that shard, and a pipeline")
    module = PlainLlama(run.architecture).to(device)
    if run.data_parallel > 1:
        shard(module, run.data_parallel, device)
    if draw:
        draw_weights(module, run.training.seed)
    return PlainLoop(module, run.training, run.micro_batches, rank, run.data_parallel)


def shard(module: PlainLlama, ranks: int, device: torch.device) -> None:
    """ZeRO-3 by FSDP2, layer by layer."""
    mesh = init_device_mesh(device.type, (ranks,))
    for part in [*module.layers.values(), module]:
        unit = fully_shard(part, mesh=mesh, reshard_after_forward=True)
        if device.type == "cpu":
            # gloo reduces by plain sums alone.
            unit.set_force_sum_reduction_for_comms(True)


class PlainLoop:
    """One process, or one of several that share a model by FSDP2."""

    def __init__(
        self, module: PlainLlama, training: TrainingSpec, micro_batches: int, rank: int = 0, ranks: int = 1
    ) -> None:
        self.module = module
        self._training = training
        self._micro_batches = micro_batches
        self._rank, self._ranks = rank, ranks
        self._device = next(module.parameters()).device
        self._lower = training.precision is Precision.BF16
        self._optimizer = adamw(module, training)

    def step(self, number: int, samples: torch.Tensor) -> float:
        """See `Loop.step`."""
        share = len(samples) // self._ranks
        own = samples[self._rank * share :][:share].to(self._device, non_blocking=True)
        total = torch.zeros((), device=self._device)
        parts = own.chunk(self._micro_batches)
        for index, part in enumerate(parts, start=1):
            if isinstance(self.module, FSDPModule):
                self.module.set_requires_gradient_sync(index == len(parts))
            loss = self._loss(part) / len(parts)
            loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(self.module.parameters(), self._training.optimizer.gradient_clip, foreach=True)
        update(self._optimizer, number, self._training)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
            dist.all_reduce(total)
            total /= self._ranks
        loss_now, _ = torch.stack([total, norm]).tolist()
        return float(loss_now)

    def _loss(self, part: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._lower):
            logits = self.module(part[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten())


class PlainPipeline:
    """One stage of 1F1B."""

    def __init__(
        self,
        model: Architecture,
        training: TrainingSpec,
        micro_batches: int,
        rank: int,
        ranks: int,
        device: torch.device,
    ) -> None:
        self._training = training
        self.module = PlainLlama(model, split_layers(model.layers, ranks)[rank]).to(device)
        draw_weights(self.module, training.seed)
        stage = PipelineStage(self.module, rank, ranks, device, group=dist.group.WORLD)
        self._schedule = Schedule1F1B(stage, micro_batches, loss_fn=_mean_loss)
        self._first, self._last = rank == 0, rank == ranks - 1
        self._parameters = list(self.module.parameters())
        self._device = device
        self._optimizer = adamw(self.module, training)

    def step(self, number: int, samples: torch.Tensor) -> float:
        """See `Loop.step`."""
        samples = samples.to(self._device, non_blocking=True)
        losses: list[torch.Tensor] = []
        if self._first:
            self._schedule.step(samples[:, :-1].contiguous(), return_outputs=False)
        elif self._last:
            self._schedule.step(target=samples[:, 1:].contiguous(), losses=losses, return_outputs=False)
        else:
            self._schedule.step(return_outputs=False)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        squares = get_total_norm(gradients, foreach=True).square()
        sums = torch.stack([torch.stack(losses).mean() if losses else torch.zeros_like(squares), squares])
        dist.all_reduce(sums)
        limit = self._training.optimizer.gradient_clip
        clip_grads_with_norm_(self._parameters, limit, sums[1].sqrt(), foreach=True)
        update(self._optimizer, number, self._training)
        loss, _ = sums.tolist()
        return float(loss)


def _mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def adamw(module: nn.Module, training: TrainingSpec) -> torch.optim.AdamW:
    """AdamW with decay on matrices alone."""
    spec = training.optimizer
    groups = [
        {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": spec.weight_decay},
        {"params": [p for p in module.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=spec.learning_rate, betas=(spec.beta1, spec.beta2), eps=EPSILON, fused=True)


def update(optimizer: torch.optim.AdamW, number: int, training: TrainingSpec) -> None:
    """One update at the rate of its step; gradients are gone behind it."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(number, training.steps, training.optimizer)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
