"""Tokens on disk: shards that can be memory-mapped, and a manifest to verify them.

    meshwright-tokens.json   the manifest: tokenizer, type, and size and checksums of every shard
    00000.tokens             little-endian uint16 or uint32, every document followed by the separator
    00001.tokens             …

The manifest is written last, so a directory with a manifest is complete. Two runs of `meshwright data tokenize` on the
same files give the same bytes on every machine. Bytes are verified before they are used, a mebibyte at a time: a
flipped bit is an error, never another token. The manifest has a checksum too. A reader ignores unknown fields in it,
and rejects any other `format` than its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, ValidationError

from meshwright.api.base import ApiModel
from meshwright.data.checksums import BLOCK, BlockChecker, FileChecksums, block_sums
from meshwright.data.errors import DataError
from meshwright.data.files import Directory
from meshwright.manifest_checksum import checksum_error, with_checksum

MANIFEST = "meshwright-tokens.json"
SHARD_SUFFIX = ".tokens"
FORMAT = 1
SHARD_TOKENS = 256 * 1024 * 1024

Tokens = npt.NDArray[np.int64]


class ShardRecord(ApiModel):
    """A shard in the manifest."""

    model_config = ConfigDict(extra="ignore")

    file: str
    """File name of the shard."""
    tokens: int
    """Number of tokens."""
    crc32: int
    """CRC-32 of the shard's bytes."""
    block_crc32: list[int] = []
    """CRC-32 of each mebibyte, in order. Empty in manifests of an older version: `crc32` is then verified instead."""


class TokensManifest(ApiModel):
    """The content of `meshwright-tokens.json`, without its checksum."""

    model_config = ConfigDict(extra="ignore")

    format: int = FORMAT
    """Version of the format."""
    tokenizer: str
    """Identity of the tokenizer."""
    vocabulary: int
    """One above the largest id of the tokenizer."""
    separator: int
    """The token after each document."""
    dtype: str
    """`uint16` or `uint32`."""
    documents: int
    """Number of documents in all shards."""
    skipped: int = 0
    """Number of records that could not be read and were skipped."""
    shards: list[ShardRecord]
    """The shards in order."""

    @property
    def tokens(self) -> int:
        """Number of tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens: equal on two machines if and only if their tokens are equal."""
        lines = "".join(f"{shard.tokens}\0{shard.crc32}\n" for shard in self.shards)
        return hashlib.sha256(f"{self.tokenizer}\0{self.dtype}\n{lines}".encode()).hexdigest()


