"""The steps of a run on one rank: reads samples, trains, evaluates, saves checkpoints, and reports each step."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.manager import CheckpointManager
from meshwright_worker.checkpoint.manifest import AnomalyState, TrainingState
from meshwright_worker.checkpoint.schedule import BUSY, REQUEST
from meshwright_worker.data.batch import make_batch
from meshwright_worker.data.length_balance import RowCost
from meshwright_worker.data.mixture import MixtureStream, Stream
from meshwright_worker.data.prefetch import Prefetcher, StepSamples
from meshwright_worker.data.sample_assignment import SampleAssignment
from meshwright_worker.data.sample_order import MODULUS, SampleDigest
from meshwright_worker.distributed.mesh import START_TIMEOUT, STEP_TIMEOUT, Mesh, set_collective_timeout
from meshwright_worker.distributed.step_clock import phase
from meshwright_worker.distributed.timed_collectives import timed_collectives
from meshwright_worker.parallel.pipeline.slot_times import is_timed
from meshwright_worker.rank.failures import WentBackError
from meshwright_worker.rank.task import Outcome, RankEvents, StepReport, progress_of
from meshwright_worker.trainer.async_pipeline_trainer import AsyncPipelineTrainer
from meshwright_worker.trainer.checkpoint_requests import CheckpointRequests
from meshwright_worker.trainer.evaluation import Evaluation
from meshwright_worker.trainer.long_waits import reporting_compilation, reporting_work
from meshwright_worker.trainer.loss_anomalies import DivergedError
from meshwright_worker.trainer.micro_batches import MicroBatches
from meshwright_worker.trainer.repeated_steps import RepeatedSteps
from meshwright_worker.trainer.step_garbage import StepGarbage
from meshwright_worker.trainer.step_profiler import StepProfiler
from meshwright_worker.trainer.step_reports import StepReports
from meshwright_worker.trainer.trainer import StepResult, Trainer

_CHECKPOINT, _EVALUATION, _REPEAT = "checkpoint", "evaluation", "repeat"
"""Phases of the clock beside those of a step."""


@dataclass(frozen=True, slots=True)
class RunInputs:
    """A rank's inputs."""

    stream: Stream
    evaluation: Evaluation | None
    """None if `training.evaluation` is not set."""

    @property
    def samples(self) -> int:
        """Samples of an epoch, for `FedAvg`; 1 for a mixture, which has no epochs and excludes `FedAvg`."""
        return 1 if isinstance(self.stream, MixtureStream) else self.stream.samples_per_epoch


