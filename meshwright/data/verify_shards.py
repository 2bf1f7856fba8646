"""Verifies all shards of a directory, not only the parts that a run reads."""

from __future__ import annotations

import zlib
from typing import IO

import numpy as np

from meshwright.data.checksums import BLOCK, block_sums
from meshwright.data.errors import DataError
from meshwright.data.files import Directory
from meshwright.data.shards import MANIFEST, ShardRecord, TokensManifest, read_manifest

_READ = 16 * BLOCK


def verify(directory: Directory) -> tuple[TokensManifest, list[str]]:
    """Read every shard and compare it with the manifest. Returns the problems by shard.

    Raises:
        DataError: the directory holds no manifest.
    """
    manifest = read_manifest(directory)
    problems = []
    for shard in manifest.shards:
        try:
            with directory.open(shard.file) as file:
                problems += _problems(file, shard, manifest)
        except (OSError, DataError) as error:
            problems.append(f"{shard.file}: cannot be read: {error}")
    return manifest, problems


def _problems(file: IO[bytes], shard: ShardRecord, manifest: TokensManifest) -> list[str]:
    crc = size = largest = 0
    sums: list[int] = []
    dtype = np.dtype(manifest.dtype).newbyteorder("<")
    while content := file.read(_READ):
        crc, size = zlib.crc32(content, crc), size + len(content)
        sums += block_sums(content)
        whole = len(content) // dtype.itemsize * dtype.itemsize
        largest = max(largest, int(np.frombuffer(content[:whole], dtype=dtype).max(initial=0)))
    expected = shard.tokens * dtype.itemsize
    if size != expected:
        return [f"{shard.file}: expected {expected} bytes, found {size}"]
    if crc != shard.crc32:
        return [f"{shard.file}: wrong checksum (CRC-32 {crc:08x}, expected {shard.crc32:08x})"]
    if shard.block_crc32 and sums != shard.block_crc32:
        return [f"{shard.file}: intact, but {MANIFEST} is damaged: its checksums of mebibytes do not match"]
    if largest >= manifest.vocabulary:
        return [f"{shard.file}: token {largest} is outside the vocabulary of {manifest.vocabulary}"]
    return []