class ShardWriter:
    """Writes documents to a new directory, which is complete when `close` has returned.

    Raises:
        DataError: the directory already contains tokens, or is a file.
    """

    def __init__(
        self, directory: Path, tokenizer: str, vocabulary: int, separator: int, shard: int = SHARD_TOKENS
    ) -> None:
        if (directory / MANIFEST).exists():
            raise DataError(f"{directory} already contains tokens: choose an empty directory")
        if directory.exists() and not directory.is_dir():
            raise DataError(f"{directory} is a file: choose a new directory")
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._limit = directory, shard
        self._dtype = np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")
        self._blank = TokensManifest(
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            separator=separator,
            dtype="uint16" if self._dtype.itemsize == 2 else "uint32",
            documents=0,
            shards=[],
        )
        self._shards: list[ShardRecord] = []
        self._pending: list[npt.NDArray[np.unsignedinteger]] = []
        self._held = 0
        self._documents = 0

    def add(self, documents: Iterable[Sequence[int]]) -> None:
        """Append documents, each with its separator."""
        before = len(self._pending)
        for tokens in documents:
            row = np.empty(len(tokens) + 1, dtype=self._dtype)
            row[:-1], row[-1] = tokens, self._blank.separator
            self._pending.append(row)
            self._held += len(row)
            self._documents += 1
            if self._held >= self._limit:
                self._flush()
                before = 0
        if len(self._pending) > before + 1:
            # An array takes a hundred bytes more than its tokens: one for each document could be most of the memory.
            self._pending[before:] = [np.concatenate(self._pending[before:])]

    @property
    def documents(self) -> int:
        """Number of documents so far."""
        return self._documents

    def close(self, skipped: int = 0) -> TokensManifest:
        """Write the remaining tokens and the manifest.

        Raises:
            DataError: there was no document.
        """
        self._flush()
        if not self._shards:
            raise DataError("no text: no file matches `data.pattern`, or all of them are empty")
        manifest = self._blank.model_copy(
            update={"documents": self._documents, "skipped": skipped, "shards": self._shards}
        )
        temporary = self._directory / f".{MANIFEST}"
        with temporary.open("w", encoding="utf-8") as file:
            fields = with_checksum(manifest.model_dump(mode="json", by_alias=True))
            file.write(json.dumps(fields, indent=1, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._directory / MANIFEST)
        return manifest

    def _flush(self) -> None:
        if not self._pending:
            return
        # A shard is large: free the documents before writing, and do not copy the bytes.
        content = np.concatenate(self._pending).view(np.uint8).data
        self._pending = []
        name = f"{len(self._shards):05}{SHARD_SUFFIX}"
        path = self._directory / name
        with path.open("wb") as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:
                error.filename = str(path)  # errors of a full disk have none
                raise
        sums = block_sums(content)
        self._shards.append(ShardRecord(file=name, tokens=self._held, crc32=zlib.crc32(content), block_crc32=sums))
        self._held = 0


class TokenShards:
    """The tokens of a directory as one row. Local shards are memory-mapped, others are read in ranges.

    Raises:
        DataError: the directory does not contain complete tokens, or a shard's size differs from the manifest.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self.manifest = read_manifest(directory)
        self._dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
        self._ends = list(accumulate(shard.tokens for shard in self.manifest.shards))
        self._maps: dict[int, npt.NDArray[np.uint8]] = {}
        sizes = directory.sizes(shard.file for shard in self.manifest.shards)
        for shard in self.manifest.shards:
            if sizes.get(shard.file) != shard.tokens * self._dtype.itemsize:
                raise DataError(
                    f"{shard.file} has {sizes.get(shard.file, 'no')} bytes, but the manifest has "
                    f"{shard.tokens * self._dtype.itemsize}: copy the directory again, or tokenize again"
                )
        self._checked = BlockChecker([self._sums(shard) for shard in self.manifest.shards], self._bytes)

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def fingerprint(self) -> str:
        """Hash to compare the tokens of two machines, or of two starts of a run."""
        return self.manifest.fingerprint

    def tokens(self, start: int, stop: int) -> Tokens:
        """The tokens at `start` to `stop - 1`, int64 [stop - start].

        Raises:
            DataError: a shard cannot be read, fails its checksum, or contains a token that its tokenizer does not have.
        """
        row = np.empty(stop - start, dtype=np.int64)
        index, position = bisect_right(self._ends, start), start
        while position < stop:
            first = self._ends[index] - self.manifest.shards[index].tokens
            end = min(stop, self._ends[index])
            row[position - start : end - start] = self._part(index, position - first, end - position)
            position, index = end, index + 1
        largest = int(row.max(initial=0))
        if largest >= self.manifest.vocabulary:
            # The checksum was correct, but no model for this tokenizer has a row for the id.
            raise DataError(
                f"token {largest} at {start + int(row.argmax())} is outside the manifest's vocabulary of "
                f"{self.manifest.vocabulary}: tokenize again; `meshwright data verify` finds the shard"
            )
        return row

    def _part(self, index: int, offset: int, count: int) -> npt.NDArray[np.unsignedinteger]:
        size = self._dtype.itemsize
        self._checked.check(index, offset * size, (offset + count) * size)
        return np.frombuffer(self._bytes(index, offset * size, (offset + count) * size), dtype=self._dtype)

    def _sums(self, shard: ShardRecord) -> FileChecksums:
        size, name = shard.tokens * self._dtype.itemsize, str(self._directory.local(shard.file) or shard.file)
        if shard.block_crc32:
            return FileChecksums(name, size, BLOCK, shard.block_crc32)
        return FileChecksums(name, size, size, [shard.crc32])

    def _bytes(self, index: int, first: int, last: int) -> memoryview:
        """The bytes `first` to `last - 1` of a shard."""
        name = self.manifest.shards[index].file
        path = self._directory.local(name)
        if path is not None:
            if index not in self._maps:
                self._maps[index] = np.memmap(path, dtype=np.uint8, mode="r")
            return self._maps[index][first:last].data
        raw = self._directory.read(name, first, last - first)
        if len(raw) != last - first:
            raise DataError(f"{name} ends early: the data must not change during a run")
        return memoryview(raw)


def read_manifest(directory: Directory) -> TokensManifest:
    """The manifest of a directory of tokens.

    Raises:
        DataError: it is missing, damaged, or of an unknown version.
    """
    try:
        with directory.open(MANIFEST) as file:
            content = file.read()
    except (OSError, DataError) as error:
        raise DataError(
            f"no {MANIFEST}: expected a directory that `meshwright data tokenize` wrote ({error})"
        ) from error
    manifest = _parsed(content)
    itemsize = np.dtype(manifest.dtype).itemsize
    for shard in manifest.shards:
        if "/" in shard.file:
            raise DataError(f"{MANIFEST} is damaged: `{shard.file}` is not the name of a file next to it")
        if len(shard.block_crc32) not in (0, -(-shard.tokens * itemsize // BLOCK)):
            raise DataError(f"{MANIFEST} is damaged: {shard.file} has {len(shard.block_crc32)} checksums of blocks")
    return manifest


def _parsed(content: bytes) -> TokensManifest:
    try:
        fields = json.loads(content)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise DataError(f"{MANIFEST} is damaged: it is not a JSON object")
    if problem := checksum_error(fields):
        raise DataError(f"{MANIFEST} is damaged: {problem}; copy the directory again, or tokenize again")
    if fields.get("format") != FORMAT:
        raise DataError(
            f"{MANIFEST} has format {fields.get('format')}: this version reads format {FORMAT}; use the image of the "
            "version that wrote it, or tokenize again"
        )
    try:
        manifest = TokensManifest.model_validate(fields)
    except ValidationError as error:
        raise DataError(f"{MANIFEST} is damaged: {error.errors(include_url=False)[0]['msg']}") from error
    if manifest.dtype not in ("uint16", "uint32") or not manifest.shards:
        raise DataError(f"{MANIFEST} is damaged: no shards, or unknown type {manifest.dtype!r}")
    return manifest
