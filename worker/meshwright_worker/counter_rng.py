"""Random bits that depend only on a key and a counter, not on a generator, an order or a device.

With a global counter (a token's index, a weight's position in its matrix), the bits are the same in every layout, in a
recomputation, and after a resume. The mixing function is SplitMix64's (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014), which passes BigCrush; int64 arithmetic wraps as it requires.
"""

from __future__ import annotations

import hashlib

import torch

_GOLDEN = -7046029254386353131
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685


def stream_key(*parts: object) -> int:
    """Return an int64 key derived from `parts`."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def random_bits(counters: torch.Tensor, salt: int | torch.Tensor) -> torch.Tensor:
    """Return 64 random bits for every counter.

    Args:
        counters: int64, any shape.
        salt: a key, or the result of an outer `random_bits` for the first part of a counter with several parts; it
            broadcasts.

    Returns:
        int64, of the broadcast shape.
    """
    x = counters * _GOLDEN + salt
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """Convert random bits to fp32 in [0, 1), multiples of 2^-24."""
    return _shifted(bits, 40).float() * 2.0**-24


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift: torch's shift of int64 copies the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
