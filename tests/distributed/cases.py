"""What the ranks of the tests run. Module-level functions, since they travel to other processes by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from meshwright_worker.mesh import joined
from meshwright_worker.step import StepResult, Trainer
from meshwright_worker.task import RankTask
from meshwright_worker.validate import validate


@dataclass
class Trained:
    """One rank's view after some steps: results, and of the stage it holds whole gradients and parameters."""

    results: list[StepResult]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    placements: dict[str, str]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().float().clone()


def samples_of(step: int, batch: int, length: int, vocabulary: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, vocabulary, (batch, length + 1), generator=generator)


def train_on_random_tokens(task: RankTask, steps: int) -> Trained:
    """Some steps on made-up tokens, the first one's gradients kept."""
    model, _, training = validate(task.run)
    with joined(task) as mesh:
        trainer = Trainer(task.run, model, training, mesh)
        update = trainer.optimizer.step
        gradients: dict[str, torch.Tensor] = {}

        def watching(reduced: list[torch.Tensor], rate: float) -> None:
            if not gradients:
                for shard, local in zip(trainer.shards, reduced, strict=True):
                    parameter = shard.parameter
                    gradients[shard.name] = whole(
                        DTensor.from_local(
                            local,
                            parameter.device_mesh,
                            parameter.placements,
                            shape=parameter.shape,
                            stride=parameter.stride(),
                        )
                        if isinstance(parameter, DTensor)
                        else local
                    )
            update(reduced, rate)

        trainer.optimizer.step = watching  # type: ignore[method-assign]
        share = training.global_batch_size // mesh.layout.data
        results = []
        for number in range(1, steps + 1):
            batch = samples_of(number, training.global_batch_size, training.sequence_length, model.vocab_size)
            results.append(trainer.step(number, batch[mesh.coordinates.data * share :][:share]))
        return Trained(
            results,
            gradients,
            {shard.name: whole(shard.parameter) for shard in trainer.shards},
            {s.name: str(s.parameter.placements) for s in trainer.shards if isinstance(s.parameter, DTensor)},
        )
