"""The files of a corpus, on a mounted volume or behind a URI that fsspec knows (`s3://`, `gs://`, `https://`, …).

Local files need nothing but the standard library; fsspec, and what it needs for a scheme, is imported when a URI asks
for it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from meshwright.data.errors import DataError

_LOST_AND_FOUND = "lost+found"
"""What a file system's repair keeps at the root of a volume: nobody's data, and for root alone to read."""
_STAMP_KEYS = (
    *("ETag", "etag", "md5Hash", "sha", "blob_id", "CRC"),
    *("mtime", "LastModified", "Last-Modified", "last_modified", "updated", "created"),
)
"""What back ends of fsspec call that which changes when a file does, the surest first."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file."""

    name: str
    """Path below the folder, with `/`: what identifies the file on every machine."""
    size: int
    """Bytes."""
    stamp: str = field(default="", compare=False)
    """Another one when the file was written again. Machines may differ in it, so it belongs to no run's identity."""
    problem: str = field(default="", compare=False)
    """Why it cannot be read, as a link to nothing cannot, and what would help; empty for a good file."""


class Folder(Protocol):
    """A folder of files."""

    @property
    def where(self) -> str:
        """Its path or URI."""

    def files(self) -> list[FileEntry]:
        """Every file below, by name; hidden ones are no data (Kubernetes keeps `..data` beside projected files)."""

    def open(self, name: str) -> IO[bytes]:
        """A file to read, able to seek."""

    def local(self, name: str) -> Path | None:
        """Where the file lies on this machine; None when it is elsewhere."""


class LocalFolder:
    """A folder of this machine.

    Raises:
        DataError: it does not exist.
    """

    def __init__(self, root: Path, skip: frozenset[str] = frozenset()) -> None:
        if not root.is_dir():
            raise DataError(f"{root} is no folder: mount the data there, or name another path")
        self.root = root
        self._skip = skip | {_LOST_AND_FOUND}

    @property
    def where(self) -> str:
        """See `Folder.where`."""
        return str(self.root.resolve())

    def files(self) -> list[FileEntry]:
        """See `Folder.files`. Links are followed, but for those to a folder that they lie in.

        Folders that are skipped are never entered: every rank walks at every start.

        Raises:
            DataError: a folder cannot be read; nobody knows what is in it.
        """
        entry_stat = self.root.stat()
        found = self._below(str(self.root), "", frozenset({(entry_stat.st_dev, entry_stat.st_ino)}))
        return sorted(found, key=lambda entry: entry.name)

    def _below(self, folder: str, prefix: str, ancestors: frozenset[tuple[int, int]]) -> Iterator[FileEntry]:
        """The files of a folder, their names behind `prefix`; `ancestors` are the folders that it lies in, itself
        too.
        """
        try:
            with os.scandir(folder) as found:
                entries = [entry for entry in found if not entry.name.startswith(".")]
        except OSError as error:
            raise DataError(
                f"the folder {folder} cannot be read ({error.strerror}): give uid {os.geteuid()} the right to read it, "
                "or move it out of the data"
            ) from error
        for entry in entries:
            try:
                entry_stat = entry.stat()
            except OSError as error:
                yield FileEntry(
                    prefix + entry.name, 0, problem=f"{error.strerror}; mount what it links to, or remove it"
                )
                continue
            if stat.S_ISREG(entry_stat.st_mode):
                # A file's own time can be set to anything; the time of its last change of any kind cannot.
                yield FileEntry(
                    prefix + entry.name, entry_stat.st_size, f"{entry_stat.st_mtime_ns}/{entry_stat.st_ctime_ns}"
                )
            elif stat.S_ISDIR(entry_stat.st_mode) and entry.name not in self._skip:
                identity = (entry_stat.st_dev, entry_stat.st_ino)
                if identity not in ancestors:
                    yield from self._below(entry.path, f"{prefix}{entry.name}/", ancestors | {identity})

    def open(self, name: str) -> IO[bytes]:
        """See `Folder.open`."""
        return (self.root / name).open("rb")

    def local(self, name: str) -> Path | None:
        """See `Folder.local`."""
        return self.root / name


