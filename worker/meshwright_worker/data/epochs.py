"""Says how often a run reads its data, for the log: how many epochs, and what is read several times or never."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshwright_worker.data.mixture import CorpusStream, MixtureStream, Stream
from meshwright_worker.data.sample_order import SampleStream

_MANY_UNUSED = 0.1
"""Share of a text from which on unused tokens at its end are worth a warning."""


@dataclass(frozen=True, slots=True)
class DataUse:
    """What a run does with its data."""

    lines: tuple[str, ...]
    """One line per corpus."""
    warnings: tuple[str, ...]
    """What may be a mistake."""


def data_use(stream: Stream, paths: Sequence[str], samples: int, batch: int) -> DataUse:
    """Return how a run of `samples` samples, `batch` in each step, uses its data.

    Args:
        stream: the samples.
        paths: the paths of the corpora of a mixture.
        samples: samples of the entire run.
        batch: samples of one step.
    """
    lines, warnings = [], []
    for name, part, share in corpus_streams(stream, paths):
        taken, size = round(samples * share), part.samples_per_epoch
        lines.append(f"{name}: {size:,} samples per epoch; the run takes {taken:,}, {taken / size:.2f} epochs")
        if batch * share > size:
            warnings.append(
                f"{name} has {size:,} samples, and each step takes {round(batch * share):,} of them: a step has the "
                "same sample several times. More data, or a smaller `training.globalBatchSize`, avoid it"
            )
        if isinstance(part, SampleStream) and part.unused_tokens > _MANY_UNUSED * part.tokens:
            warnings.append(
                f"{name}: the last {part.unused_tokens:,} of {part.tokens:,} tokens do not fill a sequence, and are "
                "never trained on: a smaller `training.sequenceLength` leaves fewer"
            )
    return DataUse(tuple(lines), tuple(warnings))


def corpus_streams(stream: Stream, paths: Sequence[str]) -> Iterator[tuple[str, CorpusStream, float]]:
    """The stream of each corpus, with a name and its share of the samples."""
    if not isinstance(stream, MixtureStream):
        yield "data", stream, 1.0
        return
    for path, (part, share) in zip(paths, stream.shares, strict=True):
        yield f"data in {path}", part, share
