"""Samples of several corpora, mixed by weight."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshwright.api.data import DataFormat, DataSpec
from meshwright.data.corpus_mixture import BLOCK, Mixture
from meshwright_worker.data.corpus import Corpus, CorpusError, naming_corpus, split_held_out
from meshwright_worker.data.open_corpus import data_root, open_corpus, open_data_directory
from meshwright_worker.data.sample_order import SampleStream
from meshwright_worker.data.sft import PromptCompletionStream, read_pairs, select_split
from meshwright_worker.data.token_cache import data_source, open_data_tokenizer
from meshwright_worker.rank.task import WorkProgress

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
    trained, evaluated = open_streams(data, data_dir, sequence_length, seed, evaluates=held_out)
    return evaluated or trained


def open_streams(
    data: DataSpec,
    data_dir: str | None,
    sequence_length: int,
    seed: int,
    *,
    evaluates: bool,
    progress: WorkProgress | None = None,
) -> tuple[Stream, Stream | None]:
    """Open the samples that `data` names, each corpus once: those to train on and, if a run `evaluates`, the held-out
    ones. `progress` receives what is done.

    Raises:
        DataError: they cannot be read, or are too few.
    """
    opener = _CorpusOpener(data, data_dir, sequence_length, seed, evaluates, progress or WorkProgress())
    if not data.mixture:
        trained, *evaluated = opener.streams(None)
        return trained, evaluated[0] if evaluated else None
    try:
        mixture = Mixture([part.weight for part in data.mixture], seed)
    except ValueError as error:
        raise CorpusError(f"`data.mixture`: {error}") from error
    found = []
    for number, part in enumerate(data.mixture, start=1):
        opener.progress.begin_part(number, len(data.mixture))
        with naming_corpus(part.path):
            found.append(opener.streams(part.path))
    splits = [MixtureStream(split, mixture) for split in zip(*found, strict=True)]
    return splits[0], splits[1] if evaluates else None


@dataclass(frozen=True, slots=True)
class _CorpusOpener:
    """Opens each corpus of a run once."""

    data: DataSpec
    data_dir: str | None
    sequence_length: int
    seed: int
    evaluates: bool
    progress: WorkProgress

    def streams(self, path: str | None) -> list[CorpusStream]:
        """The samples to train on and, if the run evaluates, the held-out ones, of the mixture's corpus at `path`."""
        count = 2 if self.evaluates else 1
        if self.data.format is DataFormat.PROMPT_COMPLETION:
            return self._records(path)
        share, corpus = self.data.held_out, open_corpus(self.data, self.data_dir, path, self.progress)
        corpora: Sequence[Corpus] = split_held_out(corpus, share) if share else (corpus, corpus)
        if self.evaluates and share and len(corpora[1]) <= self.sequence_length < len(corpora[0]):
            raise CorpusError(
                f"`data.heldOut: {share}` holds out {len(corpora[1])} tokens, too few for one sample to evaluate on: "
                f"use a larger share, or a `training.sequenceLength` of at most {len(corpora[1]) - 1}"
            )
        return [SampleStream(part, self.sequence_length, self.seed) for part in corpora[:count]]

    def _records(self, path: str | None) -> list[CorpusStream]:
        data, length = self.data, self.sequence_length
        tokenizer = open_data_tokenizer(data, data_root(data, self.data_dir))
        source = data_source(data, open_data_directory(data, self.data_dir, path), path)
        pairs = read_pairs(source, tokenizer, length, self.progress)
        splits = [False, True] if self.evaluates else [False]
        return [
            PromptCompletionStream(
                select_split(pairs, data.held_out, held_out=held_out), length, self.seed, tokenizer.separator
            )
            for held_out in splits
        ]