class RemoteFolder:
    """A folder behind a URI.

    Raises:
        DataError: the scheme is not known, its package is missing, or nothing is there.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        try:
            import fsspec

            self._files, path = fsspec.core.url_to_fs(uri)
        except Exception as error:  # a back end raises what it likes
            raise DataError(f"`data.uri: {uri}` cannot be opened: {error}") from error
        self._root = str(path).rstrip("/")
        self._found: list[FileEntry] | None = None

    @property
    def where(self) -> str:
        """See `Folder.where`."""
        return self._uri

    def files(self) -> list[FileEntry]:
        """See `Folder.files`. Asked for once: a page of links takes a request for each of them.

        Raises:
            DataError: it cannot be listed, or is a file.
        """
        if self._found is None:
            self._found = self._list()
        return list(self._found)

    def _list(self) -> list[FileEntry]:
        try:
            listed: dict[str, dict[str, Any]] = self._files.find(self._root, detail=True)
        except Exception as error:  # a back end raises what it likes
            raise DataError(f"`data.uri: {self._uri}` cannot be listed: {error}") from error
        entries = [entry for path, found in listed.items() if (entry := self._entry(path, found)) is not None]
        if any(entry.size or entry.problem for entry in entries if not entry.name):
            raise DataError(f"`data.uri: {self._uri}` is a file: name its folder, and the file in `data.pattern`")
        # An object store may keep an empty object for the folder itself.
        named = (entry for entry in entries if entry.name)
        visible = (entry for entry in named if not any(part.startswith(".") for part in entry.name.split("/")))
        return sorted(visible, key=lambda entry: entry.name)

    def _entry(self, path: str, found: dict[str, Any]) -> FileEntry | None:
        """A file as it was listed; None for what is none."""
        name = path.removeprefix(self._root).lstrip("/")
        if found.get("size") is None:
            # A page of links, as `https://` has, tells no sizes; those to itself in another order are no files.
            if "?" in name:
                return None
            try:
                found = self._files.info(path)
            except Exception as error:  # a back end raises what it likes
                return FileEntry(name, 0, problem=f"`data.uri` names it, but {error!r}")
        if found.get("size") is None:
            return FileEntry(name, 0, problem="`data.uri` does not tell its size; copy the files to a volume")
        stamp = next((str(found[key]) for key in _STAMP_KEYS if found.get(key)), "")
        return FileEntry(name, int(found["size"]), stamp)

    def open(self, name: str) -> IO[bytes]:
        """See `Folder.open`."""
        try:
            opened: IO[bytes] = self._files.open(f"{self._root}/{name}", "rb")
        except Exception as error:  # a back end raises what it likes
            raise DataError(f"{self._uri}/{name} cannot be read: {error}") from error
        return opened

    def local(self, name: str) -> Path | None:
        """See `Folder.local`."""
        return None


def open_folder(where: str) -> Folder:
    """The folder at a path or a URI.

    Raises:
        DataError: there is none.
    """
    if where.startswith("file://"):
        where = where.removeprefix("file://")
    return RemoteFolder(where) if "://" in where else LocalFolder(Path(where))


def join_uri(where: str, path: str) -> str:
    """The path or URI of `path` below another one; in a chain such as `zip://text::s3://bucket/a.zip` it is the first.

    Example:
        >>> below("zip://::file:///a.zip", "web")
        'zip://web::file:///a.zip'
    """
    head, link, rest = where.partition("::") if "://" in where else (where, "", "")
    return f"{head if head.endswith('://') else head.rstrip('/') + '/'}{path}{link}{rest}"


def split_uri(where: str) -> tuple[str, str]:
    """The folder and the name of a path or URI of a file, which `join_uri` puts together again."""
    head, link, rest = where.partition("::") if "://" in where else (where, "", "")
    folder, _, name = head.rpartition("/")
    return f"{folder}{'/' if folder.endswith(':/') else ''}{link}{rest}", name


def matching_files(folder: Folder, pattern: str) -> Iterator[FileEntry]:
    """The files whose names match a glob: `**` as any number of folders, `*` and `?` within one name.

    Raises:
        DataError: the folder cannot be listed, or one of them cannot be read.
    """
    pattern_regex = _glob(pattern)
    for entry in folder.files():
        if not pattern_regex.fullmatch(entry.name):
            continue
        if entry.problem:
            raise DataError(f"{entry.name} cannot be read: {entry.problem}, or leave it out with `data.pattern`")
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
