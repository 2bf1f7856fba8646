"""Tokenizes text when a worker starts, once per pod: the first rank does it, the others wait.

The tokens are in scratch space, under a name derived from all inputs. A restarted rank reuses them, and stale tokens
are never used. Large corpora should be tokenized once for all jobs: `meshwright data tokenize`.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import posixpath
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from meshwright.api.data import DataSpec
from meshwright.api.data import Tokenizer as Kind
from meshwright.data.documents import SkippedRecords
from meshwright.data.errors import DataError
from meshwright.data.files import Directory, FileEntry, LocalDirectory, open_directory
from meshwright.data.shards import TokenShards
from meshwright.data.tokenize import Progress, TextSource, tokenize
from meshwright.data.tokenizers import Tokenizer, open_tokenizer
from meshwright_worker.rank.task import WorkProgress

log = logging.getLogger(__name__)

ENV_CACHE_DIR = "MESHWRIGHT_CACHE_DIR"
"""Directory for the tokens instead of the temporary directory: use a volume that outlives the pod to tokenize once."""
_LOG_SECONDS = 60.0
"""Time between two lines of the log while text is tokenized."""
_VERSION = "2"
"""Changed whenever the same text and tokenizer give other tokens. 2: special tokens in text are ordinary text."""


def open_data_tokenizer(data: DataSpec, root: str) -> Tokenizer:
    """Open the tokenizer that `data` names; `root` is the directory or URI of the data.

    Raises:
        DataError: it cannot be opened.
    """
    if data.tokenizer is Kind.BYTE or data.tokenizer_file is None:
        return open_tokenizer(data.tokenizer, None)
    return open_tokenizer_at(data.tokenizer, root, data.tokenizer_file)


def open_tokenizer_at(kind: Kind, root: str, file: str) -> Tokenizer:
    """Open the tokenizer in the file `file` below a directory or URI.

    Raises:
        DataError: it cannot be opened.
    """
    directory = open_directory(root)
    path = directory.local(file)
    if path is not None:
        with _naming_file(file):
            return open_tokenizer(kind, path)
    with _naming_file(file), tempfile.TemporaryDirectory() as scratch, directory.open(file) as content:
        copy = Path(scratch) / posixpath.basename(file)  # what is wrong with it depends on its name
        copy.write_bytes(content.read())
        return open_tokenizer(kind, copy)


@contextmanager
def _naming_file(file: str) -> Iterator[None]:
    """Make errors of a tokenizer name the field, and storage that does not answer an error of the data."""
    try:
        yield
    except DataError as error:
        if "`data.tokenizer" in str(error):
            raise
        raise type(error)(f"`data.tokenizerFile: {file}`: {error}") from error
    except OSError as error:
        raise DataError(f"`data.tokenizerFile: {file}` cannot be read: {error}") from error


def data_source(data: DataSpec, directory: Directory, path: str | None = None) -> TextSource:
    """Return which files of a directory to read; with a mixture, those of the corpus at `path`. Excludes the
    tokenizer's file.
    """
    file = data.tokenizer_file and posixpath.relpath(f"/{data.tokenizer_file}", f"/{path or ''}")
    return TextSource(directory, data.pattern, data.format, data.field, data.on_corrupt_record, file)


def tokenized_shards(
    source: TextSource, files: Sequence[FileEntry], tokenizer: Tokenizer, progress: WorkProgress
) -> Directory:
    """Return the directory of shards with the tokens of `source`; creates it unless a rank of this pod already has.

    Args:
        source: what to read.
        files: its files.
        tokenizer: how to convert it.
        progress: receives the bytes that are tokenized. Ranks that wait for another one of their pod report nothing,
            so that nobody takes them for ranks at work if that one hangs.

    Raises:
        CorruptRecordError: a record cannot be read, and `data.onCorruptRecord` is `Fail`.
        DataError: no file matches, or a file cannot be read.
    """
    base = Path(os.environ.get(ENV_CACHE_DIR) or tempfile.gettempdir()) / f"meshwright-tokens-{os.getuid()}"
    target = base / _key(source, files, tokenizer)
    with ExitStack() as opened:
        with _writing_to(base, everything=True):
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            if base.stat().st_uid != os.getuid():
                raise DataError(f"{base} belongs to another user: set {ENV_CACHE_DIR} to a directory of this user")
            lock = opened.enter_context((base / f"{target.name}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_complete(target):
            shutil.rmtree(target, ignore_errors=True)
            with _writing_to(base, everything=False):
                _tokenize(source, files, tokenizer, target, progress)
    return LocalDirectory(target)


@contextmanager
def _writing_to(base: Path, *, everything: bool) -> Iterator[None]:
    """Make an error of the scratch space say so, and not that the data cannot be read. It is one if its file is there,
    or if `everything` in the block happens there.
    """
    try:
        yield
    except OSError as error:
        if not everything and not str(error.filename or "").startswith(f"{base}/"):
            raise
        raise DataError(
            f"the tokens of `data` cannot be written to {base}: {error.strerror or error}: set {ENV_CACHE_DIR} to a "
            "directory that can be written and is large enough, or tokenize once with `meshwright data tokenize`"
        ) from error


def _is_complete(target: Path) -> bool:
    """Return whether all tokens are there: a cache on a volume may outlive the process that writes it."""
    try:
        TokenShards(LocalDirectory(target))
    except DataError:
        return False
    return True


def _tokenize(
    source: TextSource, files: Sequence[FileEntry], tokenizer: Tokenizer, target: Path, progress: WorkProgress
) -> None:
    started = logged = time.monotonic()

    def report(now: Progress) -> None:
        nonlocal logged
        progress("tokenize", now.bytes, now.of_bytes)
        if time.monotonic() - logged >= _LOG_SECONDS:
            logged = time.monotonic()
            log.info("tokenized %d of %d bytes in %.0f s", now.bytes, now.of_bytes, logged - started)

    manifest, skipped = tokenize(source, tokenizer, target, report, files=files)
    log_skipped(skipped)
    seconds = time.monotonic() - started
    log.info("tokenized %d documents, %d tokens, in %.1f s", manifest.documents, manifest.tokens, seconds)


def log_skipped(skipped: SkippedRecords) -> None:
    """Log the records that could not be read."""
    for example in skipped.examples:
        log.warning("skipped: %s", example)
    if skipped.count:
        log.warning("skipped %d records (`data.onCorruptRecord: Skip`)", skipped.count)


def _key(source: TextSource, files: Sequence[FileEntry], tokenizer: Tokenizer) -> str:
    parts = [_VERSION, tokenizer.identity, source.kind, source.key, source.on_corrupt, source.directory.where]
    parts += [f"{entry.name}\0{entry.size}\0{entry.stamp}" for entry in files]
    # A name need not be valid UTF-8, and neither need a directory's.
    return hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()[:32]
