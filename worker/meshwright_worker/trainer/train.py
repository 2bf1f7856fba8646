"""Training on one rank, from opening its data to the final checkpoint.

1. data: opens the inputs; invalid data, device or configuration is rejected here;
2. rendezvous: creates the process groups of the mesh generation;
3. build: creates this rank's shard of the model and its optimizer;
4. load: reads the newest complete checkpoint, in whatever layout it was written;
5. steps: each is reported; checkpoints are written in the background at every interval;
6. final checkpoint: written before the rank reports that it is done.

Every rank takes each of these steps. Decisions that all ranks must share (which checkpoint, when to stop) depend only
on values that all ranks have.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from meshwright.api.training import TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.models.lora import skipped_targets
from meshwright.protocol.messages import RunConfig
from meshwright.schedules.registry import kind_of
from meshwright_worker.checkpoint.manager import CheckpointManager, manifest_template
from meshwright_worker.checkpoint.manifest import TrainingState
from meshwright_worker.data.batch import make_batch
from meshwright_worker.data.corpus import CorpusError
from meshwright_worker.data.length_balance import RowCost
from meshwright_worker.data.prefetch import Prefetcher, StepSamples
from meshwright_worker.data.sample_assignment import SampleAssignment, combined_identity
from meshwright_worker.data.sample_order import SampleDigest
from meshwright_worker.data.vocabulary_check import check_vocabulary
from meshwright_worker.distributed.device import device_properties
from meshwright_worker.distributed.device_checks import validate_device
from meshwright_worker.distributed.mesh import Mesh, is_same_on_all_ranks, join_mesh
from meshwright_worker.models.lora import is_adapter
from meshwright_worker.pretrained.load import load_pretrained
from meshwright_worker.pretrained.tensor_files import PretrainedError
from meshwright_worker.rank.task import Outcome, RankEvents, RankTask, StepReport
from meshwright_worker.trainer.async_pipeline_trainer import AsyncPipelineTrainer
from meshwright_worker.trainer.evaluation import Evaluation
from meshwright_worker.trainer.mfu import step_flops
from meshwright_worker.trainer.micro_batches import MicroBatches, TokenCounts
from meshwright_worker.trainer.run_inputs import RunInputs, open_inputs
from meshwright_worker.trainer.run_validation import validate_run
from meshwright_worker.trainer.trainer import StepResult, Trainer

log = logging.getLogger(__name__)


def preload() -> None:
    """Import torch and everything that training uses, as a side effect of importing this module. Call before forking
    ranks.

    It starts no thread and touches no device, so forking stays safe.
    """


def train(task: RankTask, events: RankEvents) -> Outcome:
    """Run this rank of the task's mesh generation until training completes or stops.

    Raises:
        InvalidRunError: the run cannot be executed in this layout or on this device, or the model's vocabulary is
            smaller than the corpus needs.
        PretrainedError: the initial weights cannot be used.
        DataError: the corpus is missing, damaged, or not the same on every rank.
        CheckpointMismatchError: the checkpoints belong to another run.
        ForeignCheckpointError: they were written by another version or by a custom module.
        CheckpointVolumeError: a rank cannot read them, or does not see those that rank 0 lists.
        CheckpointError: a checkpoint could not be written.
        DivergedError: loss or gradients are not finite.
        RuntimeError: torch lost the connection to another rank.
    """
    architecture, data, training = validate_run(task.run)
    validate_device(device_properties(task.local_rank), task.local_world_size, training)
    with _phase(events, "data"):
        tokenizer = check_vocabulary(task, architecture, data)
        inputs = open_inputs(task, architecture, data, training)
    stream = inputs.stream
    started = time.monotonic()
    with join_mesh(task) as mesh:
        events.phase("rendezvous", time.monotonic() - started)
        with _phase(events, "build"):
            identity = combined_identity(training, stream.identity, mesh)
            # Stages read tokens and targets independently, so without this check different corpora would train
            # unnoticed.
            if identity is None:
                raise CorpusError("the ranks see different texts: every pod needs the same files, or the same image")
            trainer = build_trainer(task.run, mesh, inputs.samples)
        checkpoint_manager = None
        if task.run.checkpoint is not None and task.checkpoint_dir is not None:
            template = manifest_template(task, architecture, training, identity, mesh)
            template = template.model_copy(update={"tokenizer": tokenizer})
            checkpoint_manager = CheckpointManager(
                task, task.run.checkpoint, task.checkpoint_dir, mesh, events, template
            )
        with _phase(events, "load"):
            load_initial_weights(trainer, architecture, training, mesh)
            state = TrainingState()
            if checkpoint_manager is not None:
                state = checkpoint_manager.load(
                    trainer.shards, trainer.optimizer, trainer.buffers, trainer.outer, trainer.compression_state
                )
            trainer.on_parameters_loaded(state.step)
        trainer.restore_state(state)
        events.running(state.step)
        return _TrainingLoop(task.run, trainer, inputs, checkpoint_manager, mesh, events).run(state)


def build_trainer(run: RunConfig, mesh: Mesh, samples: int = 1) -> Trainer | AsyncPipelineTrainer:
    """Return the trainer of this rank's part. `samples` is the number of samples of its island, see `Trainer`.

    Raises:
        InvalidRunError: the run cannot be executed in this layout.
    """
    architecture, _, training = validate_run(run)
    if mesh.rank == 0 and training.lora is not None and (missing := skipped_targets(training.lora, architecture)):
        log.warning(missing)
    if kind_of(run.parallelism.order).asynchronous and run.pipeline > 1:
        return AsyncPipelineTrainer(run, architecture, training, mesh)
    return Trainer(run, architecture, training, mesh, samples)


def load_initial_weights(
    trainer: Trainer | AsyncPipelineTrainer, model: Architecture, training: TrainingSpec, mesh: Mesh
) -> None:
    """Fill the model from `training.initialWeights`, if it is set. Adapter checkpoints contain only the adapters.

    Raises:
        PretrainedError: the files contain another model, are damaged, or are not the same on every rank.
    """
    if training.initial_weights is None:
        return
    shards = [shard for shard in (*trainer.shards, *trainer.frozen) if not is_adapter(shard.name)]
    fingerprint = load_pretrained(shards, model, Path(training.initial_weights), trainer.buffers)
    if not is_same_on_all_ranks(fingerprint, mesh):
        raise PretrainedError("the ranks see different files in `training.initialWeights`: every pod needs the same")


class _TrainingLoop:
    """Runs the steps from a given state to the end of the run or to a stop."""

    def __init__(
        self,
        run: RunConfig,
        trainer: Trainer | AsyncPipelineTrainer,
        inputs: RunInputs,
        checkpoint_manager: CheckpointManager | None,
        mesh: Mesh,
        events: RankEvents,
    ) -> None:
        architecture, self._data, self._training = validate_run(run)
        self._cost = RowCost.of(architecture)
        self._micro_batches = run.micro_batches
        self._micro_batcher = MicroBatches(run, mesh)
        self._trainer = trainer
        self._stream, self._evaluation = inputs.stream, inputs.evaluation
        self._checkpoint_manager = checkpoint_manager
        self._mesh = mesh
        self._assignment = SampleAssignment.of(self._training, mesh)
        self._islands = run.islands
        self._step_flops = partial(
            step_flops,
            architecture,
            self._training,
            mesh.layout.world_size,
            mesh.device,
            rematerializes=run.parallelism.rematerialize,
        )
        self._full_row_flops = self._step_flops()
        self._events = events
        self._digest = SampleDigest()
        self._unreported = 0.0
        """Seconds of steps without a result yet: a pipeline without flushes reports results later."""
        self._samples = Prefetcher(self._read_samples, mesh.device)

    def run(self, state: TrainingState) -> Outcome:
        """Train until the last step, or until any rank is asked to stop. On return the final state is durable."""
        try:
            return self._run(state)
        finally:
            self._samples.close()

    def _run(self, state: TrainingState) -> Outcome:
        # Rank 0 carries the digest of earlier generations. Each rank adds its part, and saving sums them.
        if self._mesh.rank == 0:
            self._digest.value = state.digest
        first, stopped = state.step + 1, False
        for number in range(first, self._training.steps + 1):
            started_at = time.monotonic()
            state, stopped = self._step(number, state)
            if number == first:
                self._events.phase("first-step", time.monotonic() - started_at)
            if stopped:
                break
            if self._checkpoint_manager is not None:
                self._checkpoint_manager.report()
                if self._checkpoint_manager.due(number):
                    state, stopped = self._drain(state)
                    self._save(state, wait=False)
                    if stopped:
                        break
        state, _ = self._drain(state)
        self._save(state, wait=True)
        self._trainer.close()
        return Outcome.STOPPED if stopped and state.step < self._training.steps else Outcome.COMPLETE

    def _save(self, state: TrainingState, *, wait: bool) -> None:
        trainer = self._trainer
        if self._checkpoint_manager is not None:
            self._checkpoint_manager.save(
                trainer.shards,
                trainer.optimizer,
                state,
                trainer.buffers,
                trainer.outer,
                trainer.compression_state,
                wait=wait,
            )

    def _step(self, number: int, state: TrainingState) -> tuple[TrainingState, bool]:
        started_at = time.monotonic()
        coordinates = self._mesh.coordinates
        batch = self._training.global_batch_size
        consumed = state.samples + batch
        mine = self._samples.take(state.samples, consumed if number < self._training.steps else None)
        read = time.monotonic()
        result = self._trainer.step(number, mine.batch, stop=self._events.stop_requested())
        results = [] if result is None else [result]
        evaluation = self._evaluation if self._evaluation is not None and self._evaluation.due(number) else None
        if evaluation is not None:
            # A pipeline without flushes drains first, so that all stages have the weights after this step.
            results += self._trainer.drain()
        if coordinates.pipeline == coordinates.context == coordinates.tensor == 0:
            self._digest.add(mine.numbers, mine.samples)
        after = TrainingState(step=number, samples=consumed, digest=self._digest.value, loss=state.loss)
        after = self._report_results(results, after, time.monotonic() - started_at, read - started_at, evaluation)
        return self._trainer.update_state(after), any(result.stop for result in results)

    def _drain(self, state: TrainingState) -> tuple[TrainingState, bool]:
        """Finish all started steps; a pipeline without flushes is some steps behind.

        Returns:
            The state after them, and whether any rank was asked to stop in one of them.
        """
        started_at = time.monotonic()
        results = self._trainer.drain()
        stopped = any(result.stop for result in results)
        return (
            self._report_results(results, state, time.monotonic() - started_at, 0.0, None) if results else state
        ), stopped

    def _report_results(
        self,
        results: Sequence[StepResult],
        state: TrainingState,
        seconds: float,
        data_seconds: float,
        evaluation: Evaluation | None,
    ) -> TrainingState:
        """Report results, with an evaluation on the last one if given. Return the state with the last result's loss."""
        if not results:
            self._unreported += seconds
            return state
        if len(results) > 1:
            # Several results arrive at once: divide the elapsed time equally between their steps.
            seconds, self._unreported = (seconds + self._unreported) / len(results), 0.0
        for result in results:
            report = self._report(result, state, seconds, data_seconds / len(results))
            if evaluation is not None and result is results[-1]:
                report = replace(report, evaluation_loss=evaluation.loss(self._trainer, self._mesh))
            self._events.step(report)
        return state.model_copy(update={"loss": results[-1].loss.hex()})

    def _read_samples(self, first: int) -> StepSamples:
        """Read this replica's samples of the step that begins with sample `first`."""
        mine = self._assigned_samples(range(first, first + self._training.global_batch_size))
        samples = self._stream.rows(mine)
        batch = make_batch(samples, self._data, self._stream.separator, mine)
        return StepSamples(mine, samples, self._micro_batcher.preslice(batch))

    def _assigned_samples(self, step: range) -> Sequence[int]:
        """Return the numbers of the samples that this replica takes in a step."""
        if not self._data.balance:
            return self._assignment.replica_samples(step)
        return self._assignment.balanced_samples(
            step, lambda n: self._cost.row(self._stream.documents(n)), self._micro_batches
        )

    def _report(self, result: StepResult, state: TrainingState, seconds: float, data_seconds: float) -> StepReport:
        tokens, flops = self._training.global_batch_size * self._training.sequence_length, self._full_row_flops
        if result.token_counts is not None:
            # Islands exchange results only after a round: multiply this island's counts instead.
            token_counts = TokenCounts(
                result.token_counts.tokens * self._islands, result.token_counts.squares * self._islands
            )
            tokens, flops = token_counts.tokens, self._step_flops(token_counts)
        return StepReport(
            step=result.step,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            learning_rate=result.learning_rate,
            tokens=tokens,
            samples=state.samples - (state.step - result.step) * self._training.global_batch_size,
            seconds=seconds,
            data_seconds=data_seconds,
            model_flops=flops.model,
            hardware_flops=flops.hardware,
            peak_flops=flops.peak,
            experts=result.experts,
            pipeline_bubble=result.bubble,
        )


@contextmanager
def _phase(events: RankEvents, name: str) -> Iterator[None]:
    started_at = time.monotonic()
    yield
    events.phase(name, time.monotonic() - started_at)
