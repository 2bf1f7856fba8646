"""Training without pipeline flushes: each stage updates its own weights, and global results arrive steps later.

`parallel.pipeline.pipedream` defines which weight version each gradient is computed at. A step's gradients are never
complete on all ranks at the same time, so they cannot be clipped by their global norm. A step's result is reported once
every rank has finished the step. Before a checkpoint, and at the end, the pipeline drains: all stages have then made
the same number of updates.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.protocol.run_config import NativeRun
from meshwright.schedules.registry import kind_of
from meshwright_worker.checkpoint.manifest import TrainingState
from meshwright_worker.data.batch import Batch
from meshwright_worker.distributed.mesh import TENSOR, Mesh, new_host_group
from meshwright_worker.distributed.step_clock import PASSES, UPDATE, phase
from meshwright_worker.local_sgd.outer_optimizer import OuterOptimizer
from meshwright_worker.optimizers.build import build_optimizer
from meshwright_worker.optimizers.learning_rate import learning_rate
from meshwright_worker.parallel.data.data_parallel import build_data_parallel
from meshwright_worker.parallel.grad_norm import all_reduce_partial, local_square_sum, scale_and_clip
from meshwright_worker.parallel.parallelize import build_stages
from meshwright_worker.parallel.pipeline.executor import tokens_of_step
from meshwright_worker.parallel.pipeline.p2p import P2PChannels
from meshwright_worker.parallel.pipeline.pipedream import PipeDreamPipeline
from meshwright_worker.parallel.pipeline.slot_times import SlotRecorder
from meshwright_worker.parallel.shards import ParameterShard
from meshwright_worker.parallel.stage_shards import parameter_shards
from meshwright_worker.trainer.evaluation import mean_loss
from meshwright_worker.trainer.loss_anomalies import DivergedError
from meshwright_worker.trainer.micro_batches import MicroBatches, TokenCounts
from meshwright_worker.trainer.trainer import StepResult


class AsyncPipelineTrainer:
    """`Trainer` for asynchronous schedules."""

    def __init__(self, run: NativeRun, mesh: Mesh, *, draw: bool = True) -> None:
        training = run.training
        self._mesh, self._training = mesh, training
        self.stages = build_stages(run, mesh, draw=draw)
        (stage,) = self.stages
        self._micro_batches = MicroBatches(run, mesh)
        shards = parameter_shards(stage.module, stage.distributed, run, mesh)
        self._data_parallel = build_data_parallel(
            run, [stage.module], [shard for shard in shards if shard.parameter.requires_grad], mesh
        )
        self.shards: Sequence[ParameterShard] = self._data_parallel.shards
        self.outer: OuterOptimizer | None = None
        self.compression_state = self._data_parallel.compression_state
        self.frozen: list[ParameterShard] = [shard for shard in shards if not shard.parameter.requires_grad]
        self.buffers: dict[str, torch.Tensor] = {}
        self.optimizer = build_optimizer(self.shards, run, mesh)
        stage_index, stage_count = mesh.coordinates.pipeline, mesh.layout.pipeline
        pairs = {(one, one + 1) for one in range(stage_count - 1)} | {(one + 1, one) for one in range(stage_count - 1)}
        self._pipeline = PipeDreamPipeline(
            stage.module,
            stage_index,
            stage_count,
            double_buffered=kind_of(run.parallelism.order).double_buffered,
            tokens=tokens_of_step(training),
            channels=P2PChannels(mesh, pairs),
            width=run.architecture.hidden_size,
            slices=run.tensor if run.parallelism.sequence else 1,
            update=self._update,
        )
        # Reports are reduced on the host, so that no rank waits for the device of a rank that is steps behind.
        self._reports = new_host_group(timedelta(minutes=30))
        replicas: tuple[dist.ProcessGroup, object] = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
            mesh.layout.shard_groups(), backend="gloo"
        )
        self._host_replica_group, _ = replicas
        self._corrections: dict[int, float] = {}
        self._token_counts: dict[int, TokenCounts] = {}
        _, *others = mesh.coordinates
        self._reports_token_counts = self._micro_batches.padded and not any(others)
        """Whether this rank counts the tokens in the padded rows of its replica."""
        self._step_sums: dict[int, torch.Tensor] = {}
        self._in_flight: deque[tuple[int, torch.Tensor, dist.Work]] = deque()
        self._last_started = self._first_unreported = 0
        self._stop_seen, self._save_seen = False, 0
        self._skipped = 0
        """Steps of the run without an update: bias correction does not count them."""

    def step(self, number: int, batch: Batch, *, stop: bool = False, save: int = 0) -> StepResult | None:
        """Feed the batch of step `number` into the pipeline.

        Returns:
            The result of an earlier step, or None while the pipeline fills.

        Raises:
            DivergedError: that step's loss or gradients are not finite; the weights have already been updated with
                them.
        """
        micro_batches = self._micro_batches.of(batch)
        stage_count = self._mesh.layout.pipeline
        if self._first_unreported == 0:
            self._first_unreported = number
        self._last_started = number
        self._corrections[number] = self._loss_correction(batch)
        self._token_counts[number] = (
            self._micro_batches.token_counts(batch) if self._reports_token_counts else TokenCounts(0, 0)
        )
        with phase(PASSES):
            self._pipeline.feed(number, micro_batches)
        self._start_reduction(number - stage_count + 1, stop, save)
        if len(self._in_flight) <= stage_count:
            return None
        return self._finish_reduction()

    def on_parameters_loaded(self, step: int) -> None:
        """See `Trainer.on_parameters_loaded`: every replica has full parameters."""

    def close(self) -> None:
        """See `Trainer.close`."""

    def update_state(self, state: TrainingState) -> TrainingState:
        """See `Trainer.update_state`: this trainer skips no step, but the run may have with another schedule."""
        return state.model_copy(update={"skipped": self._skipped})

    def restore_state(self, state: TrainingState) -> None:
        """See `Trainer.restore_state`."""
        self._skipped = state.skipped

    @property
    def slot_recorder(self) -> SlotRecorder | None:
        """None: a pipeline without flushes has no step whose slots are its own."""
        return None

    def drain(self) -> list[StepResult]:
        """Drain the pipeline and return the results of all unreported steps. Collective."""
        if self._first_unreported == 0:
            return []
        self._pipeline.drain()
        first = max(self._first_unreported, self._last_started - self._mesh.layout.pipeline + 2)
        for number in range(first, self._last_started + 1):
            self._start_reduction(number, stop=False, save=0)
        results = [
            result for result in (self._finish_reduction() for _ in range(len(self._in_flight))) if result is not None
        ]
        self._first_unreported = 0
        return results

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """See `Trainer.evaluate`. The pipeline must be empty: call `drain` first."""
        return mean_loss(self._pipeline.evaluate, (self._micro_batches.of(batch) for batch in batches), self._mesh)

    def _update(self, number: int, loss: torch.Tensor) -> None:
        """Update this stage's weights, once its gradients of a step are complete."""
        with phase(UPDATE):
            self._apply_gradients(number, loss)

    def _apply_gradients(self, number: int, loss: torch.Tensor) -> None:
        correction = self._corrections.pop(number)
        self._scale_residuals(1.0 / correction)
        gradients = self._data_parallel.reduce()
        self._scale_residuals(correction)
        if self._mesh.layout.tensor > 1:
            all_reduce_partial(self.shards, gradients, self._mesh.group(TENSOR), self._mesh.device)
        squares = local_square_sum(self.shards, gradients).to(self._mesh.device)
        loss = loss.double() if self._mesh.coordinates.tensor == 0 else torch.zeros_like(squares)
        # Stays on the device until it is reported, steps later, so that the host does not wait for this step.
        self._step_sums[number] = torch.stack([loss * correction, squares * correction * correction])
        scale_and_clip(gradients, correction, 0.0, 0.0)
        self.optimizer.step(gradients, learning_rate(number, self._training.steps, self._training.optimizer))

    def _scale_residuals(self, factor: float) -> None:
        """See `Trainer`. No hook has started a reduction: backward passes add to stashed weights."""
        if self.compression_state is not None and factor != 1.0:
            self.compression_state.scale(factor)

    def _loss_correction(self, batch: Batch) -> float:
        """Return the factor that corrects a step's gradient for tokens without a target. Every stage has the targets.

        They are counted before the batch moves to the device, which is busy with earlier steps.
        """
        targets = self._micro_batches.targets(batch).double()
        if self._mesh.layout.shard_ranks > 1:
            dist.all_reduce(targets, group=self._host_replica_group)
        return tokens_of_step(self._training) / max(1.0, float(targets))

    def _start_reduction(self, number: int, stop: bool, save: int) -> None:
        step_sums = self._step_sums.pop(number, None)
        loss, squares = (0.0, 0.0) if step_sums is None else step_sums.tolist()
        sums = torch.tensor(
            [loss, squares, float(stop), float(save), *self._token_counts.pop(number, TokenCounts(0, 0))],
            dtype=torch.float64,
        )
        work = dist.all_reduce(sums, group=self._reports, async_op=True)
        if work is None:
            raise RuntimeError("this rank is not among those that report")
        self._in_flight.append((number, sums, work))

    def _finish_reduction(self) -> StepResult | None:
        number, sums, work = self._in_flight.popleft()
        work.wait()
        loss, squares, stops, saves, *token_numbers = sums.tolist()
        self._save_seen |= int(saves)
        if number < self._first_unreported:
            self._stop_seen = self._stop_seen or stops > 0
            return None
        norm = math.sqrt(squares) if squares >= 0 else math.nan
        if not math.isfinite(loss + norm):
            raise DivergedError(
                f"step {number}: loss {loss}, gradient norm {norm}; a lower `training.optimizer.learningRate` or "
                "longer `warmupSteps` may help: stale weights need smaller steps"
            )
        rate = learning_rate(number, self._training.steps, self._training.optimizer)
        token_counts = TokenCounts(*(int(one) for one in token_numbers)) if self._micro_batches.padded else None
        save, self._save_seen = self._save_seen, 0
        return StepResult(number, loss, norm, rate, stops > 0 or self._stop_seen, save, token_counts=token_counts)
