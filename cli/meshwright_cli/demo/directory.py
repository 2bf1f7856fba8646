"""The directory of a demo. The files remain after the demo; the next demo replaces them, and only them."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MARKER = ".meshwright-demo"


class DirectoryError(Exception):
    """The directory cannot be used. The message has the reason and what to do."""


@contextmanager
def demo_directory(path: Path) -> Iterator[Path]:
    """An empty directory that no other demo can use while the context lasts.

    What an earlier demo left there is deleted. A marker file says that the directory belongs to demos, and a lock on it
    keeps a second one out.

    Raises:
        DirectoryError: another demo uses it, it contains files of another program, or it cannot be written.
    """
    path = path.absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        marker = path / MARKER
        if not marker.exists() and any(path.iterdir()):
            raise DirectoryError(
                f"{path} contains files that are not from a demo: choose another directory with --directory"
            )
        with marker.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = (
                    f"another demo is running in {path}: wait for it, or choose another directory with --directory"
                )
                raise DirectoryError(message) from None
            clear(path)
            yield path
    except PermissionError as error:
        raise DirectoryError(
            f"{error.filename or path} cannot be written: choose another directory with --directory"
        ) from error


def clear(path: Path) -> None:
    """Delete everything in the directory except the marker."""
    for entry in path.iterdir():
        if entry.name == MARKER:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
