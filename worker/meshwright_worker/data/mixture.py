"""Samples of several corpora, mixed by weight."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from meshwright.api.data import DataFormat, DataSpec
from meshwright.data.corpus_mixture import BLOCK, Mixture
from meshwright_worker.data.corpus import Corpus, CorpusError, naming_corpus, split_held_out
from meshwright_worker.data.open_corpus import data_root, open_corpus, open_data_directory
from meshwright_worker.data.sample_order import SampleStream
from meshwright_worker.data.sft import PromptCompletionStream, read_pairs, select_split
from meshwright_worker.data.token_cache import data_source, open_data_tokenizer

CorpusStream = SampleStream | PromptCompletionStream
"""The samples of one corpus."""


class MixtureStream:
    """Samples of several streams. A sample's number alone determines its stream (`Mixture`)."""

    def __init__(self, streams: Sequence[CorpusStream], mixture: Mixture) -> None:
        self._streams = streams
        self._mixture = mixture

    @property
    def shares(self) -> list[tuple[CorpusStream, float]]:
        """The stream of each corpus, and its share of the samples."""
        return [(s, quota / BLOCK) for s, quota in zip(self._streams, self._mixture.quotas, strict=True)]

    @property
    def identity(self) -> str:
        """See `SampleStream.identity`."""
        parts = [f"{s.identity}:{quotas}" for s, quotas in zip(self._streams, self._mixture.quotas, strict=True)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    def batch(self, first: int, count: int) -> torch.Tensor:
        """See `SampleStream.batch`."""
        return self.rows(range(first, first + count))

    @property
    def separator(self) -> int:
        """The token after each document: all corpora of a mixture have the same tokenizer."""
        return self._streams[0].separator

    def rows(self, samples: Sequence[int]) -> torch.Tensor:
        """See `SampleStream.rows`."""
        picks = [self._mixture.pick(number) for number in samples]
        return torch.cat([self._streams[pick.corpus].batch(pick.sample, 1) for pick in picks])

    def documents(self, sample: int) -> list[int]:
        """See `SampleStream.documents`."""
        pick = self._mixture.pick(sample)
        return self._streams[pick.corpus].documents(pick.sample)


Stream = CorpusStream | MixtureStream


def open_stream(
    data: DataSpec, data_dir: str | None, sequence_length: int, seed: int, *, held_out: bool = False
) -> Stream:
    """Open the samples that `data` names; with `held_out`, the held-out samples.

    Raises:
        DataError: they cannot be read, or are too few.
    """

    def stream(path: str | None = None) -> CorpusStream:
        if data.format is DataFormat.PROMPT_COMPLETION:
            tokenizer = open_data_tokenizer(data, data_root(data, data_dir))
            pairs = read_pairs(
                data_source(data, open_data_directory(data, data_dir, path), path), tokenizer, sequence_length
            )
            split_pairs = select_split(pairs, data.held_out, held_out=held_out)
            return PromptCompletionStream(split_pairs, sequence_length, seed, tokenizer.separator)
        corpus: Corpus = open_corpus(data, data_dir, path)
        if data.held_out:
            corpus = split_held_out(corpus, data.held_out)[held_out]
        return SampleStream(corpus, sequence_length, seed)

    if not data.mixture:
        return stream()
    try:
        mixture = Mixture([part.weight for part in data.mixture], seed)
    except ValueError as error:
        raise CorpusError(f"`data.mixture`: {error}") from error
    streams = []
    for part in data.mixture:
        with naming_corpus(part.path):
            streams.append(stream(part.path))
    return MixtureStream(streams, mixture)
