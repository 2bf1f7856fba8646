"""Maps sample number i of a run to its tokens, and computes a digest of the consumed samples.

The mapping depends only on i, the corpus and the seed. Samples are numbered from the beginning of the run, over all
epochs. A step consumes the next `global batch` numbers and each replica takes a slice of them. The number of consumed
samples is therefore the entire position of the stream, and a change of layout neither loses nor repeats a sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from meshwright_worker.data.corpus import Corpus, CorpusError
from meshwright_worker.data.permutation import Permutation

MODULUS = 1 << 63


class SampleStream:
    """Samples of `sequence_length + 1` tokens, in a new random order each epoch.

    A sample's last token is the next one's first in the corpus, so that every token is predicted once per epoch. The
    rest at the end, which does not fill a sample, is dropped.

    Raises:
        CorpusError: the corpus is shorter than one sample.
    """

    def __init__(self, corpus: Corpus, sequence_length: int, seed: int) -> None:
        self._corpus = corpus
        self._length = sequence_length
        self._seed = seed
        self.samples_per_epoch = (len(corpus) - 1) // sequence_length
        if self.samples_per_epoch < 1:
            raise CorpusError(
                f"the text has {len(corpus)} tokens, too few for one sample: "
                f"`training.sequenceLength` may be at most {len(corpus) - 1}"
            )
        self._order = 0, self._permutation(0)
        """The last epoch that was read, and its order."""

    @property
    def tokens(self) -> int:
        """Number of tokens of the corpus."""
        return len(self._corpus)

    @property
    def unused_tokens(self) -> int:
        """Number of tokens at the end of the corpus that fill no sample."""
        return self.tokens - 1 - self.samples_per_epoch * self._length

    @property
    def identity(self) -> str:
        """Name of the stream: two streams with the same identity return the same sample for every number."""
        return f"{self._corpus.fingerprint[:32]}/{self._length}/{self._seed}"

    @property
    def separator(self) -> int:
        """The token after each document."""
        return self._corpus.separator

    def batch(self, first: int, count: int) -> torch.Tensor:
        """Return samples `first` to `first + count - 1`, int64 [count, sequence_length + 1] on the CPU."""
        return self.rows(range(first, first + count))

    def rows(self, samples: Sequence[int]) -> torch.Tensor:
        """Return the samples of these numbers, int64 [count, sequence_length + 1] on the CPU."""
        batch = torch.empty(len(samples), self._length + 1, dtype=torch.int64)
        for row, sample in enumerate(samples):
            start = self._sequence(sample) * self._length
            batch[row] = torch.from_numpy(self._corpus.tokens(start, start + self._length + 1))
        return batch

    def documents(self, sample: int) -> list[int]:
        """Return the lengths of the documents, and pieces of documents, in a sample's `sequence_length` inputs."""
        start = self._sequence(sample) * self._length
        return self._corpus.documents(start, start + self._length)

    def _sequence(self, sample: int) -> int:
        epoch, position = divmod(sample, self.samples_per_epoch)
        # Never read again after it was written: steps that are repeated are read next to the thread that reads ahead.
        order = self._order
        if epoch != order[0]:
            order = self._order = epoch, self._permutation(epoch)
        return order[1](position)

    def _permutation(self, epoch: int) -> Permutation:
        return Permutation(self.samples_per_epoch, f"{self._seed}/{epoch}")


class SampleDigest:
    """Digest of the samples that this process consumed since it started, as a number below 2^63.

    It is equal for two runs exactly when they consumed the same samples. A sum of hashes is a multiset hash: it does
    not depend on the order. Every replica sums its own hashes, and the total is the same in every layout and across
    every restart. A lost or repeated sample changes it (Clarke et al., "Incremental Multiset Hash Functions", 2003: the
    additive construction).
    """

    def __init__(self) -> None:
        self.value = 0

    def add(self, numbers: Sequence[int], samples: torch.Tensor) -> None:
        """Add the samples of these numbers, int64 [count, length], as they were passed to the model."""
        for number, row in zip(numbers, samples.cpu().numpy(), strict=True):
            message = number.to_bytes(8, "little") + row.tobytes()
            row_hash = hashlib.blake2b(message, digest_size=8).digest()
            self.value = (self.value + int.from_bytes(row_hash, "little")) % MODULUS
