"""What the ranks of the tests run. Module-level functions, since they travel to other processes by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright.api.precision import Precision
from meshwright.api.training import OuterMethod
from meshwright.data.tokenizers import BYTE_SEPARATOR
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.manager import CheckpointManager, manifest_template
from meshwright_worker.checkpoint.state_dict import checkpoint_tensors
from meshwright_worker.data.batch import make_batch
from meshwright_worker.data.open_corpus import open_corpus
from meshwright_worker.data.sample_order import SampleStream
from meshwright_worker.distributed.mesh import Mesh, join_mesh
from meshwright_worker.local_sgd.async_sgd import AsynchronousSGD
from meshwright_worker.optimizers.master_adamw import MasterAdamW
from meshwright_worker.parallel.shards import ParameterShard
from meshwright_worker.rank.failures import classify, describe
from meshwright_worker.rank.task import Outcome, RankTask, StepReport, Work
from meshwright_worker.trainer.train import build_trainer, open_inputs, train
from meshwright_worker.trainer.trainer import StepResult, Trainer
from tests.distributed.comm_counter import Counting, Traffic
from tests.distributed.mesh_cache import kept_mesh, uses_kept_mesh
from tests.distributed.rank_pool import Last
from tests.distributed.staged_backend import use_staged_backend


@dataclass
class Trained:
    """One rank's view after some steps; of its stage the gradients of step 1 and the parameters at the end, whole."""

    results: list[StepResult]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    local_elements: int
    boxes: dict[str, tuple[slice, ...]] = field(default_factory=dict)
    """Where in each whole tensor this rank's part lies."""


class InterruptedTrainingError(Exception):
    """Stands for a rank that is lost without warning."""


@dataclass
class Recorder:
    """The events of one rank; asks to stop, or dies, after a step."""

    stop_after: int | None = None
    die_after: int | None = None
    ask_after: int | None = None
    """Asks for a checkpoint once, in the step after this one."""
    asked: list[int] = field(default_factory=list)
    """Steps of the checkpoints that were asked for."""
    phases: list[str] = field(default_factory=list)
    began_at: int = -1
    began_from: str = ""
    """The checkpoint of another run."""
    reports: list[StepReport] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    said_at_work: int = 0
    """How often the rank said that it does not hang."""
    work: list[Work] = field(default_factory=list)
    """What it said about work before the first step."""

    def phase(self, name: str, seconds: float) -> None:
        self.phases.append(name)

    def running(self, step: int, source: str = "") -> None:
        self.began_at, self.began_from = step, source

    def step(self, report: StepReport) -> None:
        self.reports.append(report)
        if report.step == self.die_after:
            raise InterruptedTrainingError

    def at_work(self, work: Work | None = None) -> None:
        self.said_at_work += 1
        self.work += [work] if work is not None else []

    def checkpoint(self, step: int, path: str, seconds: float) -> None:
        self.checkpoints.append(step)

    def take_checkpoint_request(self) -> bool:
        if self.ask_after is None or not self.reports or self.reports[-1].step < self.ask_after:
            return False
        self.ask_after = None
        return True

    def checkpoint_begun(self, step: int) -> None:
        self.asked.append(step)

    def stop_requested(self) -> bool:
        return self.stop_after is not None and bool(self.reports) and self.reports[-1].step >= self.stop_after - 1


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_of(shard: ParameterShard, local: torch.Tensor) -> torch.Tensor:
    """The whole tensor of which `local` is the part that this rank holds of the shard's parameter."""
    if shard.whole is None:
        return local.detach().clone()
    mesh, placements = shard.whole.device_mesh, shard.whole.placements
    return whole(DTensor.from_local(local, mesh, placements, shape=shard.whole.shape, stride=shard.whole.stride()))


def samples_of(step: int, batch: int, length: int, vocabulary: int) -> torch.Tensor:
    """Random tokens with a document's end at about one in six."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, vocabulary, (batch, length + 1), generator=generator)
    ends = torch.rand(tokens.shape, generator=generator) < 1 / 6
    return tokens.masked_fill(ends, BYTE_SEPARATOR)


@uses_kept_mesh
def train_on_random_tokens(task: RankTask, steps: int) -> Trained:
    with kept_mesh(task) as mesh:
        return trained(task.run, mesh, steps)


def in_format(run: NativeRun, precision: Precision) -> NativeRun:
    """The run in another number format."""
    return run.model_copy(update={"training": run.training.model_copy(update={"precision": precision})})


Part = Callable[[ParameterShard, torch.Tensor], torch.Tensor]
"""What is told of a shard's tensor."""
FEDERATED = (30, 10)
"""Samples of the islands of a federated run."""


