"""Opens the corpora that `data` names: the files of a directory or a bucket, or shards of tokens."""

from __future__ import annotations

import logging
import posixpath
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from meshwright.api.data import DataFormat, DataSource, DataSpec, Tokenizer
from meshwright.data.errors import DataError
from meshwright.data.files import Directory, FileEntry, LocalDirectory, join_uri, open_directory
from meshwright.data.shards import MANIFEST, TokensManifest, read_manifest
from meshwright.data.tokenize import TextSource
from meshwright_worker.data.corpus import Corpus, CorpusError, ShardCorpus, TextCorpus
from meshwright_worker.data.token_cache import data_source, open_data_tokenizer, tokenized_shards
from meshwright_worker.rank.task import WorkProgress

log = logging.getLogger(__name__)

_LINE_ENDINGS = (".jsonl", ".ndjson")
_MAX_NAMED = 5
"""Maximum number of files or directories in an error message."""


_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def open_corpus(
    data: DataSpec, data_dir: str | None, path: str | None = None, progress: WorkProgress | None = None
) -> Corpus:
    """Open the corpus that `data` names, or the mixture's corpus at `path`; `data_dir` is the root of the mounted
    volume. `progress` receives what is done.

    Raises:
        DataError: there is no volume, no file matches, or the corpus cannot be read.
    """
    if data.source is DataSource.PYTHON_STDLIB:
        library = LocalDirectory(Path(sysconfig.get_path("stdlib")), _EXCLUDED_FOLDERS)
        return TextCorpus(library, (entry for entry in library.files() if entry.name.endswith(".py")))
    root = data_root(data, data_dir)
    directory = open_data_directory(data, data_dir, path)
    if data.format is DataFormat.TOKENS:
        shards = _open_shards(directory)
        expected = open_data_tokenizer(data, root).identity
        if shards.manifest.tokenizer != expected:
            raise CorpusError(
                f"{path or root} contains tokens of `{shards.manifest.tokenizer}`, not of `{expected}`: set "
                "`data.tokenizer` and `data.tokenizerFile` to the tokenizer that wrote them"
            )
        return shards
    source, progress = data_source(data, directory, path), progress or WorkProgress()
    entries = matching_files(source, progress)
    if data.format is DataFormat.TEXT:
        _warn_of_records(entries)
        _warn_of_tokens(entries)
        if data.tokenizer is Tokenizer.BYTE:
            return TextCorpus(directory, entries)
    return ShardCorpus(tokenized_shards(source, entries, open_data_tokenizer(data, root), progress))


def _warn_of_records(entries: Sequence[FileEntry]) -> None:
    """Warn of files that are probably to be read record by record: as text, names of fields would be trained on."""
    names = [entry.name for entry in entries if entry.size and any(end in entry.name for end in _LINE_ENDINGS)]
    if names:
        log.warning(
            "%d of %d files, such as %s, have a record in each line by their names, and each file is read as one text: "
            "set `data.format: JSONLines`, or exclude them with `data.pattern`",
            *(len(names), len(entries), names[0]),
        )


def _warn_of_tokens(entries: Sequence[FileEntry]) -> None:
    """Warn of tokens that are read as text: their bytes would be trained on."""
    names = [entry.name for entry in entries if posixpath.basename(entry.name) == MANIFEST]
    if names:
        log.warning(
            "%s says that its directory has tokens of `meshwright data tokenize`, and their bytes are read as text: "
            "set `data.format: Tokens`, or exclude them with `data.pattern`",
            names[0],
        )


def matching_files(source: TextSource, progress: WorkProgress) -> list[FileEntry]:
    """Return the files that match `data.pattern`. `progress` receives their number while they are listed.

    Raises:
        CorpusError: all of them are empty, or none matches; lists the existing files.
    """
    entries = source.files(lambda found: progress("list", found))
    if any(entry.size for entry in entries):
        return entries
    existing = [entry.name for entry in source.directory.files() if entry.size and entry.name != source.without]
    problem = f"`data.pattern: {source.pattern}` matches {'only empty files' if entries else 'no file'}"
    if not existing:
        raise CorpusError(f"{problem}: the directory has no file with content")
    more = f" and {len(existing) - _MAX_NAMED} more" if len(existing) > _MAX_NAMED else ""
    raise CorpusError(f"{problem}; files there: {', '.join(existing[:_MAX_NAMED])}{more}")


def read_tokens_manifest(directory: Directory) -> TokensManifest:
    """Read the manifest in the directory of a tokenized corpus.

    Raises:
        CorpusError: it is missing or cannot be read.
    """
    try:
        return read_manifest(directory)
    except DataError as error:
        raise CorpusError(f"`data.format: Tokens`: {error}{_where_tokens_are(directory)}") from error


def _where_tokens_are(directory: Directory) -> str:
    """A hint if the tokens are in subdirectories; empty if they are not."""
    try:
        files = directory.files()
    except DataError:
        return ""
    found = [posixpath.dirname(entry.name) for entry in files if posixpath.basename(entry.name) == MANIFEST]
    if not found or "" in found:
        return ""
    parts = ", ".join(f"{{path: {path}, weight: 1}}" for path in found[:_MAX_NAMED])
    return f"; there are tokens in {', '.join(found[:_MAX_NAMED])}: set `data.mixture: [{parts}]`"


def _open_shards(directory: Directory) -> ShardCorpus:
    try:
        return ShardCorpus(directory)
    except DataError as error:
        raise CorpusError(f"`data.format: Tokens`: {error}{_where_tokens_are(directory)}") from error


def open_data_directory(data: DataSpec, data_dir: str | None, path: str | None = None) -> Directory:
    """Open the directory of the corpus, or of the mixture's corpus at `path`.

    Raises:
        DataError: no volume is mounted, or the directory does not exist; lists the existing ones.
    """
    root = data_root(data, data_dir)
    try:
        return open_directory(join_uri(root, path) if path else root)
    except DataError as error:
        if data.uri is not None:
            raise
        parent = Path(root) if path else Path(root).parent
        existing = sorted(entry.name for entry in parent.iterdir() if entry.is_dir()) if parent.is_dir() else []
        field = f"`data.mixture` with `path: {path}`" if path else "`data.claimName`"
        raise CorpusError(
            f"{field}: {error}; directories there: {', '.join(existing[:_MAX_NAMED]) or 'none'}"
        ) from error


def data_root(data: DataSpec, data_dir: str | None) -> str:
    """Return the directory of the data, as a path or a URI.

    Raises:
        CorpusError: no volume is mounted.
    """
    if data.uri is not None:
        return data.uri
    if data_dir is None:
        raise CorpusError("`data.source: Files` needs `data.claimName` or `data.uri`: no data volume is mounted")
    return data_dir
