"""Verifies checksums of files when their bytes are first read.

A shard is too large to read whole for the few samples of a first step, so its manifest holds a CRC-32 for each mebibyte
of it: what is read is checked, and nothing else is.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.data.errors import DataError

BLOCK = 1 << 20
"""Bytes per checksum."""


@dataclass(frozen=True, slots=True)
class FileChecksums:
    """The checksums of a file."""

    file: str
    """Path or name of the file, for messages."""
    size: int
    """Size of the file in bytes."""
    block: int
    """Bytes per checksum. The last block may be shorter."""
    crc32: Sequence[int]
    """CRC-32 of each block."""


def block_sums(content: bytes | memoryview) -> list[int]:
    """CRC-32 of each `BLOCK` bytes of a file, starting at a block."""
    return [zlib.crc32(memoryview(content)[first : first + BLOCK]) for first in range(0, len(content), BLOCK)]


class BlockChecker:
    """Verifies each block of some files once, before it is used.

    Args:
        files: their checksums, by number.
        read: the bytes `first` to `last - 1` of the file of a number.
    """

    def __init__(self, files: Sequence[FileChecksums], read: Callable[[int, int, int], memoryview]) -> None:
        self._files = files
        self._read = read
        self._checked: set[tuple[int, int]] = set()

    def check(self, number: int, first: int, last: int) -> None:
        """Verify the blocks with the bytes `first` to `last - 1` of a file, if they are not verified yet.

        Raises:
            DataError: they are not what was written.
        """
        sums = self._files[number]
        for block in range(first // sums.block, -(-last // sums.block)):
            if (number, block) in self._checked:
                continue
            begin = block * sums.block
            end = min(begin + sums.block, sums.size)
            actual = zlib.crc32(self._read(number, begin, end))
            if actual != sums.crc32[block]:
                raise DataError(
                    f"{sums.file} is damaged: wrong checksum of bytes {begin} to {end - 1} (CRC-32 "
                    f"{actual:08x}, expected {sums.crc32[block]:08x}); copy the directory again or tokenize again, and "
                    "`meshwright data verify` finds other damage"
                )
            self._checked.add((number, block))
