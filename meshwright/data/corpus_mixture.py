"""Determines the corpus of each sample of a mixture from the sample number. Pure.

Samples are dealt in blocks of a thousand. In each block every corpus has as many places as its weight asks for, to a
thousandth, in an order that the seed and the block decide. So the proportions hold over any long stretch, a corpus'
own samples are used in order without a gap, and the whole position is still one number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

BLOCK = 1000


class MixtureSample(NamedTuple):
    """The source of a sample."""

    corpus: int
    """Number of the corpus."""
    sample: int
    """Number of the sample among those of the corpus."""


class Mixture:
    """Assigns samples to corpora by weight.

    Raises:
        ValueError: there is no corpus, or a weight is not positive or too small to get a place among a thousand.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        if not weights or min(weights) <= 0:
            raise ValueError("every weight of a mixture must be greater than 0")
        self.quotas = places_of(weights)
        if 0 in self.quotas:
            smallest = weights[self.quotas.index(0)]
            raise ValueError(
                f"weight {smallest} is less than a thousandth of the mixture's {sum(weights)}: raise it or leave it out"
            )
        self._seed = seed
        self._order = lru_cache(maxsize=4)(self._block)

    def pick(self, number: int) -> MixtureSample:
        """The source of sample `number` (from 0)."""
        block, place = divmod(number, BLOCK)
        corpus, rank = self._order(block)[place]
        return MixtureSample(corpus, block * self.quotas[corpus] + rank)

    def _block(self, block: int) -> list[tuple[int, int]]:
        corpora = [corpus for corpus, count in enumerate(self.quotas) for _ in range(count)]
        digest = hashlib.blake2b(f"{self._seed}/{block}".encode(), digest_size=8).digest()
        Random(int.from_bytes(digest, "little")).shuffle(corpora)
        samples_used = [0] * len(self.quotas)
        order = []
        for corpus in corpora:
            order.append((corpus, samples_used[corpus]))
            samples_used[corpus] += 1
        return order


def places_of(weights: Sequence[float]) -> list[int]:
    """Number of samples of each corpus in a block, by largest remainder."""
    exact_quotas = [weight / sum(weights) * BLOCK for weight in weights]
    quotas = [int(share) for share in exact_quotas]
    by_remainder = sorted(range(len(weights)), key=lambda i: (quotas[i] - exact_quotas[i], i))
    for index in by_remainder[: BLOCK - sum(quotas)]:
        quotas[index] += 1
    return quotas
