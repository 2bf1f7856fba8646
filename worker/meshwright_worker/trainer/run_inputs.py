"""A rank's inputs, opened and checked before any process group is created.

Peers may see other files and already wait in the rendezvous. A rank that finds invalid inputs takes part in no
collective: it reports the error and exits, and its agent's report stops the peers. This module reads file lists,
manifests, headers, and records that have to be tokenized anyway. Tokens are verified as they are read
(`meshwright.data.checksums`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.api.data import DataSpec
from meshwright.api.training import TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright_worker.data.corpus import CorpusError
from meshwright_worker.data.mixture import MixtureStream, Stream, open_stream
from meshwright_worker.data.sample_assignment import island_data_dir
from meshwright_worker.pretrained.load import check_pretrained
from meshwright_worker.rank.task import RankTask
from meshwright_worker.trainer.evaluation import Evaluation


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


def open_inputs(task: RankTask, architecture: Architecture, data: DataSpec, training: TrainingSpec) -> RunInputs:
    """Open the training samples and the held-out samples, after checking the initial weights.

    Raises:
        DataError: the corpus is missing, damaged or too short; the message names the field and a value that works.
        PretrainedError: `training.initialWeights` does not contain a complete model of this shape.
    """
    if training.initial_weights is not None:
        check_pretrained(architecture, Path(training.initial_weights))
    island_dir = island_data_dir(task.run, task.data_dir, task.rank)
    try:
        stream = open_stream(data, island_dir, training.sequence_length, training.seed)
        requested = training.evaluation
        evaluation = Evaluation(requested, training, data, island_dir) if requested is not None else None
    except OSError as error:
        raise CorpusError(f"`data` cannot be read: {error}") from error
    return RunInputs(stream, evaluation)
