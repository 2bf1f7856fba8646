"""One optimizer step on all ranks: gradients, one small reduction that tells every rank everything, the update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from meshwright.api.training import TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.protocol import RunConfig
from meshwright_worker.checkpoint.manifest import TrainingState
from meshwright_worker.data.batch import Batch
from meshwright_worker.evaluate import mean_loss, targets_of
from meshwright_worker.fp8.history import Fp8History
from meshwright_worker.loss_scale import LossScale, scale_gradients_of
from meshwright_worker.mesh import ISLAND, TENSOR, Mesh
from meshwright_worker.micro_batches import Fed, MicroBatches, may_ignore
from meshwright_worker.optimizer import learning_rate
from meshwright_worker.optimizers.build import build_optimizer
from meshwright_worker.outer.averaging import average
from meshwright_worker.outer.choose import outer_of
from meshwright_worker.outer.outer import Outer, Rounds
from meshwright_worker.parallel.apply import build_stages
from meshwright_worker.parallel.collectives import sum_over
from meshwright_worker.parallel.expert_load import ExpertLoads
from meshwright_worker.parallel.gradients import rescale, square_sum, sum_partial
from meshwright_worker.parallel.replicas import replicas_of
from meshwright_worker.parallel.shards import Shard, buffers_of, shards_of
from meshwright_worker.pipeline.assemble import assemble
from meshwright_worker.pipeline.executor import tokens_of_step
from meshwright_worker.task import ExpertLoad


class DivergedError(ArithmeticError):
    """Loss or gradients are no longer finite numbers."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step came to; the same numbers on every rank."""

    step: int
    """Its number, from 1."""
    loss: float
    """Mean loss over the global batch's targets, before the update."""
    gradient_norm: float
    """Global norm, before clipping."""
    learning_rate: float
    stop: bool
    """Whether any rank was asked to stop."""
    experts: tuple[ExpertLoad, ...] = ()
    """Mixture by mixture."""
    skipped: bool = False
    """Whether gradients overflowed fp16, and nothing was updated."""
    bubble: float | None = None
    """See `Executor.bubble`."""
    fed: Fed | None = None
    """What the rows of all replicas that take the step together hold; None where rows are never padded."""


