"""Trains a custom module: completes gradients, clips them by their global norm, updates this rank's parts
with AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.api.training import OptimizerSpec
from meshwright_worker.custom_module.batch_norm import BatchNormStatistics
from meshwright_worker.custom_module.checkpoint import load, save
from meshwright_worker.custom_module.parallelize import ParallelModule, first_mismatch, parallelize
from meshwright_worker.custom_module.plan import ParallelPlan
from meshwright_worker.custom_module.rng import RandomStreams
from meshwright_worker.distributed.mesh import (
    REPLICA,
    STEP_TIMEOUT,
    TENSOR,
    Mesh,
    is_same_on_all_ranks,
    set_collective_timeout,
)
from meshwright_worker.optimizers.learning_rate import learning_rate
from meshwright_worker.parallel.data.fsdp import reshard
from meshwright_worker.parallel.grad_norm import all_reduce_partial, local_square_sum, scale_and_clip
from meshwright_worker.parallel.shards import ParameterShard
from meshwright_worker.trainer.loss_anomalies import DivergedError

Loss = Callable[[nn.Module, Any], tuple[torch.Tensor, int]]
"""Returns the loss of a batch, summed over its targets, [], and the number of targets."""


_SAME = 1e-5
"""Relative difference below which losses count as equal."""

_SHARDED = ("mixed torch.Tensor and DTensor", "setStorage")
"""What torch says of a parameter that is used while only its shard is there."""


class CustomModuleTrainer:
    """A module, split by a plan over the tensor and data dimensions of a mesh, and its optimizer.

    Args:
        module: with the same weights on every rank, such as after `torch.manual_seed`, in fp64, fp32 or bf16. It is
            changed in place.
        plan: how it is split.
        loss: how a batch becomes a loss.
        mesh: pipeline and context degree 1.
        steps: of the whole run, for the learning rate.
        optimizer: AdamW and the schedule of its rate. bf16 parameters are rounded stochastically.
        zero_stage: 0 to 3.
        seed: of dropout and of that rounding.

    Raises:
        PlanError: the plan does not fit the module.
        ValueError: the mesh, the stage or the module's weights are such that training would be wrong.
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
        seed: int = 0,
    ) -> None:
        self._loss, self._mesh, self._steps, self._spec = loss, mesh, steps, optimizer
        self._streams = RandomStreams(mesh.device, seed, mesh.coordinates.tensor)
        self._parallel_module: ParallelModule = parallelize(
            module, plan, mesh, self._streams, optimizer, zero_stage=zero_stage, seed=seed
        )
        self.module = self._parallel_module.module
        self._statistics = BatchNormStatistics(module, mesh.group(REPLICA))
        self._checked = False
        self._stepping = False

    @property
    def shards(self) -> Sequence[ParameterShard]:
        """What this rank updates."""
        return self._parallel_module.data_parallel.shards

    def step(self, number: int, batches: Sequence[Any]) -> float:
        """Train on this replica's micro-batches of step `number` (from 1); return the mean loss, the same on every
        rank.

        Raises:
            DivergedError: loss or gradients are not finite; no parameter and no batch norm was changed.
            ValueError: ranks of the same replica differ in their losses, numbers of batches or buffers.
        """
        self._check_count(batches)
        total, predicted = torch.zeros((), dtype=torch.float64, device=self._mesh.device), 0
        self._statistics.begin()
        for index, batch in enumerate(batches):
            stream = self._streams.of(number, self._mesh.coordinates.data * len(batches) + index)
            with stream, _explained_sharding():
                loss, count = self._loss_of(batch)
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach().double()
            predicted += count
        self._statistics.finish()
        self._check_buffers()
        gradients, used = self._gradients()
        loss_sum, squares, targets, *users = self._sum(total, predicted, local_square_sum(self.shards, gradients), used)
        self._check_used(users)
        mean, norm = loss_sum / max(1.0, targets), math.sqrt(squares) / max(1.0, targets)
        if not math.isfinite(mean + norm):
            self._parallel_module.optimizer.clear_gradients()
            self._statistics.undo()
            raise DivergedError(f"step {number}: loss {mean}, gradient norm {norm}")
        scale_and_clip(gradients, 1.0 / max(1.0, targets), norm, self._spec.gradient_clip)
        self._parallel_module.optimizer.step(gradients, learning_rate(number, self._steps, self._spec))
        self._parallel_module.data_parallel.sync_parameters()
        if not self._stepping:
            self._stepping = True
            set_collective_timeout(STEP_TIMEOUT)
        return mean

    def evaluate(self, batches: Sequence[Any]) -> float:
        """Return the mean loss over all replicas' batches, the same on every rank; runs the module in `eval` mode.

        Raises:
            ValueError: as `step`; or there were no targets.
        """
        self._check_count(batches)
        total, predicted = torch.zeros((), dtype=torch.float64, device=self._mesh.device), 0
        trained = [part for part in self.module.modules() if part.training]
        self.module.eval()
        with torch.no_grad(), _explained_sharding():
            for batch in batches:
                loss, count = self._loss_of(batch)
                total += loss.double()
                predicted += count
        # Not `train()`: parts that were frozen by `eval()` stay so.
        for part in trained:
            part.training = True
        reshard(self.module)
        loss_sum, _, targets = self._sum(total, predicted, torch.zeros_like(total), [])
        if not targets:
            raise ValueError("the batches of `evaluate` have no targets")
        return loss_sum / targets

    def save(self, root: str | Path, step: int, *, keep: int = 2) -> Path:
        """Save the state after `step` in a directory that all ranks share, and keep the newest `keep` checkpoints.

        Any layout and ZeRO stage can load it. Collective; returns when it is durable.

        Raises:
            CheckpointError: it could not be written; or the directory has checkpoints of later steps, of another run or
                of one that was not loaded, and nothing is written.
        """
        return save(self._parallel_module, self._mesh, Path(root), step, keep)

    def load(self, root: str | Path) -> int:
        """Resume from the newest intact checkpoint of a directory; return its step, 0 if there is none.

        Raises:
            CheckpointMismatchError: it belongs to another module.
            ForeignCheckpointError: it contains a built-in model, or another version wrote it.
            CheckpointVolumeError: a rank cannot read it, or does not see it.
        """
        reshard(self.module)
        return load(self._parallel_module, self._mesh, Path(root))

    def _loss_of(self, batch: Any) -> tuple[torch.Tensor, int]:
        returned: Any = self._loss(self.module, batch)
        pair = returned if isinstance(returned, tuple | list) and len(returned) == 2 else (returned, None)
        if pair[1] is None or not isinstance(pair[0], torch.Tensor) or pair[0].ndim:
            raise ValueError(
                "`loss` must return two values: the loss, summed over the targets of the batch, as a tensor without "
                f"dimensions, and the number of targets; it returned {_described(returned)}"
            )
        return pair[0], pair[1]

    def _gradients(self) -> tuple[list[torch.Tensor], list[float]]:
        """Return the complete gradients of `shards`, and for which parameters this rank has computed one."""
        unfrozen = [shard.name for shard in self._parallel_module.frozen if shard.parameter.requires_grad]
        if unfrozen:
            raise ValueError(
                f"{', '.join(unfrozen)} was frozen when the trainer was created: create a new trainer to train it"
            )
        used = self._used()
        for shard in self._parallel_module.trained_shards:
            # This replica's batches do not use that part of the module; other replicas' batches may.
            if shard.parameter.grad is None:
                shard.parameter.grad = torch.zeros_like(shard.parameter)
        gradients = self._parallel_module.data_parallel.reduce()
        if self._mesh.layout.tensor > 1:
            all_reduce_partial(self.shards, gradients, self._mesh.group(TENSOR), self._mesh.device)
        return gradients, used

    def _used(self) -> list[float]:
        """1 for each trained parameter of which this rank's batches gave a gradient, 0 for the others."""
        shards, used = self._parallel_module.trained_shards, self._parallel_module.used
        if used is None:
            return [float(shard.parameter.grad is not None) for shard in shards]
        found = used.pop()
        return [float(id(shard.parameter) in found) for shard in shards]

    def _sum(self, total: torch.Tensor, predicted: int, squares: torch.Tensor, used: list[float]) -> list[float]:
        """Sums over all ranks, in one reduction: of losses and what they are of, of squares and of `used`.

        Raises:
            ValueError: ranks of a tensor group have different losses.
        """
        ranks = self._mesh.layout.tensor
        first = float(self._mesh.coordinates.tensor == 0)
        sums = torch.cat(
            [
                torch.stack([total * first, total, total.abs(), squares.to(total)]),
                torch.tensor([predicted * first, *used], dtype=total.dtype).to(total),
            ]
        )
        dist.all_reduce(sums)
        loss, loss_over_ranks, scale, *others = sums.tolist()
        # Not bitwise: on GPUs some sums have no fixed order.
        if abs(loss_over_ranks - ranks * loss) > _SAME * scale:
            raise ValueError(
                "the ranks of a tensor group computed different losses of one batch: give them the same batch, "
                "draw random numbers only with torch, and use the weights of layers that the plan splits only in these "
                "layers"
            )
        return [loss, *others]

    def _check_used(self, users: list[float]) -> None:
        unused = [
            shard.name for shard, ranks in zip(self._parallel_module.trained_shards, users, strict=True) if not ranks
        ]
        if unused:
            self._parallel_module.optimizer.clear_gradients()
            raise ValueError(
                f"no gradient was computed for {', '.join(unused)}: freeze parameters that the loss does not use "
                "with `requires_grad_(False)` before you create the trainer. If only some steps use them, add "
                "`0 * parameter.sum()` of each to the loss"
            )

    def _check_count(self, batches: Sequence[Any]) -> None:
        runs_together = self._mesh.layout.tensor > 1 or self._parallel_module.gathers_parameters
        if runs_together and not is_same_on_all_ranks(str(len(batches)), self._mesh):
            raise ValueError(
                "every rank must have the same number of micro-batches: the ranks compute each of them together"
            )
        if not batches:
            raise ValueError("a step or an evaluation must have at least one micro-batch on every rank")

    def _check_buffers(self) -> None:
        if self._checked:
            return
        self._checked = True
        name = first_mismatch(dict(self.module.named_buffers()), self._mesh.device)
        if name is not None:
            raise ValueError(
                f"the buffer `{name}` is no longer the same on every rank after a forward pass: it must not "
                "depend on values that differ between ranks, such as their batches"
            )


def _described(returned: Any) -> str:
    if isinstance(returned, torch.Tensor):
        return f"one tensor of shape {list(returned.shape)}"
    if isinstance(returned, tuple | list):
        return f"({', '.join(_described(one) for one in returned)})"
    name = type(returned).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


@contextmanager
def _explained_sharding() -> Iterator[None]:
    """Add to an error of FSDP what it means for the caller: only while the module runs, FSDP gathers parameters."""
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error) for sign in _SHARDED):
            error.add_note(
                "With ZeRO stages 2 and 3 parameters are whole only while the module itself runs. `loss` must call the "
                "module, not its parts, use its parameters only through it, and the module must return its tensors as "
                "such or in tuples, lists, dicts or dataclasses. Otherwise use `zero_stage` 0 or 1"
            )
        raise
