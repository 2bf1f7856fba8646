"""The files of a corpus, on a mounted volume or behind a URI that fsspec knows (`s3://`, `gs://`, `https://`, …).

Local files need nothing but the standard library; fsspec, and what it needs for a scheme, is imported when a URI asks
for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from meshwright.data.errors import DataError


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file."""

    name: str
    """Path below the folder, with `/`: what identifies the file on every machine."""
    size: int
    """Bytes."""


class Folder(Protocol):
    """A folder of files."""

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
        self._skip = skip

    def files(self) -> list[FileEntry]:
        """See `Folder.files`. Folders that are skipped are never entered: every rank walks at every start."""
        found = []
        for folder, folders, files in os.walk(self.root):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in self._skip]
            for file in files:
                path = os.path.join(folder, file)
                if not file.startswith(".") and os.path.isfile(path):
                    name = os.path.relpath(path, self.root).replace(os.sep, "/")
                    found.append(FileEntry(name, os.path.getsize(path)))
        return sorted(found, key=lambda entry: entry.name)

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
        except (ImportError, ValueError) as error:
            raise DataError(f"`data.uri: {uri}` cannot be opened: {error}") from error
        self._root = str(path).rstrip("/")

    def files(self) -> list[FileEntry]:
        """See `Folder.files`."""
        try:
            listed: dict[str, dict[str, Any]] = self._files.find(self._root, detail=True)
        except Exception as error:  # a back end raises what it likes
            raise DataError(f"`data.uri: {self._uri}` cannot be listed: {error}") from error
        entries = (
            FileEntry(path.removeprefix(self._root).lstrip("/"), int(found["size"])) for path, found in listed.items()
        )
        visible = (entry for entry in entries if not any(part.startswith(".") for part in entry.name.split("/")))
        return sorted(visible, key=lambda entry: entry.name)

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


def matching(folder: Folder, pattern: str) -> Iterator[FileEntry]:
    """The files whose names match a glob: `**` as any number of folders, `*` and `?` within one name."""
    wanted = _glob(pattern)
    return (entry for entry in folder.files() if wanted.fullmatch(entry.name))


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
