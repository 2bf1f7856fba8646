"""Islands of replicas as ranks run them, and the same in one process, step by step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import deterministic

from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.manager import CheckpointManager, manifest_template
from meshwright_worker.checkpoint.manifest import TrainingState
from meshwright_worker.data.batch import Batch
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.local_sgd.async_sgd import AsynchronousSGD
from meshwright_worker.local_sgd.bounded_staleness import Event
from meshwright_worker.optimizers.adamw import AdamW
from meshwright_worker.parallel.pipeline.shared_weights import TIED
from meshwright_worker.rank.task import Outcome, RankTask
from meshwright_worker.trainer.trainer import Trainer
from tests.distributed.cases import Recorder, samples_of, train_fully, whole_of

Parameters = dict[str, torch.Tensor]


@dataclass
class Island:
    """One rank at the end: its stage's parameters, whole, and what its server saw."""

    island: int
    parameters: Parameters
    events: list[Event] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def train_islands(task: RankTask, sizes: Sequence[int] = ()) -> Island:
    """Every island on its part of each step's batch; with `sizes` its weight is its number of samples."""
    model, training = task.run.architecture, task.run.training
    with join_mesh(task) as mesh:
        trainer = Trainer(task.run, mesh, sizes[mesh.island] if sizes else 1)
        share = training.global_batch_size // mesh.layout.data
        first = mesh.coordinates.data * share
        losses = []
        for number in range(1, training.steps + 1):
            batch = samples_of(number, training.global_batch_size, training.sequence_length, model.vocab_size)
            losses.append(trainer.step(number, Batch.of(batch[first : first + share])).loss)
        parameters = {shard.name: whole_of(shard, shard.local) for shard in trainer.shards}
        trainer.close()
        server = trainer.outer.server if isinstance(trainer.outer, AsynchronousSGD) else None
        return Island(mesh.island, parameters, server.order.events if server else [], losses)


def train_a_round_more(task: RankTask[NativeRun]) -> list[torch.Tensor]:
    """Load the newest checkpoint, if there is one, train a round and save. This rank's copies of the tied embedding."""
    model, training, checkpoint = task.run.architecture, task.run.training, task.run.checkpoint
    assert checkpoint is not None
    assert training.outer is not None
    with join_mesh(task) as mesh:
        trainer = Trainer(task.run, mesh)
        manager = CheckpointManager(task, checkpoint, mesh, Recorder(), manifest_template(task.run, "random", mesh))
        step = manager.load(trainer.shards, trainer.optimizer, trainer.buffers, trainer.outer).step
        trainer.on_parameters_loaded(step)
        share = training.global_batch_size // mesh.layout.data
        first = mesh.coordinates.data * share
        for number in range(step + 1, step + 1 + training.outer.every_steps):
            batch = samples_of(number, training.global_batch_size, training.sequence_length, model.vocab_size)
            trainer.step(number, Batch.of(batch[first : first + share]))
        state = TrainingState(step=step + training.outer.every_steps)
        manager.save(trainer.shards, trainer.optimizer, state, trainer.buffers, trainer.outer, wait=True)
        trainer.close()
        return [shard.local.clone() for shard in trainer.shards if shard.name == TIED]


class _Simulated:
    """An island in one process: the run of one replica, on a part of the batch."""

    def __init__(self, task: RankTask, mesh: object, island: int, islands: int) -> None:
        self._model, self._training = task.run.architecture, task.run.training
        self.trainer = Trainer(task.run, mesh)  # type: ignore[arg-type]
        self._island, self._islands = island, islands

    @property
    def parameters(self) -> Parameters:
        return {shard.name: shard.local for shard in self.trainer.shards}

    def step(self, number: int) -> None:
        share = self._training.global_batch_size
        batch = samples_of(number, share * self._islands, self._training.sequence_length, self._model.vocab_size)
        self.trainer.step(number, Batch.of(batch[self._island * share : (self._island + 1) * share]))

    def take(self, parameters: Parameters) -> None:
        for name, value in self.parameters.items():
            value.copy_(parameters[name])


def simulate_rounds(
    task: RankTask, islands: int, every: int, outer: tuple[float, float] | None, weights: Sequence[float]
) -> Parameters:
    """Rounds of `every` steps and a weighted mean; with `outer` (rate, momentum), torch's Nesterov SGD on it."""
    training = task.run.training
    with join_mesh(task) as mesh:
        each = [_Simulated(task, mesh, island, islands) for island in range(islands)]
        shared = {name: value.clone() for name, value in each[0].parameters.items()}
        rate, momentum = outer or (1.0, 0.0)
        sgd = torch.optim.SGD(shared.values(), lr=rate, momentum=momentum, nesterov=momentum > 0)
        for number in range(1, training.steps + 1):
            for island in each:
                island.step(number)
            if number % every and number != training.steps:
                continue
            for name, value in shared.items():
                mean = sum(weight * one.parameters[name] for weight, one in zip(weights, each, strict=True))
                value.grad = value - mean
            sgd.step()
            for island in each:
                island.take(shared)
        return {name: value.clone() for name, value in shared.items()}


def replay(task: RankTask, islands: int, events: Sequence[Event]) -> Parameters:
    """The reads and writes of a server in the order in which they happened, one after the other."""
    training = task.run.training
    with join_mesh(task) as mesh:
        server = _Simulated(task, mesh, 0, islands)
        optimizer = AdamW(server.trainer.shards, training.optimizer)
        each = [_Simulated(task, mesh, island, islands) for island in range(islands)]
        taken: dict[int, tuple[list[torch.Tensor], float]] = {}
        steps = [0] * islands
        for index, one in enumerate(each):

            def caught(gradients: Sequence[torch.Tensor], rate: float, index: int = index) -> None:
                taken[index] = [gradient.clone() for gradient in gradients], rate
                for shard in each[index].trainer.shards:
                    shard.parameter.grad = None

            one.trainer.optimizer.step = caught  # type: ignore[method-assign]
        for event in events:
            if event.kind == "read":
                steps[event.island] += 1
                each[event.island].take(server.parameters)
                each[event.island].step(steps[event.island])
            else:
                optimizer.step(*taken.pop(event.island))
        assert steps == [training.steps] * islands
        return {name: value.clone() for name, value in server.parameters.items()}


def train_with_a_late_rank(task: RankTask, late: int) -> tuple[Outcome | None, Recorder]:
    """`train` where memory without values is not a number, and one rank gets the values of its parameters late."""
    build, loaded = Trainer.__init__, Trainer.on_parameters_loaded

    def build_on_nan(trainer: Trainer, *arguments: Any, **options: Any) -> None:
        deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        build(trainer, *arguments, **options)

    def loaded_late(trainer: Trainer, step: int) -> None:
        time.sleep(0.5 if task.rank == late else 0.0)
        loaded(trainer, step)

    Trainer.__init__, Trainer.on_parameters_loaded = build_on_nan, loaded_late  # type: ignore[method-assign]
    try:
        return train_fully(task)
    finally:
        deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        Trainer.__init__, Trainer.on_parameters_loaded = build, loaded  # type: ignore[method-assign]
