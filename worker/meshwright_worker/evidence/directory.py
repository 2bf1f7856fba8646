"""The directory of failed ranks on a job's checkpoint volume: one directory per mesh generation and rank.

Agents of several pods write to it at the same time, and any of them may die while it does. Each record is written under
a hidden name and renamed, so that a record is complete or invisible. The number of records is bounded.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

from meshwright_worker.evidence.record import FailureRecord

DIRECTORY = "failures"
MAX_RECORDS = 128
"""Records of one job. When there are more, those of the oldest generations are removed."""
_NAME = re.compile(r"generation-(\d{8,})-rank-(\d{5,})")
_HIDDEN = ".writing-"
_ABANDONED_SECONDS = 3600.0


def record_name(generation: int, rank: int) -> str:
    """The name of a record's directory."""
    return f"generation-{generation:08d}-rank-{rank:05d}"


def record_path(root: str | os.PathLike[str], generation: int, rank: int) -> Path:
    """Where the record of a rank is, below the directory of a job's checkpoints."""
    return Path(root) / DIRECTORY / record_name(generation, rank)


def write_record(root: str | os.PathLike[str], record: FailureRecord) -> Path:
    """Write a record, and remove the oldest ones if there are too many.

    Raises:
        OSError: the volume cannot be written.
    """
    final = record_path(root, record.generation, record.rank)
    hidden = final.with_name(f"{_HIDDEN}{record.worker}-{record.incarnation}-{final.name}")
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    for name, content in record.files().items():
        with (hidden / name).open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    if final.exists():
        shutil.rmtree(final, ignore_errors=True)
    hidden.rename(final)
    _prune(final.parent)
    return final


def _prune(directory: Path) -> None:
    """Remove the oldest records, and what dead agents have left behind."""
    found = []
    for entry in directory.iterdir():
        if name := _NAME.fullmatch(entry.name):
            found.append((int(name[1]), -int(name[2]), entry))
        elif entry.name.startswith(_HIDDEN) and _age(entry) > _ABANDONED_SECONDS:
            shutil.rmtree(entry, ignore_errors=True)
    for _, _, entry in sorted(found)[: max(0, len(found) - MAX_RECORDS)]:
        shutil.rmtree(entry, ignore_errors=True)


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
