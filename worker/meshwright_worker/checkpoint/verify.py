"""Whether the files of a checkpoint are what was written."""

from __future__ import annotations

from pathlib import Path

from meshwright_worker.checkpoint.errors import DamagedCheckpointError
from meshwright_worker.checkpoint.manifest import FileRecord, Written
from meshwright_worker.checkpoint.safetensors import checksum_of


def check_files(checkpoint: Path, manifest: Written, rank: int = 0, world_size: int = 1) -> None:
    """Read this rank's share of a checkpoint's files, every byte of them; by default all files.

    Raises:
        DamagedCheckpointError: one is missing, or is not what was written.
        OSError: one cannot be read, which says nothing about the checkpoint.
    """
    for name in sorted(manifest.files)[rank::world_size]:
        check_file(checkpoint / name, manifest.files[name])


def check_file(path: Path, record: FileRecord) -> None:
    """Read one file.

    Raises:
        DamagedCheckpointError, OSError: as `check_files`.
    """
    try:
        found = checksum_of(path)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is damaged: the file is missing") from None
    if found[0] != record.size:
        raise DamagedCheckpointError(f"{path} is damaged: it has {found[0]} bytes where {record.size} were written")
    if found[1] != record.crc32:
        raise DamagedCheckpointError(f"{path} is damaged: its checksum is not that of what was written")