class TrainingLoop:
    """Runs the steps from a given state to the end of the run or to a stop."""

    def __init__(
        self,
        run: NativeRun,
        trainer: Trainer | AsyncPipelineTrainer,
        inputs: RunInputs,
        checkpoint_manager: CheckpointManager | None,
        mesh: Mesh,
        events: RankEvents,
        *,
        sums_digest: bool = False,
        ranks_per_worker: int = 1,
        unreported: StepResult | None = None,
    ) -> None:
        """`sums_digest`: the steps' results contain the digest of all ranks, which then every rank carries.
        `ranks_per_worker`: see `RepeatedSteps`. `unreported`: the result of the step before, if it is not reported.
        """
        self._unreported_result = unreported
        self._sums_digest = sums_digest
        self._data, self._training = run.data, run.training
        self._cost = RowCost.of(run.architecture)
        self._micro_batches = run.micro_batches
        self._micro_batcher = MicroBatches(run, mesh)
        self._trainer = trainer
        self._stream, self._evaluation = inputs.stream, inputs.evaluation
        self._checkpoint_manager = checkpoint_manager
        self._mesh = mesh
        self._assignment = SampleAssignment.of(self._training, mesh)
        self._repeated_steps: RepeatedSteps | None = None
        if isinstance(trainer, Trainer):
            trainer.before_update = self._wait_for_copy
            self._repeated_steps = RepeatedSteps(self._training, trainer, mesh, ranks_per_worker)
        self._events = events
        tiers = checkpoint_manager.tiers if checkpoint_manager is not None else ()
        self._requests = CheckpointRequests(run, mesh, events, tiers)
        self._digest = SampleDigest()
        self._unreported = 0.0
        """Seconds of steps without a result yet: a pipeline without flushes reports results later."""
        self._stall_seconds = 0.0
        """Time in which steps stood still for a save."""
        self._first = 0
        """The first step of this mesh generation."""
        self._has_evaluated = False
        self._tell_at_work = progress_of(events)
        self._reports = StepReports(run, mesh, trainer, checkpoint_manager)
        self._samples = Prefetcher(self._read_samples, mesh.device)
        self._garbage = StepGarbage(self._training.garbage_collection_steps)
        self._profiler = StepProfiler(mesh.rank, synchronous=run.islands == 1 and isinstance(trainer, Trainer))

    def run(self, state: TrainingState) -> Outcome:
        """Train until the last step, or until any rank is asked to stop. On return the final state is durable."""
        try:
            with (
                timed_collectives(self._mesh, compiles=self._training.compile) as self._clock,
                reporting_compilation(self._events, compiles=self._training.compile),
                self._garbage.controlled(),
            ):
                return self._run(state)
        finally:
            self._samples.close()
            self._profiler.close()

    def _run(self, state: TrainingState) -> Outcome:
        # Rank 0 carries the digest of earlier generations. Each rank adds its part, and saving sums them.
        if self._mesh.rank == 0 or self._sums_digest:
            self._digest.value = state.digest
        self._first = first = state.step + 1
        if self._checkpoint_manager is not None:
            self._requests.postpone(self._checkpoint_manager.overdue(state.step))
        self._save_beginning(state)
        if self._unreported_result is not None:
            state = self._end_interrupted(self._unreported_result, state)
        stopped = False
        for number in range(first, self._training.steps + 1):
            self._wait_for_save(number)
            started_at = time.monotonic()
            self._repeat(number, state)
            self._profiler.before(number)
            state, stopped = self._step(number, state)
            self._profiler.after(number)
            self._garbage.after(number)
            if number == first:
                self._events.phase("first-step", time.monotonic() - started_at)
                set_collective_timeout(STEP_TIMEOUT)
            if stopped:
                break
            if self._checkpoint_manager is not None:
                self._checkpoint_manager.report()
                if self._requests.due(number):
                    state, stopped = self._drain(state)
                    # The results of a pipeline without flushes may say that the save before is still in progress.
                    if tiers := self._requests.due(number):
                        if self._requests.drains:
                            self._checkpoint_manager.report(wait=True)
                        # The last checkpoint is for all tiers, and no step is saved twice.
                        last = stopped or number == self._training.steps
                        self._save(state, wait=False, tiers=None if last else tiers)
                    if stopped:
                        break
        state, _ = self._drain(state)
        self._save(state, wait=True)
        self._trainer.close()
        return Outcome.STOPPED if stopped and state.step < self._training.steps else Outcome.COMPLETE

    def _save_beginning(self, state: TrainingState) -> None:
        """Save what was loaded from another run, on the first tier: from now on the job does not need that run, which
        may remove the checkpoint or have a newer one at the next start.
        """
        if self._checkpoint_manager is not None and self._checkpoint_manager.source:
            own_part = state.model_copy(update={"digest": self._digest.value})
            self._save(own_part, wait=False, tiers=[0])

    def _end_interrupted(self, result: StepResult, state: TrainingState) -> TrainingState:
        """Do what was left of the last step when a loss interrupted it after its update: evaluate, report and save.
        Collective.
        """
        # A save of the generation before is not in progress any more, and whoever was asked to stop has stopped.
        result, due = replace(result, stop=False, save=result.save & ~BUSY), self._evaluation_due(result.step)
        self._requests.record([result])
        self._requests.end_step(result.step)
        state = self._report_results([result], state, 0.0, 0.0, due)
        set_collective_timeout(START_TIMEOUT)  # the first step has not been made
        if tiers := self._requests.due(result.step):
            self._save(state, wait=False, tiers=None if result.step == self._training.steps else tiers)
        return state

    def _evaluation_due(self, step: int) -> Evaluation | None:
        return self._evaluation if self._evaluation is not None and self._evaluation.due(step) else None

    def _repeat(self, number: int, state: TrainingState) -> None:
        """Repeat the gradients of a step on other replicas, if that is due before it. Collective.

        Raises:
            NodeFaultError, CorruptionError, ConnectionError: see `RepeatedSteps.check`.
        """
        if self._repeated_steps is None or not self._repeated_steps.due(number):
            return
        with phase(_REPEAT):
            self._repeated_steps.check(
                number,
                lambda replica: self._read(state.samples, replace(self._assignment, replica=replica)).batch,
            )

    def _wait_for_save(self, number: int) -> None:
        """Let a save in progress end before a step after which another one is due, for a limited time."""
        if self._checkpoint_manager is not None and self._checkpoint_manager.saves:
            started_at = time.monotonic()
            self._checkpoint_manager.wait_before(number)
            self._stall_seconds += time.monotonic() - started_at

    def _save(self, state: TrainingState, *, wait: bool, tiers: Sequence[int] | None = None) -> None:
        started_at, trainer = time.monotonic(), self._trainer
        if self._sums_digest and self._mesh.rank > 0:
            state = state.model_copy(update={"digest": 0})
        if self._checkpoint_manager is not None:
            self._requests.answer(state.step)
            with phase(_CHECKPOINT):
                self._checkpoint_manager.save(
                    trainer.shards,
                    trainer.optimizer,
                    state,
                    trainer.buffers,
                    trainer.outer,
                    trainer.compression_state,
                    wait=wait,
                    tiers=tiers,
                    updates_wait=isinstance(trainer, Trainer) and trainer.outer is None,
                )
        self._stall_seconds += time.monotonic() - started_at

    def _wait_for_copy(self) -> None:
        """An update waits for the copy that is being made of what it changes."""
        if self._checkpoint_manager is not None and self._checkpoint_manager.saves:
            started_at = time.monotonic()
            self._checkpoint_manager.wait_for_copy()
            self._stall_seconds += time.monotonic() - started_at

    def _step(self, number: int, state: TrainingState) -> tuple[TrainingState, bool]:
        started_at = time.monotonic()
        batch = self._training.global_batch_size
        consumed = state.samples + batch
        mine = self._samples.take(state.samples, consumed if number < self._training.steps else None)
        read = time.monotonic()
        result = self._timed_step(number, mine)
        results = [] if result is None else [result]
        evaluation = self._evaluation_due(number)
        if evaluation is not None:
            # A pipeline without flushes drains first, so that all stages have the weights after this step.
            results += self._trainer.drain()
        if any(result.stop for result in results) and number < self._training.steps:
            # The time until the pod is killed is for the checkpoint.
            evaluation = None
        self._requests.record(results)
        self._requests.end_step(number)
        self._add_to_digest(mine, result)
        after = TrainingState(step=number, samples=consumed, digest=self._digest.value, loss=state.loss)
        after = self._report_results(results, after, time.monotonic() - started_at, read - started_at, evaluation)
        for result in results:
            if result.went_back:
                self._go_back(result, consumed)
        return self._trainer.update_state(after), any(result.stop for result in results)

    def _go_back(self, result: StepResult, samples: int) -> NoReturn:
        """Make an older checkpoint the latest one, with the position after this step's samples. Collective.

        If ranks die meanwhile, training continues from what is then the latest checkpoint, at its own position: it may
        meet the same samples again, and goes back again.

        Raises:
            WentBackError: always, unless there is no checkpoint.
            DivergedError: there is none.
        """

        def change(state: TrainingState) -> TrainingState:
            anomalies = state.anomalies or AnomalyState()
            counted = anomalies.model_copy(update={"went_back": anomalies.went_back + 1})
            return state.model_copy(update={"samples": samples, "anomalies": counted})

        manager, spec = self._checkpoint_manager, self._training.anomalies
        state = manager.go_back(result.step, spec.go_back_steps, change) if manager is not None and spec else None
        if state is None:
            raise DivergedError(f"{result.went_back}; there is no checkpoint to go back to")
        raise WentBackError(f"{result.went_back}: went back to step {state.step}, and continue with other samples")

    def _timed_step(self, number: int, mine: StepSamples) -> StepResult | None:
        """Run a step, and time its slots if it is one of those to be shown."""
        recorder = self._trainer.slot_recorder if is_timed(number, self._first) else None
        if recorder is not None:
            recorder.begin(number)
        stop, save = self._events.stop_requested(), REQUEST * self._events.take_checkpoint_request()
        if self._checkpoint_manager is not None:
            save |= self._checkpoint_manager.flags()
        if not self._sums_digest or not isinstance(self._trainer, Trainer):
            return self._trainer.step(number, mine.batch, stop=stop, save=save)
        own = SampleDigest()
        self._add_samples(own, mine)
        return self._trainer.step(number, mine.batch, stop=stop, save=save, digest=own.value)

    def _add_to_digest(self, mine: StepSamples, result: StepResult | None) -> None:
        if not self._sums_digest:
            self._add_samples(self._digest, mine)
        elif result is not None:
            self._digest.value = (self._digest.value + result.digest) % MODULUS

    def _add_samples(self, digest: SampleDigest, mine: StepSamples) -> None:
        """Add this rank's samples to a digest, if it counts those of its replica."""
        where = self._mesh.coordinates
        if where.pipeline == where.context == where.tensor == 0:
            digest.add(mine.numbers, mine.samples)

    def _drain(self, state: TrainingState) -> tuple[TrainingState, bool]:
        """Finish all started steps; a pipeline without flushes is some steps behind.

        Returns:
            The state after them, and whether any rank was asked to stop in one of them.
        """
        started_at = time.monotonic()
        results = self._trainer.drain()
        stopped = any(result.stop for result in results)
        self._requests.record(results)
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
            report = self._reports.report(
                result, state, seconds, data_seconds / len(results), self._clock.take(), self._stall_seconds
            )
            if evaluation is not None and result is results[-1]:
                loss = self._evaluate(evaluation)
                report = replace(report, evaluation_loss=loss)
                state = self._with_evaluation(state, loss)
            if result is results[-1] and (result.stop or state.step == self._training.steps):
                report = self._with_last_best(report)
            self._events.step(report)
            if isinstance(self._trainer, Trainer):
                self._trainer.reported(result.step)
        return state.model_copy(update={"loss": results[-1].loss.hex()})

    def _with_evaluation(self, state: TrainingState, loss: float) -> TrainingState:
        """Return the state with its evaluation loss, if the best checkpoints are retained. If it is one of them, all
        ranks save it after this step. Collective.
        """
        manager = self._checkpoint_manager
        if manager is None or not manager.keeps_best or not math.isfinite(loss):
            return state
        manager.forget_removed()
        if state.step == self._training.steps:
            # The final save does not add tiers to one that has begun after the last step.
            self._requests.record_best(range(len(manager.tiers)))
        else:
            started_at = time.monotonic()
            self._requests.record_best(self._requests.agree_on(manager.best_tiers(state.step, loss)))
            self._stall_seconds += time.monotonic() - started_at
        return state.model_copy(update={"evaluation_loss": loss})

    def _with_last_best(self, report: StepReport) -> StepReport:
        """The report of the last step, after which the tiers are not reported any more. Waits for a save in progress,
        as the final save does anyway: it may be that of the best checkpoint. Collective.
        """
        manager = self._checkpoint_manager
        if manager is None or not manager.keeps_best:
            return report
        manager.report(wait=True)
        return replace(report, tiers=manager.reports() or report.tiers)

    def _evaluate(self, evaluation: Evaluation) -> float:
        """Evaluate, the first time with the time limits of a start: compiled stages compile their forward passes again,
        each when it has received the first hidden states, and the last one waits for all.
        """
        if self._checkpoint_manager is not None:
            self._checkpoint_manager.list_best()
        with phase(_EVALUATION):
            if self._has_evaluated:
                return evaluation.loss(self._trainer, self._mesh, self._tell_at_work)
            self._has_evaluated = True
            set_collective_timeout(START_TIMEOUT)
            with reporting_work(self._events):
                loss = evaluation.loss(self._trainer, self._mesh)
            set_collective_timeout(STEP_TIMEOUT)
        return loss

    def _read_samples(self, first: int) -> StepSamples:
        """Read this replica's samples of the step that begins with sample `first`."""
        return self._read(first, self._assignment)

    def _read(self, first: int, assignment: SampleAssignment) -> StepSamples:
        mine = self._assigned_samples(assignment, range(first, first + self._training.global_batch_size))
        samples = self._stream.rows(mine)
        batch = make_batch(samples, self._data, self._stream.separator, mine)
        return StepSamples(mine, samples, self._micro_batcher.preslice(batch))

    def _assigned_samples(self, assignment: SampleAssignment, step: range) -> Sequence[int]:
        """Return the numbers of the samples that a replica takes in a step."""
        if not self._data.balance:
            return assignment.replica_samples(step)
        return assignment.balanced_samples(
            step, lambda n: self._cost.row(self._stream.documents(n)), self._micro_batches
        )
