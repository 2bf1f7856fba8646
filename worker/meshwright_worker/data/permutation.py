"""A random permutation of n items that needs no memory: the position of item i is computed, not looked up.

A balanced Feistel network is a bijection of [0, 2^(2h)) for any round function. Repeating it until the value is below n
restricts it to [0, n) (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
"""

from __future__ import annotations

import hashlib

_ROUNDS = 4


class Permutation:
    """A bijection of `range(size)`, chosen by `key`. The same on every machine.

    Raises:
        ValueError: `size` is below 1.
    """

    def __init__(self, size: int, key: str) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} things does not exist")
        self._size = size
        self._key = hashlib.blake2b(key.encode(), digest_size=32).digest()
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half_bits) - 1

    def __call__(self, index: int) -> int:
        """Return the position of `index`.

        Raises:
            IndexError: `index` is not in `range(size)`.
        """
        if not 0 <= index < self._size:
            raise IndexError(f"{index} is outside a permutation of {self._size}")
        value = self._shuffle(index)
        while value >= self._size:
            value = self._shuffle(value)
        return value

    def _shuffle(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (self._mix(number, right) & self._mask)
        return (left << self._half_bits) | right

    def _mix(self, number: int, half: int) -> int:
        message = number.to_bytes(1, "little") + half.to_bytes(16, "little")
        return int.from_bytes(hashlib.blake2b(message, digest_size=16, key=self._key).digest(), "little")
