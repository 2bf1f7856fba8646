"""The loss on documents that are never trained on, while training goes on."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.api.data import DataSpec
from meshwright.api.training import EvaluationSpec, TrainingSpec
from meshwright_worker.data.batch import Batch
from meshwright_worker.data.mixed import open_stream
from meshwright_worker.data.packing import batch_of
from meshwright_worker.mesh import Mesh
from meshwright_worker.step import Trainer


class Evaluation:
    """Evaluates at the steps that `training.evaluation` asks for, each time on the same samples.

    Raises:
        DataError: what is held out cannot be read, or is too short for one sample.
    """

    def __init__(self, spec: EvaluationSpec, training: TrainingSpec, data: DataSpec, data_dir: str | None) -> None:
        self._spec = spec
        self._training = training
        self._data = data
        self._stream = open_stream(data, data_dir, training.sequence_length, training.seed, held_out=True)

    def due(self, step: int) -> bool:
        """Whether `step` is followed by an evaluation."""
        return step % self._spec.every_steps == 0 or step == self._training.steps

    def loss(self, trainer: Trainer, mesh: Mesh) -> float:
        """Mean loss per token, on every rank. Collective."""
        return trainer.evaluate(self._batches(mesh))

    def _batches(self, mesh: Mesh) -> Iterator[Batch]:
        size = self._training.global_batch_size
        share = size // mesh.layout.data
        for first in range(0, self._spec.samples, size):
            samples = self._stream.batch(first + mesh.coordinates.data * share, share)
            yield batch_of(samples, self._data, self._stream.separator)
