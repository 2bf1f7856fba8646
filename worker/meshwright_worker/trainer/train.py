"""Training on one rank, from opening its data to the final checkpoint.

1. data: opens the inputs; invalid data, device or configuration is rejected here;
2. rendezvous: creates the process groups of the mesh generation;
3. build: creates this rank's shard of the model and its optimizer;
4. load: reads the latest complete checkpoint, in whatever layout it was written, or draws initial weights;
5. steps: each is reported; checkpoints are written in the background at every interval (`training_loop`);
6. final checkpoint: written before the rank reports that it is done.

Every rank takes each of these steps. Decisions that all ranks must share (which checkpoint, when to stop) depend only
on values that all ranks have. Before the rendezvous a rank takes part in no collective: peers may see other files and
already wait there. A rank that finds an invalid run or invalid inputs reports the error and exits, and its agent's
report stops the peers. Step 1 reads file lists, manifests, headers, and records that have to be tokenized anyway;
tokens are verified as they are read (`meshwright.data.checksums`).
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from meshwright.api.training import ActivationCheckpointing
from meshwright.models.architecture import Architecture
from meshwright.models.huggingface.reader import parse_config
from meshwright.models.lora import skipped_targets
from meshwright.protocol.run_config import NativeRun
from meshwright.rules.facts import facts_of_run
from meshwright.rules.likely_mistakes import beyond_trained_length, likely_mistakes
from meshwright.rules.validation import run_problems
from meshwright.schedules.registry import kind_of
from meshwright_worker.checkpoint.manager import CheckpointManager, manifest_template
from meshwright_worker.checkpoint.manifest import Origin, TokenizerRecord, TrainingState
from meshwright_worker.checkpoint.provenance import provenance_of
from meshwright_worker.data.corpus import CorpusError
from meshwright_worker.data.epochs import data_use
from meshwright_worker.data.mixture import open_streams
from meshwright_worker.data.sample_assignment import combined_identity, is_federated, island_data_dir
from meshwright_worker.distributed.device import device_properties
from meshwright_worker.distributed.device_checks import validate_device
from meshwright_worker.distributed.mesh import START_TIMEOUT, Mesh, join_mesh, set_collective_timeout
from meshwright_worker.pretrained.base_tokenizer import other_tokenizer
from meshwright_worker.pretrained.load import check_pretrained
from meshwright_worker.pretrained.tensor_files import CONFIG
from meshwright_worker.rank.failures import InvalidRunError, PretrainedError
from meshwright_worker.rank.task import Outcome, RankEvents, RankTask, WorkProgress
from meshwright_worker.tracking.tracked_events import tracked
from meshwright_worker.trainer.async_pipeline_trainer import AsyncPipelineTrainer
from meshwright_worker.trainer.evaluation import Evaluation
from meshwright_worker.trainer.initial_state import load_state
from meshwright_worker.trainer.trainer import StepGate, StepResult, Trainer
from meshwright_worker.trainer.training_loop import RunInputs, TrainingLoop
from meshwright_worker.trainer.vocabulary_check import check_vocabulary
from meshwright_worker.trainer.warm_up import warm_up

log = logging.getLogger(__name__)


def preload() -> None:
    """Import torch and everything that every run uses, as a side effect of importing this module. Call before forking
    ranks.

    It starts no thread and touches no device, so forking stays safe.
    """


def preload_for(run: NativeRun) -> None:
    """Import what only some runs use, for this one. Call before forking its ranks, or each imports it by itself."""
    training = run.training
    # Checkpoints of activations import it at their first use, and it takes half as long as torch itself.
    if training.compile or training.checkpointing is not ActivationCheckpointing.NONE:
        importlib.import_module("torch._dynamo")


def train(task: RankTask[NativeRun], events: RankEvents) -> Outcome:
    """Run this rank of the task's mesh generation until training completes or stops.

    Raises:
        InvalidRunError: the run cannot be executed in this layout or on this device, or the model's vocabulary is
            smaller than the corpus needs.
        PretrainedError: the initial weights cannot be used.
        DataError: the corpus is missing, damaged, or not the same on every rank.
        CheckpointMismatchError: the checkpoints belong to another run.
        ResumeSourceError: training cannot begin from the checkpoint in `checkpoint.resumeFrom`.
        ForeignCheckpointError: they were written by another version or by a custom module.
        CheckpointVolumeError: a rank cannot read them, or does not see those that rank 0 lists.
        CheckpointError: a checkpoint could not be written.
        DivergedError: loss or gradients are not finite.
        RuntimeError: torch lost the connection to another rank.
    """
    opened = open_run(task, events)
    started = time.monotonic()
    with join_mesh(task) as mesh:
        events.phase("rendezvous", time.monotonic() - started)
        return train_on_mesh(task, events, opened, mesh)


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """What a rank opens before it meets others."""

    inputs: RunInputs
    tokenizer: TokenizerRecord | None


class Memory(Protocol):
    """Where a rank's state is held when its generation is interrupted."""

    @property
    def gate(self) -> StepGate:
        """Stops steps between their parts."""

    def formed(self) -> None:
        """All groups of the generation exist."""

    @property
    def origin(self) -> Origin | None:
        """What the checkpoints of the state that was restored say about the beginning of its run."""

    @property
    def unreported(self) -> StepResult | None:
        """The result of the last step, if ranks hold its state and it was interrupted before its report. After
        `begin`.
        """

    def restore(self, trainer: Trainer, mesh: Mesh) -> TrainingState | None:
        """Fill the trainer with a state that ranks hold, if the generation goes on from one. Collective."""

    def begin(self, trainer: Trainer, state: TrainingState, origin: Origin | None) -> None:
        """The trainer has its state, which is held from now on, with what its checkpoints say about the beginning."""


