"""What a rank reads in a run, opened and checked before any process group forms.

A rank that refuses here is in no collective: it says what is wrong and ends, and its agent's report ends its peers,
which may see other files and already wait for it. Tokens are checked as they are read (`meshwright.data.checksums`);
here it is lists of files, manifests and headers that are read, and records that have to be tokenized anyway.
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
from meshwright_worker.pretrained.header_check import check_pretrained
from meshwright_worker.rank.task import RankTask
from meshwright_worker.trainer.evaluation import Evaluation


@dataclass(frozen=True, slots=True)
class RunInputs:
    """What a rank reads."""

    stream: Stream
    evaluation: Evaluation | None
    """None where `training.evaluation` is left out."""

    @property
    def samples(self) -> int:
        """Samples of an epoch, for `FedAvg`; 1 of a mixture, which has no epochs and is refused there."""
        return 1 if isinstance(self.stream, MixtureStream) else self.stream.samples_per_epoch


def open_inputs(task: RankTask, architecture: Architecture, data: DataSpec, training: TrainingSpec) -> RunInputs:
    """The samples to train on and those that are held out, after a look at the weights to begin from.

    Raises:
        DataError: text is missing, damaged or too short; the message names the field and what would do.
        PretrainedError: `training.initialWeights` names no whole model of this shape.
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