class Training:
    """A run's steps on random tokens, and what is to be told of them.

    `among` are the islands that this one is of, each of which has its part of a step's samples; left out where the
    mesh knows.
    """

    def __init__(self, run: NativeRun, mesh: Mesh, part: Part = whole_of, island: int = 0, among: int = 1) -> None:
        model, self._data, training = run.architecture, run.data, run.training
        federated = training.outer is not None and training.outer.method is OuterMethod.FED_AVG
        self.trainer = build_trainer(run, mesh, FEDERATED[mesh.island] if federated else 1)
        self._part = part
        self._vocabulary, self._length = model.vocab_size, training.sequence_length
        self._batch = training.global_batch_size * among
        self._share = training.global_batch_size // mesh.layout.data
        self._first = mesh.coordinates.data * self._share + island * training.global_batch_size
        self._gradients: dict[str, torch.Tensor] = {}
        self._results: list[StepResult] = []
        updates = self.trainer.outer if isinstance(self.trainer.outer, AsynchronousSGD) else self.trainer.optimizer
        name = "update" if updates is self.trainer.outer else "step"
        self._update = getattr(updates, name)
        setattr(updates, name, self.take)

    def step(self, number: int) -> None:
        samples = samples_of(number, self._batch, self._length, self._vocabulary)[self._first :][: self._share]
        mine = (number - 1) * self._batch + self._first
        batch = make_batch(samples, self._data, BYTE_SEPARATOR, range(mine, mine + self._share))
        result = self.trainer.step(number, batch)
        self._results += [result] if result is not None else []

    def take(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """What the trainer calls to update."""
        if not self._gradients:
            # Gradients of master weights are scaled and clipped inside the update.
            optimizer = self.trainer.optimizer
            factor = optimizer.factor if isinstance(optimizer, MasterAdamW) else 1.0
            for shard, local in zip(self.trainer.shards, gradients, strict=True):
                scaled = local if factor == 1.0 else local.float() * factor
                self._gradients[shard.name] = self._part(shard, scaled).cpu()
        self._update(gradients, rate)

    def catch(self, update: Callable[[Sequence[torch.Tensor], float], None]) -> None:
        """Call `update` in place of the optimizer."""
        self._update = update

    def told(self) -> Trained:
        """After the last step."""
        trainer = self.trainer
        self._results += trainer.drain()
        trainer.close()
        parameters = {shard.name: self._part(shard, shard.local).cpu() for shard in trainer.shards}
        parameters |= {name: buffer.clone().cpu() for name, buffer in trainer.buffers.items()}
        boxes = {shard.name: shard.box for shard in trainer.shards}
        elements = sum(shard.local.numel() for shard in trainer.shards)
        return Trained(self._results, self._gradients, parameters, elements, boxes)


def trained(run: NativeRun, mesh: Mesh, steps: int, part: Part = whole_of) -> Trained:
    """The steps on random tokens; what is told of a shard's tensors is their `part`."""
    training = Training(run, mesh, part)
    for number in range(1, steps + 1):
        training.step(number)
    return training.told()


def train_staged(task: RankTask, steps: int, kind: str) -> Last:
    """Steps on random tokens with all ranks on one device of this kind: see `Numbers`. The process ends, since it stays
    so.
    """
    use_staged_backend(kind)
    with join_mesh(task) as mesh:
        return Last(Numbers.of(trained(task.run, mesh, steps)))


def train_fully_staged(task: RankTask, kind: str, stop_after: int | None) -> Last:
    """`train` with all ranks on one device of this kind: how it ended, where it began, and the losses from there."""
    use_staged_backend(kind)
    outcome, recorder = train_fully(task, stop_rank=0 if stop_after is not None else -1, stop_after=stop_after)
    return Last((outcome, recorder.began_at, [report.loss for report in recorder.reports]))


@dataclass(frozen=True)
class Numbers:
    """What a rank trained, as arrays: tensors would go with its process."""

    losses: list[float]
    arrays: dict[str, Any]

    @classmethod
    def of(cls, rank: Trained) -> Numbers:
        parts = {"gradient": rank.gradients, "parameter": rank.parameters}
        arrays = {f"{part} {name}": tensor.numpy() for part, told in parts.items() for name, tensor in told.items()}
        return cls([result.loss for result in rank.results], arrays)

    def difference(self, other: Numbers) -> float:
        """The largest, relative to the largest element of each array; infinite if one has an array more."""
        if self.arrays.keys() != other.arrays.keys():
            return float("inf")
        losses = [abs(own / theirs - 1) for own, theirs in zip(self.losses, other.losses, strict=True)]
        arrays = [
            float(abs(array - other.arrays[name]).max() / (abs(array).max() or 1.0))
            for name, array in self.arrays.items()
        ]
        return max(losses + arrays)


@uses_kept_mesh
def count_a_step(task: RankTask) -> Traffic:
    """What this rank communicates in its second step: the first one may set things up."""
    model, data, training = task.run.architecture, task.run.data, task.run.training
    with kept_mesh(task) as mesh:
        trainer = Trainer(task.run, mesh)
        share = training.global_batch_size // mesh.layout.data
        samples = samples_of(1, training.global_batch_size, training.sequence_length, model.vocab_size)
        batch = make_batch(samples[mesh.coordinates.data * share :][:share], data, BYTE_SEPARATOR)
        trainer.step(1, batch)
        with Counting() as counting:
            trainer.step(2, batch)
        return counting.traffic


def train_fully(
    task: RankTask, stop_rank: int = -1, stop_after: int | None = None, die_after: int | None = None
) -> tuple[Outcome | None, Recorder]:
    """`train` as an agent runs it. `stop_rank` alone is asked to stop; every rank dies after `die_after`."""
    recorder = Recorder(stop_after if task.rank == stop_rank else None, die_after)
    try:
        return train(task, recorder), recorder
    except InterruptedTrainingError:
        return None, recorder


@uses_kept_mesh
def evaluate_first(task: RankTask[NativeRun]) -> float:
    """The evaluation of a run's initial weights."""
    evaluation = open_inputs(task).evaluation
    assert evaluation is not None
    with kept_mesh(task) as mesh:
        return evaluation.loss(build_trainer(task.run, mesh), mesh)


def train_and_ask(task: RankTask, ask_after: int) -> Recorder:
    """`train`; rank 0 alone is asked for a checkpoint."""
    recorder = Recorder(ask_after=ask_after if task.rank == 0 else None)
    train(task, recorder)
    return recorder


def train_on_own_text(task: RankTask) -> Outcome:
    """Each rank with a directory of its own below the data volume."""
    return train(replace(task, data_dir=f"{task.data_dir}/{task.rank}"), Recorder())


def lose_a_rank(task: RankTask, lost: int) -> Last:
    """One rank's process ends after step 2; what every other one makes of it."""
    recorder = Recorder(die_after=2 if task.rank == lost else None)
    try:
        train(task, recorder)
    except InterruptedTrainingError:
        os._exit(1)
    except BaseException as error:
        return Last((classify(error), describe(error)))
    raise AssertionError("training went on without a rank")


def load_only(task: RankTask) -> tuple[int, dict[str, torch.Tensor]]:
    """What a rank of this layout has after loading: the step, and the whole tensors of its stage."""
    data, training = task.run.data, task.run.training
    assert task.run.checkpoint is not None
    assert task.checkpoint_dir is not None
    with join_mesh(task) as mesh:
        trainer = Trainer(task.run, mesh)
        stream = SampleStream(open_corpus(data, task.data_dir), training.sequence_length, training.seed)
        blank = manifest_template(task.run, stream.identity, mesh)
        session = CheckpointManager(task, task.run.checkpoint, mesh, Recorder(), blank)
        state = session.load(trainer.shards, trainer.optimizer, trainer.buffers)
        tensors = checkpoint_tensors(trainer.shards, trainer.optimizer, trainer.buffers)
        return state.step, {name: whole(tensor) for name, tensor in tensors.items()}