def open_run(task: RankTask[NativeRun], events: RankEvents) -> OpenedRun:
    """Check the run and its device, and open its data. Contacts no other rank.

    Raises:
        InvalidRunError, PretrainedError, DataError: as `train`.
    """
    validate_run(task.run)
    validate_device(device_properties(task.local_rank), task.local_world_size, task.run.training)
    with _phase(events, "data"):
        tokenizer = check_vocabulary(task)
        return OpenedRun(open_inputs(task, WorkProgress(events)), tokenizer)


def train_on_mesh(
    task: RankTask[NativeRun], events: RankEvents, opened: OpenedRun, mesh: Mesh, memory: Memory | None = None
) -> Outcome:
    """Train as `train`, on a mesh that is joined. Collective."""
    run, inputs = task.run, opened.inputs
    with _phase(events, "build"):
        identity = combined_identity(run.training, inputs.stream.identity, mesh)
        # Stages read tokens and targets independently, so without this check different corpora would train unnoticed.
        if identity is None:
            raise CorpusError("the ranks see different texts: every pod needs the same files, or the same image")
        trainer = build_trainer(run, mesh, inputs.samples, memory.gate if memory is not None else None, draw=False)
        # Pipelines and attention have created groups of their own, with torch's shorter limit.
        set_collective_timeout(START_TIMEOUT)
    manager = _checkpoint_manager(task, events, opened, mesh, identity)
    with _phase(events, "load"):
        state = _load(run, trainer, mesh, manager, memory, WorkProgress(events))
        trainer.on_parameters_loaded(state.step)
    trainer.restore_state(state)
    if mesh.rank == 0:
        log_inputs(run, opened)
    if manager is not None:
        manager.resumed(state.step, memory.origin if memory is not None else None)
    warm_up(run, mesh)
    if memory is not None and isinstance(trainer, Trainer):
        memory.begin(trainer, state, manager.origin() if manager is not None else None)
    events.running(state.step, manager.source if manager is not None else "")
    unreported = memory.unreported if memory is not None else None
    with tracked(task, events, state.step - (unreported is not None)) as tracked_events:
        loop = TrainingLoop(
            run,
            trainer,
            inputs,
            manager,
            mesh,
            tracked_events,
            sums_digest=memory is not None,
            ranks_per_worker=task.local_world_size,
            unreported=unreported,
        )
        return loop.run(state)


def _checkpoint_manager(
    task: RankTask[NativeRun], events: RankEvents, opened: OpenedRun, mesh: Mesh, identity: str
) -> CheckpointManager | None:
    """Loads and saves the run's checkpoints, which record the stream of samples with this `identity`; None without."""
    run = task.run
    if run.checkpoint is None or not (task.checkpoint_dir or task.checkpoint_uri):
        return None
    known: dict[str, object] = {"tokenizer": opened.tokenizer}
    if task.job and mesh.rank == 0:
        known["provenance"] = provenance_of(run, task.job, task.image)
    template = manifest_template(run, identity, mesh).model_copy(update=known)
    return CheckpointManager(task, run.checkpoint, mesh, events, template)


