"""The files of a corpus, on a mounted volume or behind a URI that fsspec can read (`s3://`, `gs://`, `https://`, …).

Local files need only the standard library. fsspec, and its package for a scheme, is imported when a URI needs it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

from meshwright.data.errors import DataError, StorageUnavailableError, is_permanent
from meshwright.data.remote_reads import remote_error, repeated, with_repeated_reads, without_passwords

_LOST_AND_FOUND = "lost+found"
"""A file system's directory for repaired files at the root of a volume. Only root can read it."""
_LISTED = 1000
"""Files that are listed between two reports of progress: on a file server each takes a request."""
_STAMP_KEYS = (
    *("ETag", "etag", "md5Hash", "sha", "blob_id", "CRC"),
    *("mtime", "LastModified", "Last-Modified", "last_modified", "updated", "created"),
)
"""Names that back ends of fsspec have for a value that changes when a file changes, the most reliable first."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file."""

    name: str
    """Path below the directory, with `/`. It identifies the file on every machine."""
    size: int
    """Bytes."""
    stamp: str = field(default="", compare=False)
    """A value that changes when the file is written. It may differ between machines, so no run's identity has it."""
    problem: str = field(default="", compare=False)
    """Why the file cannot be read, such as a dangling link, and what to do. Empty if it can be read."""
    may_pass: bool = field(default=False, compare=False)
    """Whether the `problem` may resolve by itself."""


class Directory(Protocol):
    """A directory of files."""

    @property
    def where(self) -> str:
        """Its path or URI."""

    def files(self, on_listed: Callable[[int], None] = lambda _: None) -> list[FileEntry]:
        """All files below the directory, by name, without hidden ones (such as `..data` of projected volumes).

        `on_listed` is called from time to time with the number of files found so far.
        """

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Bytes of each of these files that exists, without a list of all others."""

    def open(self, name: str) -> IO[bytes]:
        """Open a file to read it from its beginning. The result can seek."""

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Read `length` bytes of a file from `offset` on, and no others: a sample is short, and the next one is far
        away. Fewer at the end of the file.
        """

    def local(self, name: str) -> Path | None:
        """The path of the file on this machine, or None if it is elsewhere."""


class LocalDirectory:
    """A directory of this machine.

    Raises:
        DataError: it does not exist.
    """

    def __init__(self, root: Path, skip: frozenset[str] = frozenset()) -> None:
        try:
            found = stat.S_ISDIR(root.stat().st_mode)
        except OSError as error:
            if not is_permanent(error):
                raise StorageUnavailableError(f"{root} cannot be read: {error}") from error
            found = False
        if not found:
            raise DataError(f"{root} is not a directory: mount the data there, or set another path")
        self.root = root
        self._skip = skip | {_LOST_AND_FOUND}

    @property
    def where(self) -> str:
        """See `Directory.where`."""
        return str(self.root.resolve())

    def files(self, on_listed: Callable[[int], None] = lambda _: None) -> list[FileEntry]:
        """See `Directory.files`. Follows links, except those to a directory that contains them.

        Skipped directories are never entered, because every rank walks the tree at every start.

        Raises:
            DataError: a directory cannot be read.
        """
        entry_stat = self.root.stat()
        found = []
        for entry in self._below(str(self.root), "", frozenset({(entry_stat.st_dev, entry_stat.st_ino)})):
            found.append(entry)
            if len(found) % _LISTED == 0:
                on_listed(len(found))
        return sorted(found, key=lambda entry: entry.name)

    def _below(self, directory: str, prefix: str, ancestors: frozenset[tuple[int, int]]) -> Iterator[FileEntry]:
        """The files of a directory, with `prefix` before their names. `ancestors` are the directories that contain it,
        including itself.
        """
        try:
            with os.scandir(directory) as found:
                entries = [entry for entry in found if not entry.name.startswith(".")]
        except OSError as error:
            raise DataError(
                f"directory {directory} cannot be read ({error.strerror}): let uid {os.geteuid()} read it, "
                "or move it out of the data directory"
            ) from error
        for entry in entries:
            try:
                entry_stat = entry.stat()
            except OSError as error:
                if not is_permanent(error):
                    raise StorageUnavailableError(f"{entry.path} cannot be read: {error}") from error
                yield FileEntry(
                    prefix + entry.name, 0, problem=f"{error.strerror}; mount what it links to, or remove it"
                )
                continue
            if stat.S_ISREG(entry_stat.st_mode):
                # The modification time can be set to any value, the change time cannot.
                yield FileEntry(
                    prefix + entry.name, entry_stat.st_size, f"{entry_stat.st_mtime_ns}/{entry_stat.st_ctime_ns}"
                )
            elif stat.S_ISDIR(entry_stat.st_mode) and entry.name not in self._skip:
                identity = (entry_stat.st_dev, entry_stat.st_ino)
                if identity not in ancestors:
                    yield from self._below(entry.path, f"{prefix}{entry.name}/", ancestors | {identity})

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """See `Directory.sizes`. A volume may have a million other files below the directory."""
        found = {}
        for name in names:
            try:
                found[name] = (self.root / name).stat().st_size
            except OSError as error:
                if not is_permanent(error):
                    raise StorageUnavailableError(f"{self.root / name} cannot be read: {error}") from error
        return found

    def open(self, name: str) -> IO[bytes]:
        """See `Directory.open`."""
        return (self.root / name).open("rb")

    def read(self, name: str, offset: int, length: int) -> bytes:
        """See `Directory.read`."""
        with self.open(name) as file:
            file.seek(offset)
            return file.read(length)

    def local(self, name: str) -> Path | None:
        """See `Directory.local`."""
        return self.root / name


