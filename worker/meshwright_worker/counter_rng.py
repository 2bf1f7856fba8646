"""Random bits that are a function of a key and a counter, and of nothing else: no generator, no order, no device.

What draws them by a global counter (the number of a token, the place of a weight in its matrix) gets the same bits in
every layout, in a recomputation, and after a resume. The mixing function is SplitMix64's (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", 2014), which passes BigCrush; int64 arithmetic wraps as it needs.
"""

from __future__ import annotations

import hashlib

import torch

_GOLDEN = -7046029254386353131
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685


def stream_key(*parts: object) -> int:
    """A key, int64, from whatever `parts` name."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_bits(counters: torch.Tensor, salt: int | torch.Tensor) -> torch.Tensor:
    """64 random bits for every counter.

    Args:
        counters: int64, any shape.
        salt: a key, or what an outer `random_bits` gave for the outer part of a counter of several parts; it
            broadcasts.

    Returns:
        int64, of the broadcast shape.
    """
    x = counters * _GOLDEN + salt
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """fp32 in [0, 1), multiples of 2^-24, from random bits."""
    return _shifted(bits, 40).float() * 2.0**-24


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """A logical shift: torch's of int64 copies the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
