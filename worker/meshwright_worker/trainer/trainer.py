"""One optimizer step on all ranks: gradients, one small all-reduce of the step's results, the update."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from meshwright.api.training import AnomalyAction
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.manifest import TrainingState
from meshwright_worker.data.batch import Batch
from meshwright_worker.data.sample_order import MODULUS
from meshwright_worker.distributed.collectives import all_reduce_sum
from meshwright_worker.distributed.mesh import ISLAND, TENSOR, Mesh
from meshwright_worker.distributed.step_clock import PASSES, UPDATE, phase
from meshwright_worker.local_sgd.build import build_outer_optimizer
from meshwright_worker.local_sgd.outer_optimizer import OuterOptimizer, RoundSchedule
from meshwright_worker.local_sgd.parameter_averaging import average_over_islands
from meshwright_worker.models.init_weights import draw_into
from meshwright_worker.optimizers.build import build_optimizer
from meshwright_worker.optimizers.learning_rate import learning_rate
from meshwright_worker.optimizers.master_adamw import MasterAdamW
from meshwright_worker.parallel.data.data_parallel import build_data_parallel
from meshwright_worker.parallel.expert.expert_load import ExpertLoads
from meshwright_worker.parallel.grad_norm import all_reduce_partial, clipped_factor, local_square_sum, scale_and_clip
from meshwright_worker.parallel.parallelize import build_stages
from meshwright_worker.parallel.pipeline.executor import build_executor, tokens_of_step
from meshwright_worker.parallel.pipeline.slot_times import SlotRecorder
from meshwright_worker.parallel.shards import ParameterShard
from meshwright_worker.parallel.stage_shards import parameter_shards, stage_buffers
from meshwright_worker.precision.fp8.scaling_recipe import DelayedScaling
from meshwright_worker.precision.loss_scale import LossScale, scale_loss_gradients
from meshwright_worker.rank.task import ExpertLoad
from meshwright_worker.trainer.early_update import EarlyUpdates
from meshwright_worker.trainer.evaluation import count_targets, mean_loss
from meshwright_worker.trainer.loss_anomalies import Anomaly, DivergedError, LossAnomalies
from meshwright_worker.trainer.micro_batches import MicroBatches, TokenCounts, may_have_ignored_targets

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step; the same values on every rank."""

    step: int
    """The step's number, from 1."""
    loss: float
    """Mean loss over the global batch's targets, before the update."""
    gradient_norm: float
    """Global norm, before clipping."""
    learning_rate: float
    stop: bool
    """Whether any rank was asked to stop."""
    save: int = 0
    """What rank 0 says about checkpoints: see `checkpoint.schedule`."""
    experts: tuple[ExpertLoad, ...] = ()
    """One entry per mixture-of-experts layer."""
    skipped: bool = False
    """Whether nothing was updated, because gradients overflowed fp16 or because of `training.anomalies`."""
    went_back: str = ""
    """Why training must go back to an older checkpoint instead of an update; otherwise empty."""
    bubble: float | None = None
    """See `Executor.bubble`."""
    token_counts: TokenCounts | None = None
    """Content of the padded rows of all replicas of this island; None if rows are never padded."""
    digest: int = 0
    """Sum of what all ranks have added to the data digest in this step, if they say so."""


@dataclass(frozen=True, slots=True)
class ReducedStep:
    """A step whose gradients are summed over replicas: what its update needs, beside the sums over all ranks."""

    number: int
    gradients: list[torch.Tensor]
    results: torch.Tensor
    """What this rank adds to the sums, fp64 [numbers]."""
    residuals: Mapping[str, torch.Tensor] | None
    """Compression residuals from before the step, if the step may be skipped."""


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums of a step over all ranks. Who has them knows that every rank has reduced its gradients."""

    results: torch.Tensor
    """Sum of `ReducedStep.results`."""
    digest: int = 0
    """See `StepResult.digest`."""


class StepGate:
    """Told of each part of a step. This one only watches; recovery in memory stops a step between its parts."""

    wants_digest = False
    """Whether the ranks sum their parts of the data digest in each step."""

    def reduced(self, step: ReducedStep) -> None:
        """A step's gradients are summed over replicas."""

    @contextmanager
    def update(self, sums: StepSums) -> Iterator[None]:
        """All ranks agree on the step, and this rank updates its parameters in the block, without any other rank."""
        yield

    def updated(self, result: StepResult) -> None:
        """The parameters are updated. Called in the block of `update`."""

    def completed(self) -> None:
        """The step is complete on this rank, and the next one has not begun."""

    def reported(self, step: int) -> None:
        """The step is evaluated, if it is one of those that are, and its report is sent."""