class RemoteDirectory:
    """A directory behind a URI.

    Raises:
        DataError: the scheme is unknown, its package is missing, or the URI does not exist.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        try:
            import fsspec

            self._files, path = fsspec.core.url_to_fs(uri)
        except Exception as error:  # a back end raises what it likes
            raise remote_error(f"`data.uri: {uri}` cannot be opened", error) from error
        self._root = str(path).rstrip("/")
        self._found: list[FileEntry] | None = None
        self._patience: float | None = None

    @property
    def where(self) -> str:
        """See `Directory.where`."""
        return self._uri

    def files(self, on_listed: Callable[[int], None] = lambda _: None) -> list[FileEntry]:
        """See `Directory.files`. The list is cached, because a page of links takes a request per link.

        Raises:
            DataError: the URI cannot be listed, or is a file.
        """
        if self._found is None:
            self._found = self._list()
            on_listed(len(self._found))
        return list(self._found)

    def _list(self) -> list[FileEntry]:
        listed = _find(self._files, self._root, f"`data.uri: {self._uri}` cannot be listed")
        entries = [entry for path, found in listed.items() if (entry := self._entry(path, found)) is not None]
        if any(entry.size or entry.problem for entry in entries if not entry.name):
            raise DataError(
                f"`data.uri: {self._uri}` is a file: set the URI of its directory, and its name in `data.pattern`"
            )
        # An object store may have an empty object for the directory itself.
        named = (entry for entry in entries if entry.name)
        visible = (entry for entry in named if not any(part.startswith(".") for part in entry.name.split("/")))
        return sorted(visible, key=lambda entry: entry.name)

    def _entry(self, path: str, found: dict[str, Any]) -> FileEntry | None:
        """The entry of a listed file, or None if it is not a file."""
        # Only one `/`: the key `text//a.txt` of a store is another one than `text/a.txt`.
        name = path.removeprefix(self._root).removeprefix("/")
        if found.get("size") is None:
            # A page of links (`https://`) has no sizes. Its links to itself in another order are not files.
            if "?" in name:
                return None
            # Links of some servers begin with `./`: that is no hidden directory.
            name = "/".join(part for part in name.split("/") if part != ".")
            try:
                failure = f"the size of {path} is unknown"
                found = repeated(lambda: self._files.info(path), failure, self._patience)
            except DataError as error:
                if passes := isinstance(error, StorageUnavailableError):
                    # A server that does not answer is waited for once, not for each of its files.
                    self._patience = 0.0
                return FileEntry(name, 0, problem=f"`data.uri` lists it, but {_reason(error)}", may_pass=passes)
        if found.get("size") is None:
            return FileEntry(name, 0, problem="`data.uri` does not report its size; copy the files to a volume")
        stamp = next((str(found[key]) for key in _STAMP_KEYS if found.get(key)), "")
        return FileEntry(name, int(found["size"]), stamp)

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """See `Directory.sizes`. One listing takes fewer requests than the files."""
        wanted = frozenset(names)
        return {entry.name: entry.size for entry in self.files() if entry.name in wanted}

    def open(self, name: str) -> IO[bytes]:
        """See `Directory.open`."""
        return self._open(name, ahead=True)

    def read(self, name: str, offset: int, length: int) -> bytes:
        """See `Directory.read`."""
        try:
            with self._open(name, ahead=False) as file:
                file.seek(offset)
                return file.read(length)
        except DataError:
            raise
        except Exception as error:  # a back end raises what it likes
            raise remote_error(self._unreadable(name), error) from error

    def _open(self, name: str, *, ahead: bool) -> IO[bytes]:
        failure = self._unreadable(name)
        opened: IO[bytes] = repeated(lambda: self._files.open(f"{self._root}/{name}", "rb"), failure)
        return with_repeated_reads(opened, failure, ahead=ahead)

    def _unreadable(self, name: str) -> str:
        return f"{join_uri(self._uri, name)} cannot be read"

    def local(self, name: str) -> Path | None:
        """See `Directory.local`."""
        return None


def _reason(error: DataError) -> str:
    """Why a size is not known. For fsspec each answer is a FileNotFoundError, also that of a server that is busy."""
    cause = error.__cause__
    answer = cause.__cause__ if cause is not None else None
    return without_passwords(f"{cause!r} ({answer})" if answer is not None else f"{cause!r}")


def _find(files: Any, root: str, failure: str) -> dict[str, dict[str, Any]]:
    """All files below the root of an fsspec back end, with what it says about them. `failure` begins an error.

    fsspec's own `find`, of back ends that have none of theirs, leaves out directories that it cannot list: their text
    would be missing unnoticed, and an address that does not answer would have no files.
    """
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    kind = type(files)
    walks = kind._find is AsyncFileSystem._find if files.async_impl else kind.find is AbstractFileSystem.find
    if not walks:
        found: dict[str, dict[str, Any]] = repeated(lambda: files.find(root, detail=True), failure)
        return found
    found = {}
    directories, seen = [root], {root.rstrip("/")}
    while directories:
        directory = directories.pop()
        for entry in repeated(partial(files.ls, directory, detail=True), failure):
            path = str(entry["name"]).rstrip("/")
            if entry["type"] != "directory":
                found[entry["name"]] = entry
            elif path not in seen:
                seen.add(path)
                directories.append(entry["name"])
    if not found and repeated(lambda: files.isfile(root), failure):
        found[root] = {}
    return found


def open_directory(where: str) -> Directory:
    """The directory at a path or a URI.

    Raises:
        DataError: it does not exist.
    """
    if where.startswith("file://"):
        where = where.removeprefix("file://")
    return RemoteDirectory(where) if "://" in where else LocalDirectory(Path(where))


def join_uri(where: str, path: str) -> str:
    """Append `path` to a path or URI: in a chain such as `zip://text::s3://bucket/a.zip`, to its first part.

    Example:
        >>> below("zip://::file:///a.zip", "web")
        'zip://web::file:///a.zip'
    """
    head, link, rest = where.partition("::") if "://" in where else (where, "", "")
    return f"{head if head.endswith('://') else head.rstrip('/') + '/'}{path}{link}{rest}"


def split_uri(where: str) -> tuple[str, str]:
    """Split the path or URI of a file into directory and name. `join_uri` joins them."""
    head, link, rest = where.partition("::") if "://" in where else (where, "", "")
    directory, _, name = head.rpartition("/")
    return f"{directory}{'/' if directory.endswith(':/') else ''}{link}{rest}", name


def matching_files(
    directory: Directory, pattern: str, on_listed: Callable[[int], None] = lambda _: None
) -> Iterator[FileEntry]:
    """The files whose names match a pattern: `**` matches any number of directories, `*` and `?` within one name. For
    `on_listed` see `Directory.files`.

    Raises:
        DataError: the directory cannot be listed, or a matching file cannot be read.
    """
    pattern_regex = _glob(pattern)
    for entry in directory.files(on_listed):
        if not pattern_regex.fullmatch(entry.name):
            continue
        if entry.problem:
            kind = StorageUnavailableError if entry.may_pass else DataError
            raise kind(f"{entry.name} cannot be read: {entry.problem}, or exclude it with `data.pattern`")
        yield entry


def _glob(pattern: str) -> re.Pattern[str]:
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
