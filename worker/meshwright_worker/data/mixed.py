"""Samples of several corpora, dealt by weight."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from meshwright.api.data import DataSpec
from meshwright.data.mixture import Mixture
from meshwright_worker.data.corpus import CorpusError, open_corpus
from meshwright_worker.data.stream import SampleStream


class MixedStream:
    """Samples of several streams: which one a sample comes from, its number alone decides (`Mixture`)."""

    def __init__(self, streams: Sequence[SampleStream], mixture: Mixture) -> None:
        self._streams = streams
        self._mixture = mixture

    @property
    def identity(self) -> str:
        """See `SampleStream.identity`."""
        parts = [f"{s.identity}:{places}" for s, places in zip(self._streams, self._mixture.places, strict=True)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    def batch(self, first: int, count: int) -> torch.Tensor:
        """See `SampleStream.batch`."""
        picks = [self._mixture.pick(number) for number in range(first, first + count)]
        return torch.cat([self._streams[pick.corpus].batch(pick.sample, 1) for pick in picks])


def open_stream(data: DataSpec, data_dir: str | None, sequence_length: int, seed: int) -> SampleStream | MixedStream:
    """The samples that `data` names.

    Raises:
        DataError: they cannot be read, or are too few.
    """
    if not data.mixture:
        return SampleStream(open_corpus(data, data_dir), sequence_length, seed)
    try:
        mixture = Mixture([part.weight for part in data.mixture], seed)
    except ValueError as error:
        raise CorpusError(f"`data.mixture`: {error}") from error
    streams = [SampleStream(open_corpus(data, data_dir, part.path), sequence_length, seed) for part in data.mixture]
    return MixedStream(streams, mixture)
