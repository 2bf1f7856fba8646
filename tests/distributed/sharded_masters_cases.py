"""What ranks run to have the gathers of sharded master weights watched."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright_worker.data.batch import Batch
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.parallel.data.sharded_masters import ShardedMasters
from meshwright_worker.rank.task import RankTask
from meshwright_worker.trainer.trainer import Trainer
from tests.distributed.cases import samples_of


@dataclass
class Gathering:
    """One rank's view of two steps, with an evaluation between them."""

    buckets: int
    left: int
    """Buckets that were not complete when the first step returned."""
    most_under_way: int
    losses: list[float]
    parameters: dict[str, torch.Tensor]
    """In bf16, after the last step."""


def gathers_of_a_step(task: RankTask) -> Gathering:
    with join_mesh(task) as mesh:
        trainer = Trainer(task.run, mesh)
        assert isinstance(trainer.data_parallel, ShardedMasters)
        gather = trainer.data_parallel._gather
        begin, most = gather._begin_next, 0

        def watched() -> None:
            nonlocal most
            begin()
            most = max(most, len(gather._under_way))

        gather._begin_next = watched  # type: ignore[method-assign]
        training, share = task.run.training, task.run.training.global_batch_size // mesh.layout.data
        samples = samples_of(1, training.global_batch_size, training.sequence_length, task.run.architecture.vocab_size)
        batch = Batch.of(samples[mesh.coordinates.data * share :][:share])
        first = trainer.step(1, batch)
        left = len(gather._buckets) - gather._gathered
        losses = [first.loss, trainer.evaluate([batch]), trainer.step(2, batch).loss]
        trainer.close()
        parameters = {
            name: parameter.detach().clone()
            for stage in trainer.stages
            for name, parameter in stage.module.named_parameters()
        }
        return Gathering(len(gather._buckets), left, most, losses, parameters)
