"""Files as one long row of tokens, read where needed.

Only sizes are held in memory: a sample is read from its file when it is used, so a rank starts at once and the corpus
may be larger than memory. The page cache keeps what is read again.
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshwright.api.spec import DataSource, DataSpec
from meshwright_worker.data.tokenizer import SEPARATOR

Tokens = npt.NDArray[np.int64]

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


class CorpusError(ValueError):
    """The training text cannot be read. The message names the field and the fix."""


@dataclass(frozen=True, slots=True)
class Document:
    """One file of the corpus."""

    path: Path
    name: str
    """Path relative to the corpus' root: what identifies the document on every machine."""
    size: int
    """Bytes, and so tokens before the separator."""


class Corpus:
    """Documents in a fixed order, each followed by the separator, addressed as one row of tokens.

    Raises:
        CorpusError: there is no document with any content.
    """

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents = [document for document in documents if document.size]
        if not self._documents:
            raise CorpusError("no text to train on: no file matches `data.pattern`, or all of them are empty")
        self._ends = np.cumsum([document.size + 1 for document in self._documents])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def fingerprint(self) -> str:
        """Hash of names and sizes: whether two machines, or two starts of a run, see the same row of tokens."""
        lines = (f"{document.name}\0{document.size}\n" for document in self._documents)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def documents(self, start: int, stop: int) -> list[int]:
        """Tokens of each document, its separator with it, among the tokens at `start` to `stop - 1`. Reads no file."""
        first, last = np.searchsorted(self._ends, [start, stop], side="right")
        ends = [end for end in self._ends[first:last].tolist() if end < stop]
        borders = [start, *ends, stop] if start < stop else []
        return [end - begin for begin, end in zip(borders, borders[1:], strict=False)]

    def tokens(self, start: int, stop: int) -> Tokens:
        """The tokens at `start` to `stop - 1`, shape [stop - start].

        Raises:
            CorpusError: a file is shorter than when the corpus was opened.
        """
        row = np.full(stop - start, SEPARATOR, dtype=np.int64)
        index = int(np.searchsorted(self._ends, start, side="right"))
        position = start
        while position < stop:
            document, end = self._documents[index], int(self._ends[index])
            begin = end - 1 - document.size
            length = min(stop, end - 1) - position
            if length > 0:
                row[position - start : position - start + length] = _read(document, position - begin, length)
            position, index = end, index + 1
        return row


def open_corpus(data: DataSpec, data_dir: str | None) -> Corpus:
    """The corpus that `data` names; `data_dir` is the root of the mounted volume.

    Raises:
        CorpusError: there is no volume, or nothing in it matches.
    """
    if data.source is DataSource.PYTHON_STDLIB:
        return Corpus(_walk(Path(sysconfig.get_path("stdlib")), skip=_NOT_LIBRARY, suffix=".py"))
    if data_dir is None:
        raise CorpusError("`data.source: Files` needs `data.claimName`: no data volume is mounted")
    wanted = _glob_pattern(data.pattern)
    return Corpus(document for document in _walk(Path(data_dir)) if wanted.fullmatch(document.name))


def _walk(root: Path, skip: frozenset[str] = frozenset(), suffix: str = "") -> list[Document]:
    # Hidden entries are not data: Kubernetes keeps `..data` beside the files of projected volumes.
    # Every rank does this at every start, so directories that are skipped are never entered.
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        for file in files:
            path = os.path.join(folder, file)
            if file.endswith(suffix) and not file.startswith(".") and os.path.isfile(path):
                found.append(Document(Path(path), os.path.relpath(path, root), os.path.getsize(path)))
    return sorted(found, key=lambda document: document.name)


def _glob_pattern(pattern: str) -> re.Pattern[str]:
    """`**` as any number of folders, `*` and `?` within one name."""
    parts = pattern.strip("/").split("/")
    text = ""
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if part == "**":
            text += ".*" if last else "(?:.*/)?"
            continue
        name = "".join({"*": "[^/]*", "?": "[^/]"}.get(letter, re.escape(letter)) for letter in part)
        text += name if last else name + "/"
    return re.compile(text, re.DOTALL)


def _read(document: Document, offset: int, length: int) -> npt.NDArray[np.uint8]:
    with document.path.open("rb") as file:
        file.seek(offset)
        raw = file.read(length)
    if len(raw) != length:
        raise CorpusError(f"{document.path} became shorter while it is trained on; `data` must not change during a run")
    return np.frombuffer(raw, dtype=np.uint8)
