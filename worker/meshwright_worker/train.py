"""Training on one rank, from the rendezvous to the last checkpoint.

1. rendezvous: the process groups of the mesh generation;
2. build: this rank's shard of the model, its optimizer, the stream of samples;
3. load: the newest whole checkpoint, whatever layout wrote it;
4. steps, each reported, with a checkpoint at every interval written in the background;
5. the last checkpoint, written before the rank says that it is done.

Every rank takes each of these steps, and every decision that all must share (which checkpoint, when to stop) is taken
from numbers that all of them have.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from meshwright.api.training import TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.protocol import RunConfig
from meshwright.schedules.division import ASYNCHRONOUS
from meshwright_worker.checkpoint.manifest import TrainingState
from meshwright_worker.checkpoint.session import CheckpointSession, blank_manifest
from meshwright_worker.data.ahead import Read, ReadAhead
from meshwright_worker.data.balance import Cost, deal
from meshwright_worker.data.corpus import CorpusError
from meshwright_worker.data.digest import SampleDigest
from meshwright_worker.data.instruction import InstructionStream
from meshwright_worker.data.mixed import MixedStream, open_stream
from meshwright_worker.data.packing import batch_of
from meshwright_worker.data.stream import SampleStream
from meshwright_worker.evaluate import Evaluation
from meshwright_worker.mesh import Mesh, joined, same_everywhere
from meshwright_worker.models.lora import is_adapter
from meshwright_worker.outer.text import first_sample, joint_identity, own_data_dir
from meshwright_worker.parallel.context import own_slice
from meshwright_worker.parallel.context_slices import Deal
from meshwright_worker.pretrained.files import PretrainedError
from meshwright_worker.pretrained.load import load_pretrained
from meshwright_worker.stale_step import StaleTrainer
from meshwright_worker.step import StepResult, Trainer
from meshwright_worker.task import Outcome, RankEvents, RankTask, StepReport
from meshwright_worker.utilisation import Work, work_of
from meshwright_worker.validate import validate

log = logging.getLogger(__name__)


def preload() -> None:
    """Nothing beyond importing this module, which brings torch and all that training uses: do it before forking ranks.

    No thread is started and no device is touched, so forking stays safe.
    """


def train(task: RankTask, events: RankEvents) -> Outcome:
    """Run this rank of the task's mesh generation to its end.

    Raises:
        InvalidRunError: the run cannot be executed in this layout.
        PretrainedError: the weights to begin from cannot be used.
        DataError: there is no text to train on, or not the same on every rank.
        CheckpointMismatchError: the checkpoints are another run's.
        CheckpointError: a checkpoint could not be written.
        DivergedError: loss or gradients are not finite.
        RuntimeError: torch lost the connection to another rank.
    """
    architecture, data, training = validate(task.run)
    started = time.monotonic()
    with joined(task) as mesh:
        events.phase("rendezvous", time.monotonic() - started)
        with _phase(events, "build"):
            own_dir = own_data_dir(training, task.data_dir, mesh)
            stream = open_stream(data, own_dir, training.sequence_length, training.seed)
            identity = joint_identity(training, stream.identity, mesh)
            # Stages read tokens and targets independently, so different texts would train without any other sign.
            if identity is None:
                raise CorpusError("the ranks see different texts: every pod needs the same files, or the same image")
            samples = stream.samples_per_epoch if isinstance(stream, SampleStream) else 1
            trainer = trainer_of(task.run, mesh, samples)
            asked = training.evaluation
            evaluation = Evaluation(asked, training, data, task.data_dir) if asked is not None else None
        session = None
        if task.run.checkpoint is not None and task.checkpoint_dir is not None:
            blank = blank_manifest(task, architecture, training, identity, mesh)
            session = CheckpointSession(task, task.run.checkpoint, task.checkpoint_dir, mesh, events, blank)
        with _phase(events, "load"):
            begin_from_weights(trainer, architecture, training, mesh)
            state = TrainingState()
            if session is not None:
                state = session.load(trainer.shards, trainer.optimizer, trainer.buffers, trainer.outer, trainer.memory)
            trainer.loaded(state.step)
        trainer.resume(state)
        events.running(state.step)
        again = task.run.parallelism.rematerialize
        work = work_of(architecture, training, mesh.layout.world_size, mesh.device, rematerializes=again)
        return _Loop(task.run, trainer, stream, session, evaluation, mesh, work, events).run(state)


def trainer_of(run: RunConfig, mesh: Mesh, samples: int = 1) -> Trainer | StaleTrainer:
    """What trains this rank's part; `samples` are those of its island, see `Trainer`.

    Raises:
        InvalidRunError: the run cannot be executed in this layout.
    """
    architecture, _, training = validate(run)
    if run.parallelism.order in ASYNCHRONOUS and run.pipeline > 1:
        return StaleTrainer(run, architecture, training, mesh)
    return Trainer(run, architecture, training, mesh, samples)


def begin_from_weights(
    trainer: Trainer | StaleTrainer, model: Architecture, training: TrainingSpec, mesh: Mesh
) -> None:
    """Fill the model from `training.initialWeights`, if there is any. A checkpoint of adapters holds nothing else.

    Raises:
        PretrainedError: the files hold another model, are damaged, or are not the same on every rank.
    """
    if training.initial_weights is None:
        return
    shards = [shard for shard in (*trainer.shards, *trainer.frozen) if not is_adapter(shard.name)]
    fingerprint = load_pretrained(shards, model, Path(training.initial_weights), trainer.buffers)
    if not same_everywhere(fingerprint, mesh):
        raise PretrainedError("the ranks see different files in `training.initialWeights`: every pod needs the same")


class _Loop:
    """The steps from a state to the end of the run or to a stop."""

    def __init__(
        self,
        run: RunConfig,
        trainer: Trainer | StaleTrainer,
        stream: SampleStream | InstructionStream | MixedStream,
        session: CheckpointSession | None,
        evaluation: Evaluation | None,
        mesh: Mesh,
        work: Work,
        events: RankEvents,
    ) -> None:
        architecture, self._data, self._training = validate(run)
        self._cost, self._deal = Cost.of(architecture), Deal.of(run)
        self._micro_batches = run.micro_batches
        self._trainer = trainer
        self._stream = stream
        self._session = session
        self._evaluation = evaluation
        self._mesh = mesh
        self._work = work
        self._events = events
        self._digest = SampleDigest()
        self._unreported = 0.0
        """Seconds of steps whose results are still to come: a pipeline without a flush tells them later."""
        self._samples = ReadAhead(self._read, mesh.device)

    def run(self, state: TrainingState) -> Outcome:
        """Train until the last step, or until any rank is asked to stop; what was done is durable on return."""
        try:
            return self._run(state)
        finally:
            self._samples.close()

    def _run(self, state: TrainingState) -> Outcome:
        # One rank carries what earlier generations fed; each adds its own part, and saving sums them up.
        if self._mesh.rank == 0:
            self._digest.value = state.digest
        first, stopped = state.step + 1, False
        for number in range(first, self._training.steps + 1):
            began = time.monotonic()
            state, stopped = self._step(number, state)
            if number == first:
                self._events.phase("first-step", time.monotonic() - began)
            if stopped:
                break
            if self._session is not None:
                self._session.report()
                if self._session.due(number):
                    state = self._settle(state)
                    self._save(state, wait=False)
        state = self._settle(state)
        self._save(state, wait=True)
        self._trainer.close()
        return Outcome.STOPPED if stopped and state.step < self._training.steps else Outcome.COMPLETE

    def _save(self, state: TrainingState, *, wait: bool) -> None:
        trainer = self._trainer
        if self._session is not None:
            self._session.save(
                trainer.shards, trainer.optimizer, state, trainer.buffers, trainer.outer, trainer.memory, wait=wait
            )

    def _step(self, number: int, state: TrainingState) -> tuple[TrainingState, bool]:
        began = time.monotonic()
        coordinates = self._mesh.coordinates
        batch = self._training.global_batch_size
        consumed = state.samples + batch
        mine = self._samples.take(state.samples, consumed if number < self._training.steps else None)
        read = time.monotonic()
        result = self._trainer.step(number, mine.batch, stop=self._events.stop_requested())
        results = [] if result is None else [result]
        evaluation = self._evaluation if self._evaluation is not None and self._evaluation.due(number) else None
        if evaluation is not None:
            # A pipeline without a flush drains: all stages' weights are then those after this step.
            results += self._trainer.settle()
        if coordinates.pipeline == coordinates.context == coordinates.tensor == 0:
            self._digest.add(mine.numbers, mine.samples)
        after = TrainingState(step=number, samples=consumed, digest=self._digest.value, loss=state.loss)
        after = self._tell(results, after, time.monotonic() - began, read - began, evaluation)
        return self._trainer.record(after), any(result.stop for result in results)

    def _settle(self, state: TrainingState) -> TrainingState:
        """The state when every update of its steps is made: a pipeline without a flush is some steps behind."""
        began = time.monotonic()
        results = self._trainer.settle()
        return self._tell(results, state, time.monotonic() - began, 0.0, None) if results else state

    def _tell(
        self,
        results: Sequence[StepResult],
        state: TrainingState,
        seconds: float,
        data_seconds: float,
        evaluation: Evaluation | None,
    ) -> TrainingState:
        """Report results, the last of them with an evaluation if there is one; the state with the last one's loss."""
        if not results:
            self._unreported += seconds
            return state
        if len(results) > 1:
            # Of several steps at once each took its share of what has passed.
            seconds, self._unreported = (seconds + self._unreported) / len(results), 0.0
        for result in results:
            report = self._report(result, state, seconds, data_seconds / len(results))
            if evaluation is not None and result is results[-1]:
                report = replace(report, evaluation_loss=evaluation.loss(self._trainer, self._mesh))
            self._events.step(report)
        return state.model_copy(update={"loss": results[-1].loss.hex()})

    def _read(self, first: int) -> Read:
        """What this replica trains on in the step that begins with sample `first`."""
        mine = self._share(range(first, first + self._training.global_batch_size))
        samples = self._stream.rows(mine)
        batch = batch_of(samples, self._data, self._stream.separator, mine)
        return Read(mine, samples, own_slice(batch, self._deal, self._mesh.coordinates.context))

    def _share(self, step: range) -> Sequence[int]:
        """The numbers of the samples that this replica takes of a step's."""
        replicas, own = self._mesh.layout.data, self._mesh.coordinates.data
        if self._data.balance:
            costs = [self._cost.row(self._stream.documents(sample)) for sample in step]
            return [step[row] for row in deal(costs, replicas, self._micro_batches)[own]]
        share = len(step) // replicas
        first = first_sample(self._training, step.start, share, self._mesh)
        return range(first, first + share)

    def _report(self, result: StepResult, state: TrainingState, seconds: float, data_seconds: float) -> StepReport:
        return StepReport(
            step=result.step,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            learning_rate=result.learning_rate,
            tokens=self._training.global_batch_size * self._training.sequence_length,
            samples=state.samples - (state.step - result.step) * self._training.global_batch_size,
            seconds=seconds,
            data_seconds=data_seconds,
            model_flops=self._work.model,
            hardware_flops=self._work.hardware,
            peak_flops=self._work.peak,
            experts=result.experts,
            pipeline_bubble=result.bubble,
        )


@contextmanager
def _phase(events: RankEvents, name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    events.phase(name, time.monotonic() - began)