class Trainer:
    """This rank's stages, their optimizer and their executor.

    `samples` is the number of samples in this island's corpus, for `FedAvg`. `gate` is told of each part of a step. If
    not `draw`, parameters have no values yet.
    """

    def __init__(
        self, run: NativeRun, mesh: Mesh, samples: int = 1, gate: StepGate | None = None, *, draw: bool = True
    ) -> None:
        model, training = run.architecture, run.training
        self._gate = gate or StepGate()
        self.before_update: Callable[[], object] = lambda: None
        """Called before parameters, moments or anything of `outer` change."""
        self._mesh = mesh
        self._training = training
        self._micro_batches = MicroBatches(run, mesh)
        self.stages = build_stages(run, mesh, draw=draw)
        pipeline = build_executor(self.stages, run, mesh)
        self._executor, self._shared_weights = pipeline.executor, pipeline.shared_weights
        shards = [
            (s.index, shard) for s in self.stages for shard in parameter_shards(s.module, s.distributed, run, mesh)
        ]
        trained = self._shared_weights.deduplicate([s for s in shards if s[1].parameter.requires_grad])
        self.data_parallel = build_data_parallel(run, [stage.module for stage in self.stages], trained, mesh)
        self.shards, self.compression_state = self.data_parallel.shards, self.data_parallel.compression_state
        self.frozen: list[ParameterShard] = [shard for _, shard in shards if not shard.parameter.requires_grad]
        self.buffers = {name: buffer for stage in self.stages for name, buffer in stage_buffers(stage.module).items()}
        self._loads = ExpertLoads(
            [stage.module for stage in self.stages], model, mesh, tokens_of_step(training), run.islands
        )
        self._islands = run.islands
        needs_share = self._loads.any or self.compression_state is not None
        self._may_ignore_targets = needs_share and may_have_ignored_targets(run)
        self.optimizer = build_optimizer(self.shards, run, mesh)
        if draw and run.shards_masters:
            for shard in self.shards:
                draw_into(shard.local, shard.name, shard.shape, shard.box, model, training.seed)
        self._early: EarlyUpdates | None = None
        if training.optimizer.early_launch and isinstance(self.optimizer, MasterAdamW):
            self._early = EarlyUpdates(self.optimizer, training, tokens_of_step(training))
        self._fp8 = DelayedScaling((stage.module for stage in self.stages), mesh)
        self.loss_scale = LossScale.of(training)
        self._anomalies = LossAnomalies(training.anomalies)
        scale_loss_gradients((stage.module for stage in self.stages), self.loss_scale)
        self._rounds = RoundSchedule(training.outer.every_steps if training.outer else 1, training.steps)
        self.outer: OuterOptimizer | None = None
        if training.outer is not None:
            self.outer = build_outer_optimizer(
                training.outer, training, self.data_parallel, self.optimizer, mesh, samples
            )

    def on_parameters_loaded(self, step: int) -> None:
        """Synchronize after loading the checkpoint of `step`, or after initializing parameters. Collective."""
        self.data_parallel.sync_parameters()
        if self.outer is not None:
            self.outer.on_parameters_loaded(step)

    @property
    def slot_recorder(self) -> SlotRecorder | None:
        """Times the slots of some steps of this rank's pipeline; None if it does not report them."""
        return self._executor.recorder

    def inventory(self) -> list[torch.Tensor]:
        """Return every tensor of this rank's state, in an order that depends on its part of the model only."""
        tensors = [shard.local for shard in (*self.shards, *self.frozen)]
        for shard in self.shards:
            tensors += self.optimizer.moments(shard).values()
        return [tensor.detach() for tensor in [*tensors, *self.buffers.values()]]

    def reported(self, step: int) -> None:
        """The step's report is sent, with its evaluation if it has one."""
        self._gate.reported(step)

    def close(self) -> None:
        """Finish after the last step. Collective."""
        self.data_parallel.finish()
        if self.outer is not None:
            self.outer.close()

    def step(self, number: int, batch: Batch, *, stop: bool = False, save: int = 0, digest: int = 0) -> StepResult:
        """Train on this replica's batch of step `number` (from 1).

        `stop`: this rank was asked to stop. The result's `stop` says whether any rank was, so that all ranks stop after
        the same step. `save`: what rank 0 says about checkpoints, 0 on others. `digest` is what this rank adds to
        the data digest, if the gate wants it.

        Raises:
            DivergedError: loss or gradients are not finite (in fp16: at any loss scale), or another anomaly for which
                `training.anomalies` has `Fail`; no parameter was changed.
        """
        reduced = self._reduce(number, batch, (stop, save))
        self._gate.reduced(reduced)
        sums = self._agree(reduced, digest)
        with self._gate.update(sums):
            result = self.update(reduced, sums)
            self._gate.updated(result)
        if not (result.skipped or result.went_back):
            with phase(UPDATE):
                self.data_parallel.sync_parameters()
        self._gate.completed()
        return result

    def _reduce(self, number: int, batch: Batch, requests: tuple[bool, int]) -> ReducedStep:
        """Run the passes of a step, and sum its gradients over replicas. Collective."""
        if self.outer is not None:
            self.outer.begin_step()
        micro_batches, token_counts = self._micro_batches.of(batch), self._token_counts(batch)
        share = self._target_share(micro_batches)
        self._loads.scale_losses(self.loss_scale.value * share)
        residuals = None
        if self.compression_state is not None and self._training.may_skip_updates:
            residuals = self.compression_state.tensors()
        self._scale_residuals(share)
        with phase(PASSES):
            replica_loss = self._executor.run(micro_batches)
        gradients = self._gradients()
        self._scale_residuals(1.0 / share)
        self._fp8.advance()
        squares = local_square_sum(self.shards, gradients).to(self._mesh.device)
        results = self._local_results(replica_loss, squares, micro_batches, requests, token_counts)
        return ReducedStep(number, gradients, results, residuals)

    def _agree(self, reduced: ReducedStep, digest: int) -> StepSums:
        """Sum the step's results over the island, in one small collective: the only time the host waits for the
        device.
        """
        total = None
        if self._gate.wants_digest:
            total = torch.tensor([digest], dtype=torch.int64, device=self._mesh.device)
            # Sums wrap modulo 2^64, which 2^63 divides.
            all_reduce_sum(total, self._mesh.island_group)
        sums = reduced.results.clone()
        all_reduce_sum(sums, self._mesh.island_group)
        if self.slot_recorder is not None:
            self.slot_recorder.end()
        return StepSums(sums, int(total.item()) % MODULUS if total is not None else 0)

    def update(self, reduced: ReducedStep, sums: StepSums) -> StepResult:
        """Update this rank's shards with a step's gradients. Needs no other rank, except with `training.outer`."""
        self.before_update()
        number, digest = reduced.number, sums.digest
        rate = learning_rate(number, self._training.steps, self._training.optimizer)
        if self._early is None:
            results = sums.results.tolist()
        else:
            results = self._early.launch(reduced.gradients, sums.results, rate)
        # Losses were divided by the step's maximum number of targets; `tokens` is the actual number.
        (loss, norm, tokens, stopping, saving), token_counts, expert_counts, loads = self._parse(sums.results, results)
        correction = tokens_of_step(self._training) / max(1.0, tokens)
        loss, correction = loss * correction, correction / self.loss_scale.value
        norm *= correction
        result = StepResult(number, loss, norm, rate, stopping, saving, loads, token_counts=token_counts, digest=digest)
        residuals = reduced.residuals
        if not math.isfinite(loss + norm) and self.loss_scale.may_overflow:
            self._skip_overflow(residuals)
            return replace(result, skipped=True)
        if (anomaly := self._anomalies.check(number, loss, norm)) is not None:
            if self._early is not None:
                self._early.withdraw()
            return self._handle(anomaly, result, residuals)
        self._anomalies.record_update(loss, norm)
        with phase(UPDATE):
            if self._early is None:
                self._scale_and_clip(reduced.gradients, correction, norm)
            stopping = self._update(number, reduced.gradients, rate, expert_counts, stop=stopping)
        return replace(result, stop=stopping, bubble=self._executor.bubble)

    def _scale_and_clip(self, gradients: list[torch.Tensor], factor: float, norm: float) -> None:
        limit = self._training.optimizer.gradient_clip
        if isinstance(self.optimizer, MasterAdamW):
            self.optimizer.factor = clipped_factor(factor, norm, limit)
        else:
            scale_and_clip(gradients, factor, norm, limit)

    def _skip_overflow(self, residuals: Mapping[str, torch.Tensor] | None) -> None:
        """Drop gradients that overflowed fp16, lower the loss scale, and restore the compression residuals from before
        the step.
        """
        scale = self.loss_scale.value
        self.loss_scale.record_overflow()
        self.optimizer.clear_gradients()
        self._rescale(residuals, scale)

    def _handle(self, anomaly: Anomaly, result: StepResult, residuals: Mapping[str, torch.Tensor] | None) -> StepResult:
        """Do what `training.anomalies` says, which is never an update.

        Raises:
            DivergedError: it says `Fail`.
        """
        if anomaly.action is AnomalyAction.FAIL:
            hint = (
                "a lower `training.optimizer.learningRate`, longer `warmupSteps` or a smaller `gradientClip` may help"
            )
            raise DivergedError(f"{anomaly.message}; {hint}")
        self.optimizer.clear_gradients()
        if anomaly.action is AnomalyAction.GO_BACK:
            return replace(result, went_back=anomaly.message)
        if self._mesh.rank == 0:
            log.warning("%s: skipped", anomaly.message)
        self._anomalies.record_skip()
        self._rescale(residuals, self.loss_scale.value)
        return replace(result, skipped=True)

    def _update(
        self, number: int, gradients: list[torch.Tensor], rate: float, expert_counts: torch.Tensor, *, stop: bool
    ) -> bool:
        """Update shards, unless that is done, loss scale and router biases; at the end of a round, synchronize the
        islands.

        Returns:
            Whether to stop after this step.
        """
        if self.outer is not None:
            self.outer.update(gradients, rate)
            # Only this island knows of the stop request until the round ends, so stop there.
            stop = self._rounds.ends_round(number) and self.outer.synchronize(stop=stop)
        elif self._early is None:
            self.optimizer.step(gradients, rate)
        scale = self.loss_scale.value
        self.loss_scale.record_success()
        if self.loss_scale.value != scale and self.compression_state is not None:
            self._rescale(self.compression_state.tensors(), scale)
        self._loads.move_biases(expert_counts)
        if self.outer is not None and self._rounds.ends_round(number):
            # Router biases have just been moved, by each island's own expert loads.
            average_over_islands(
                list(self.buffers.values()), self.outer.weight, self._mesh.group(ISLAND), self._mesh.device
            )
        return stop

    def _target_share(self, micro_batches: Sequence[Batch]) -> torch.Tensor | float:
        """Return the share of this step's tokens that have a target, fp64 [].

        Gradients are divided by it, whereas load-balancing losses count every token, and residuals of compressed
        gradients come from steps with other shares. Collective if some tokens may have no target.
        """
        if not self._may_ignore_targets:
            return 1.0
        targets = self._targets(micro_batches)
        all_reduce_sum(targets, self._mesh.island_group)
        # An island processes one part of a step's tokens.
        return targets.clamp(min=1.0) * self._islands / tokens_of_step(self._training)

    def _targets(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Return this rank's part of a step's targets, fp64 []. Every stage has them, so only one rank counts them."""
        _, pipeline, _, tensor = self._mesh.coordinates
        return count_targets(micro_batches).double() * (pipeline == tensor == 0)

    def _scale_residuals(self, factor: torch.Tensor | float) -> None:
        """Multiply compression residuals by the share of targets before a step, and divide them by it after it. Between
        steps they are in units of updates: a step with few targets would multiply what others have left out.
        """
        if self.compression_state is not None and self._may_ignore_targets:
            self.compression_state.scale(factor)

    def _rescale(self, residuals: Mapping[str, torch.Tensor] | None, scale: float) -> None:
        """Convert compression residuals, taken at loss scale `scale`, to the current loss scale and store them."""
        if self.compression_state is not None and residuals is not None:
            self.compression_state.load_state_dict(
                {name: t * (self.loss_scale.value / scale) for name, t in residuals.items()}
            )

    def _gradients(self) -> list[torch.Tensor]:
        gradients = self.data_parallel.reduce()
        # Both are sums. The sums over replicas come first, since they may overlap the backward pass.
        self._shared_weights.sum_gradients()
        if self._mesh.layout.tensor > 1:
            all_reduce_partial(self.shards, gradients, self._mesh.group(TENSOR), self._mesh.device)
        return gradients

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the mean loss over the targets of all batches: this replica passes its part, every rank gets the same
        value.
        """
        loss = mean_loss(self._executor.evaluate, (self._micro_batches.of(batch) for batch in batches), self._mesh)
        self._fp8.discard_observed()
        return loss

    def gradient_digests(self, batch: Batch) -> torch.Tensor:
        """Run the passes of this replica's batch, and return digests of the gradients, summed over replicas, of this
        rank's shards: int64 [shards]. Changes nothing. Collective.
        """
        self._executor.run(self._micro_batches.of(batch))
        digests = torch.stack([_sum_of_bits(gradient) for gradient in self._gradients()])
        self.optimizer.clear_gradients()
        self._fp8.discard_observed()
        return digests

    def _token_counts(self, batch: Batch) -> TokenCounts | None:
        """Return this rank's token counts of padded rows: one rank per replica counts, the others return 0."""
        if not self._micro_batches.padded:
            return None
        _, *others = self._mesh.coordinates
        return TokenCounts(0, 0) if any(others) else self._micro_batches.token_counts(batch)

    def drain(self) -> list[StepResult]:
        """Return results that were not reported yet: none, since `step` returns each result itself."""
        return []

    def update_state(self, state: TrainingState) -> TrainingState:
        """Return `state` with this trainer's state outside of tensors."""
        scale, anomalies = self.loss_scale, self._anomalies
        state = state.model_copy(update={"skipped": scale.skipped + anomalies.skipped, "anomalies": anomalies.state})
        return state.model_copy(update={"loss_scale": scale.value, "steady": scale.steady}) if scale.dynamic else state

    def restore_state(self, state: TrainingState) -> None:
        """Restore what `update_state` stored. `CheckpointManager` loads the optimizer's state."""
        self._anomalies.restore(state.anomalies)
        self.loss_scale.skipped = state.skipped - self._anomalies.skipped
        if self.loss_scale.dynamic:
            self.loss_scale.steady = state.steady
            self.loss_scale.value = state.loss_scale or self.loss_scale.value

    def _local_results(
        self,
        replica_loss: torch.Tensor,
        squares: torch.Tensor,
        micro_batches: Sequence[Batch],
        requests: tuple[bool, int],
        token_counts: TokenCounts | None,
    ) -> torch.Tensor:
        """Return what this rank adds to the step's results, fp64 [numbers] on the device."""
        _, _, _, tensor = self._mesh.coordinates
        # Pipeline stages without a loss contribute 0.
        loss = replica_loss.double() if tensor == 0 else torch.zeros_like(squares)
        targets = self._targets(micro_batches)
        reported_numbers = [torch.full_like(squares, float(number)) for number in (*requests, *(token_counts or ()))]
        return torch.cat([torch.stack([loss, squares, targets, *reported_numbers]), self._loads.take()])

    def _parse(
        self, sums: torch.Tensor, results: list[float]
    ) -> tuple[tuple[float, float, float, bool, int], TokenCounts | None, torch.Tensor, tuple[ExpertLoad, ...]]:
        """Parse the sums of all ranks' results, which are `results` on the host.

        Returns:
            Loss, gradient norm, number of targets, whether any rank is to stop, and what to save; content of padded
            rows; expert counts on the device; expert loads for the report.
        """
        counted = 2 if self._micro_batches.padded else 0
        total_loss, total_squares, tokens, stops, saves, *rest = results
        token_sums, expert_counts = rest[:counted], rest[counted:]
        total = TokenCounts(*(int(number) for number in token_sums)) if token_sums else None
        agreed = total_loss, math.sqrt(total_squares), tokens, stops > 0, int(saves)
        return agreed, total, sums[len(sums) - len(expert_counts) :], self._loads.to_reports(expert_counts)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of a tensor's elements, taken as integers, int64 []: no change of one element leaves it the same."""
    # Adding zero makes -0 and 0 the same number.
    return (tensor.detach() + 0.0).contiguous().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)