def log_inputs(run: NativeRun, opened: OpenedRun) -> None:
    """Log how the run uses its data, and what may be a mistake in its inputs."""
    inputs, training, tokenizer = opened.inputs, run.training, opened.tokenizer
    corpora = run.islands if is_federated(training) else 1
    batch = training.global_batch_size // corpora
    use = data_use(inputs.stream, [part.path for part in run.data.mixture], training.steps * batch, batch)
    for line in use.lines:
        log.info(line)
    warnings = [*use.warnings, inputs.evaluation.repeats(corpora) if inputs.evaluation is not None else ""]
    warnings += [f"`{mistake.field}` {mistake.message}" for mistake in likely_mistakes(facts_of_run(run))]
    if training.initial_weights is not None:
        directory = Path(training.initial_weights)
        config = parse_config((directory / CONFIG).read_text(encoding="utf-8"))
        if message := beyond_trained_length(config, training.sequence_length):
            warnings.append(f"`training.sequenceLength` {message}")
        warnings.append(other_tokenizer(directory, tokenizer) if tokenizer is not None else "")
    for warning in filter(None, warnings):
        log.warning(warning)


def _load(
    run: NativeRun,
    trainer: Trainer | AsyncPipelineTrainer,
    mesh: Mesh,
    manager: CheckpointManager | None,
    memory: Memory | None,
    progress: WorkProgress,
) -> TrainingState:
    """Fill the trainer: from what ranks hold in memory, or from files."""
    if memory is not None and isinstance(trainer, Trainer):
        memory.formed()
        if (held := memory.restore(trainer, mesh)) is not None:
            return held
    return load_state(trainer, run, mesh, manager, progress)


def validate_run(run: NativeRun) -> None:
    """Check that degrees, model, batch and data go together (rules: `meshwright.rules`).

    Raises:
        InvalidRunError: they do not; lists every problem.
    """
    problems = run_problems(run)
    if problems:
        raise InvalidRunError("; ".join(problems))


def open_inputs(task: RankTask[NativeRun], progress: WorkProgress | None = None) -> RunInputs:
    """Open the training samples and the held-out samples, after checking the initial weights. `progress` receives what
    is done.

    Raises:
        DataError: the corpus is missing, damaged or too short; the message names the field and a value that works.
        PretrainedError: `training.initialWeights` does not contain a complete model of this shape.
    """
    data, training = task.run.data, task.run.training
    if training.initial_weights is not None:
        _check_initial_weights(task.run.architecture, training.initial_weights)
    island_dir = island_data_dir(task.run, task.data_dir, task.rank)
    try:
        stream, held_out = open_streams(
            data,
            island_dir,
            training.sequence_length,
            training.seed,
            evaluates=training.evaluation is not None,
            progress=progress,
        )
    except OSError as error:
        raise CorpusError(f"`data` cannot be read: {error}") from error
    spec = training.evaluation
    evaluation = Evaluation(spec, training, data, held_out) if spec is not None and held_out is not None else None
    return RunInputs(stream, evaluation)


def _check_initial_weights(model: Architecture, directory: str) -> None:
    try:
        check_pretrained(model, Path(directory))
    except PretrainedError as error:
        if "`training.initialWeights" in str(error):
            raise
        raise PretrainedError(f"`training.initialWeights: {directory}`: {error}") from error


def build_trainer(
    run: NativeRun, mesh: Mesh, samples: int = 1, gate: StepGate | None = None, *, draw: bool = True
) -> Trainer | AsyncPipelineTrainer:
    """Return the trainer of this rank's part. For `samples`, those of its island, and `gate` see `Trainer`. If not
    `draw`, its parameters have no values yet.
    """
    lora = run.training.lora
    if mesh.rank == 0 and lora is not None and (missing := skipped_targets(lora, run.architecture)):
        log.warning(missing)
    if kind_of(run.parallelism.order).asynchronous and run.pipeline > 1:
        return AsyncPipelineTrainer(run, mesh, draw=draw)
    return Trainer(run, mesh, samples, gate, draw=draw)


@contextmanager
def _phase(events: RankEvents, name: str) -> Iterator[None]:
    started_at = time.monotonic()
    yield
    events.phase(name, time.monotonic() - started_at)
