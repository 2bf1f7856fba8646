"""Files as one long row of tokens, read where needed.

Only sizes are held in memory: a sample is read from its file when it is used, so a rank starts at once and the corpus
may be larger than memory. The page cache keeps what is read again.
"""

from __future__ import annotations

import hashlib
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
        root = Path(sysconfig.get_path("stdlib"))
        paths = (path for path in root.rglob("*.py") if _NOT_LIBRARY.isdisjoint(path.relative_to(root).parts))
        return Corpus(_documents(root, paths))
    if data_dir is None:
        raise CorpusError("`data.source: Files` needs `data.claimName`: no data volume is mounted")
    root = Path(data_dir)
    # Hidden entries are not data: Kubernetes keeps `..data` beside the files of projected volumes.
    visible = (
        path for path in root.glob(data.pattern) if not any(p.startswith(".") for p in path.relative_to(root).parts)
    )
    return Corpus(_documents(root, visible))


def _documents(root: Path, paths: Iterable[Path]) -> list[Document]:
    found = [
        Document(path, path.relative_to(root).as_posix(), path.stat().st_size) for path in paths if path.is_file()
    ]
    return sorted(found, key=lambda document: document.name)


def _read(document: Document, offset: int, length: int) -> npt.NDArray[np.uint8]:
    with document.path.open("rb") as file:
        file.seek(offset)
        raw = file.read(length)
    if len(raw) != length:
        raise CorpusError(f"{document.path} became shorter while it is trained on; `data` must not change during a run")
    return np.frombuffer(raw, dtype=np.uint8)
