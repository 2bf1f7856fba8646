"""A fingerprint of the consumed samples: equal for two runs exactly when they consumed the same samples.

A sum of hashes is a multiset hash: it does not depend on the order. Every replica sums its own hashes, and the total is
the same in every layout and across every restart. A lost or repeated sample changes it (Clarke et al., "Incremental
Multiset Hash Functions", 2003: the additive construction).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

MODULUS = 1 << 63


class SampleDigest:
    """Digest of the samples that this process consumed since it started, as a number below 2^63."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, numbers: Sequence[int], samples: torch.Tensor) -> None:
        """Add the samples of these numbers, int64 [count, length], as they were passed to the model."""
        for number, row in zip(numbers, samples.cpu().numpy(), strict=True):
            message = number.to_bytes(8, "little") + row.tobytes()
            row_hash = hashlib.blake2b(message, digest_size=8).digest()
            self.value = (self.value + int.from_bytes(row_hash, "little")) % MODULUS
