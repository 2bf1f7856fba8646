"""The checkpoint volume: writable, and the same one on all workers.

Each volume gets a file with a random id, which the first worker creates. Workers whose ids differ have different
volumes, and a checkpoint of all ranks could never be complete. The operator compares the ids.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path

ID_FILE = ".meshwright-volume"
"""In the directory of the mount, next to the directories of jobs."""
EMPTY_SECONDS = 5.0
"""Time for the worker that creates the file to write it, on a file system without hard links."""


def volume_id(checkpoint_dir: Path) -> str:
    """The id of the volume that contains a job's checkpoint directory.

    Raises:
        OSError: the volume cannot be written, or read.
    """
    mount = checkpoint_dir.parent
    _write_and_remove(mount)
    path = mount / ID_FILE
    if not path.exists():
        _create(path, uuid.uuid4().hex)
    deadline = time.monotonic() + EMPTY_SECONDS
    while not (text := path.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return text[:64]


def _write_and_remove(directory: Path) -> None:
    probe = directory / f".meshwright-probe-{uuid.uuid4().hex}"
    try:
        probe.write_text("probe")
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _create(path: Path, text: str) -> None:
    """Create the file with its content, unless another worker is first."""
    draft = path.with_name(f"{path.name}-{text}")
    draft.write_text(text)
    try:
        os.link(draft, path)
    except FileExistsError:
        return
    except OSError:
        # The file system has no hard links. Others may see the file before its content, and wait.
        with contextlib.suppress(FileExistsError), path.open("x") as file:
            file.write(text)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
