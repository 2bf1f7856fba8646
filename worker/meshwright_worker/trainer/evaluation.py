"""The loss on held-out documents, during training.

It is over the same tokens in every layout, with every number of replicas and every global batch: the rows that fill up
the last batch have no targets, and the mean is over targets, not over batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from meshwright.api.data import DataSpec
from meshwright.api.training import EvaluationSpec, TrainingSpec
from meshwright_worker.data.batch import IGNORED, Batch, make_batch
from meshwright_worker.data.epochs import corpus_streams
from meshwright_worker.data.mixture import Stream
from meshwright_worker.data.sample_assignment import SampleAssignment
from meshwright_worker.distributed.collectives import all_reduce_sum
from meshwright_worker.distributed.mesh import Mesh


class Evaluator(Protocol):
    """An object with a model to evaluate."""

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Return the mean loss over the targets of all batches: this replica passes its part, every rank gets the same
        value.
        """


def mean_loss(
    loss_fn: Callable[[Sequence[Batch]], torch.Tensor], batches: Iterable[Sequence[Batch]], mesh: Mesh
) -> float:
    """Return the mean loss over the targets of all replicas' batches. Collective.

    Args:
        loss_fn: see `Executor.evaluate`.
        batches: this rank's batches, on its device, split into micro-batches.
        mesh: all ranks.
    """
    _, pipeline, _, tensor = mesh.coordinates
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for parts in batches:
        loss = loss_fn(parts)
        if tensor == 0:
            sums[0] += loss.double()
            # Every stage has the targets: count them once.
            sums[1] += count_targets(parts) if pipeline == 0 else 0
    all_reduce_sum(sums, dist.group.WORLD)
    total, targets = sums.tolist()
    return float(total / max(1.0, targets))


def count_targets(parts: Sequence[Batch]) -> torch.Tensor:
    """Return the number of targets in the micro-batches, int64 []."""
    return torch.stack([(part.targets != IGNORED).sum() for part in parts]).sum()


class Evaluation:
    """Evaluates at the steps that `training.evaluation` asks for, on the same samples each time.

    With FedAvg, each island has its own held-out documents, and the mean is over the targets of all islands.

    Args:
        spec: the interval, and the number of samples over all islands.
        training: the job's training section.
        data: the job's data section.
        stream: the held-out samples of this rank's island.
    """

    def __init__(self, spec: EvaluationSpec, training: TrainingSpec, data: DataSpec, stream: Stream) -> None:
        self._spec = spec
        self._training = training
        self._data = data
        self._stream = stream

    def repeats(self, corpora: int = 1) -> str:
        """What is wrong if samples are evaluated several times, because too few are held out. Empty if none is.

        `corpora` is the number of islands with separate corpora, which share the samples.
        """
        samples = -(-self._spec.samples // corpora)
        for where, part, share in corpus_streams(self._stream, [part.path for part in self._data.mixture]):
            if samples * share > part.samples_per_epoch:
                return (
                    f"`training.evaluation.samples: {self._spec.samples}` takes {round(samples * share)} samples of "
                    f"{where}, and `data.heldOut` leaves {part.samples_per_epoch}: some count several times in "
                    "`evaluationLoss`"
                )
        return ""

    def due(self, step: int) -> bool:
        """Return whether an evaluation follows `step`."""
        return step % self._spec.every_steps == 0 or step == self._training.steps

    def loss(self, trainer: Evaluator, mesh: Mesh, on_batch: Callable[[], None] = lambda: None) -> float:
        """Return the mean loss per token, on every rank. Between batches `on_batch` is called. Collective."""
        return trainer.evaluate(self._batches(mesh, on_batch))

    def _batches(self, mesh: Mesh, on_batch: Callable[[], None]) -> Iterator[Batch]:
        size, assignment = self._training.global_batch_size, SampleAssignment.of(self._training, mesh)
        end = assignment.end_of_first(self._spec.samples)
        for first in range(0, self._spec.samples, size):
            if first:
                on_batch()
            sample_numbers = assignment.replica_samples(range(first, first + size))
            yield make_batch(self._rows(sample_numbers, end), self._data, self._stream.separator)

    def _rows(self, numbers: Sequence[int], end: int) -> torch.Tensor:
        """The samples of these numbers, int64 [rows, length + 1]. Those from `end` on are sample 0 without targets."""
        samples = self._stream.rows([number if number < end else 0 for number in numbers])
        is_filler = torch.tensor([number >= end for number in numbers]).unsqueeze(1)
        return torch.where(is_filler & (samples >= 0), ~samples, samples)