class Trainer:
    """The model's stages, their optimizer and the way to run them on this rank.

    `samples` is the number of samples of this island's own text, for `FedAvg`.
    """

    def __init__(
        self, run: RunConfig, model: Architecture, training: TrainingSpec, mesh: Mesh, samples: int = 1
    ) -> None:
        self._mesh = mesh
        self._training = training
        self._micro_batches = MicroBatches(run, mesh)
        self.stages = build_stages(run, model, mesh)
        pipeline = assemble(self.stages, run, model, mesh)
        self._executor, self._copies = pipeline.executor, pipeline.copies
        shards = [(s.index, shard) for s in self.stages for shard in shards_of(s.module, s.distributed, run, mesh)]
        held = self._copies.settle([s for s in shards if s[1].parameter.requires_grad])
        self.replicas = replicas_of(run, held, mesh)
        self.shards, self.memory = self.replicas.shards, self.replicas.memory
        self.frozen: list[Shard] = [shard for _, shard in shards if not shard.parameter.requires_grad]
        self.buffers = {name: buffer for stage in self.stages for name, buffer in buffers_of(stage.module).items()}
        self._loads = ExpertLoads(
            [stage.module for stage in self.stages], model, mesh, tokens_of_step(training), run.islands
        )
        self._islands = run.islands
        self._balances_some = self._loads.any and may_ignore(run)
        self.optimizer = build_optimizer(self.shards, training, mesh)
        self._fp8 = Fp8History((stage.module for stage in self.stages), mesh)
        self.loss_scale = LossScale.of(training)
        scale_gradients_of((stage.module for stage in self.stages), self.loss_scale)
        self._rounds = Rounds(training.outer.every_steps if training.outer else 1, training.steps)
        self.outer: Outer | None = None
        if training.outer is not None:
            self.outer = outer_of(training.outer, training, self.replicas, self.optimizer, mesh, samples)

    def loaded(self, step: int) -> None:
        """Parameters were loaded from the checkpoint of `step`, or were just initialized. Collective."""
        self.replicas.publish()
        if self.outer is not None:
            self.outer.loaded(step)

    def close(self) -> None:
        """Training is over. Collective."""
        if self.outer is not None:
            self.outer.close()

    def step(self, number: int, batch: Batch, *, stop: bool = False) -> StepResult:
        """Train on this replica's batch of step `number` (from 1).

        `stop` is this rank's wish to stop after the step; the result says whether any rank has it, so all ranks act
        alike.

        Raises:
            DivergedError: loss or gradients are not finite, in fp16 at any scale; no parameter was changed.
        """
        if self.outer is not None:
            self.outer.before()
        parts, fed = self._micro_batches.of(batch), self._fed(batch)
        self._loads.scale_losses(self.loss_scale.value * self._predicted(parts))
        left_out = self.memory.tensors() if self.memory is not None and self.loss_scale.dynamic else None
        replica_loss = self._executor.run(parts)
        gradients = self._gradients()
        self._fp8.advance()
        # Losses were divided by the tokens that a step may have; this many of them had a target.
        (loss, norm, tokens, stopping), fed, counted, loads = self._agree(
            replica_loss, square_sum(self.shards, gradients).to(self._mesh.device), parts, stop, fed
        )
        share = tokens_of_step(self._training) / max(1.0, tokens)
        loss, share = loss * share, share / self.loss_scale.value
        norm *= share
        rate = learning_rate(number, self._training.steps, self._training.optimizer)
        scale = self.loss_scale.value
        if not math.isfinite(loss + norm):
            if self.loss_scale.skip():
                self.optimizer.forget()
                self._rescale(left_out, scale)
                return StepResult(number, loss, norm, rate, stopping, loads, skipped=True, fed=fed)
            raise DivergedError(
                f"step {number}: loss {loss}, gradient norm {norm}; a lower `training.optimizer.learningRate`, longer "
                "`warmupSteps` or a smaller `gradientClip` may help"
            )
        optimizer = self._training.optimizer
        rescale(gradients, share, norm, optimizer.gradient_clip)
        if self.outer is None:
            self.optimizer.step(gradients, rate)
        else:
            self.outer.update(gradients, rate)
            # A single pod cannot stop alone: until islands meet, only its own knows of the wish.
            stopping = self._rounds.over(number) and self.outer.meet(stop=stopping)
        self.loss_scale.passed()
        if self.loss_scale.value != scale and self.memory is not None:
            self._rescale(self.memory.tensors(), scale)
        self.replicas.publish()
        self._loads.move_biases(counted)
        if self.outer is not None and self._rounds.over(number):
            # Routers' biases have just moved, by each island's own loads.
            average(list(self.buffers.values()), self.outer.weight, self._mesh.group(ISLAND), self._mesh.device)
        return StepResult(number, loss, norm, rate, stopping, loads, bubble=self._executor.bubble, fed=fed)

    def _predicted(self, parts: Sequence[Batch]) -> torch.Tensor | float:
        """The share of this step's tokens that have a target, fp64 []: gradients are divided by it, and the losses that
        balance experts count every token. Collective where some may have none.
        """
        if not self._balances_some:
            return 1.0
        targets = self._targets(parts)
        sum_over(targets, self._mesh.together)
        # An island has its part of a step's tokens.
        return targets.clamp(min=1.0) * self._islands / tokens_of_step(self._training)

    def _targets(self, parts: Sequence[Batch]) -> torch.Tensor:
        """This rank's part of a step's targets, fp64 []: every stage has them, and one rank tells."""
        _, pipeline, _, tensor = self._mesh.coordinates
        return targets_of(parts).double() * (pipeline == tensor == 0)

    def _rescale(self, left_out: Mapping[str, torch.Tensor] | None, scale: float) -> None:
        """Remember what compression left out, when the loss scale was `scale`, in that of now."""
        if self.memory is not None and left_out is not None:
            self.memory.recall({name: t * (self.loss_scale.value / scale) for name, t in left_out.items()})

    def _gradients(self) -> list[torch.Tensor]:
        gradients = self.replicas.reduce()
        # Sums all: those over replicas come first, since they may be under way while backward runs.
        self._copies.add_up()
        if self._mesh.layout.tensor > 1:
            sum_partial(self.shards, gradients, self._mesh.group(TENSOR), self._mesh.device)
        return gradients

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """The mean loss over the targets of batches, each this replica's part; the same number on every rank."""
        loss = mean_loss(self._executor.evaluate, (self._micro_batches.of(batch) for batch in batches), self._mesh)
        self._fp8.forget()
        return loss

    def _fed(self, batch: Batch) -> Fed | None:
        """What this rank tells of padded rows: one rank of a replica speaks for all."""
        if not self._micro_batches.padded:
            return None
        _, *others = self._mesh.coordinates
        return Fed(0, 0) if any(others) else self._micro_batches.fed(batch)

    def settle(self) -> list[StepResult]:
        """What steps came to that was not told yet, before a checkpoint and at the end: nothing, every step waits."""
        return []

    def record(self, state: TrainingState) -> TrainingState:
        """`state` with what this trainer has to remember beside its tensors."""
        scale = self.loss_scale
        if not scale.dynamic:
            return state
        more = {"skipped": scale.skipped, "loss_scale": scale.value, "steady": scale.steady}
        return state.model_copy(update=more)

    def resume(self, state: TrainingState) -> None:
        """Go on from a state that `record` has seen. The optimizer's state is loaded by the checkpoint's session."""
        if self.loss_scale.dynamic:
            self.loss_scale.skipped, self.loss_scale.steady = state.skipped, state.steady
            self.loss_scale.value = state.loss_scale or self.loss_scale.value

    def _agree(
        self, replica_loss: torch.Tensor, squares: torch.Tensor, parts: Sequence[Batch], stop: bool, fed: Fed | None
    ) -> tuple[tuple[float, float, float, bool], Fed | None, torch.Tensor, tuple[ExpertLoad, ...]]:
        """Loss, norm, targets and stop flag; what padded rows hold; the experts' counts on the device, and their sense.

        All travel in one reduction: one small collective a step, and the one time that the host waits for the device.
        """
        _, _, _, tensor = self._mesh.coordinates
        # Ranks of a pipeline that compute no loss have 0.
        loss = replica_loss.double() if tensor == 0 else torch.zeros_like(squares)
        targets = self._targets(parts)
        known = [torch.full_like(squares, float(number)) for number in (stop, *(fed or ()))]
        own = torch.stack([loss, squares, targets, *known])
        sums = torch.cat([own, self._loads.take()])
        sum_over(sums, self._mesh.together)
        total_loss, total_squares, tokens, stops, *rest = sums.tolist()
        held, counted = rest[: len(known) - 1], rest[len(known) - 1 :]
        total = Fed(*(int(number) for number in held)) if held else None
        agreed = total_loss, math.sqrt(total_squares), tokens, stops > 0
        return agreed, total, sums[len(own) :], self._loads.told(counted)
