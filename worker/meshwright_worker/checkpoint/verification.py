"""Verifies that the files of a checkpoint are as they were written."""

from __future__ import annotations

from pathlib import Path

from meshwright_worker.checkpoint.errors import DamagedCheckpointError
from meshwright_worker.checkpoint.manifest import BaseManifest, FileRecord
from meshwright_worker.checkpoint.safetensors_format import file_checksum


def check_files(checkpoint: Path, manifest: BaseManifest, rank: int = 0, world_size: int = 1) -> None:
    """Read every byte of this rank's share of a checkpoint's files; by default of all files.

    Raises:
        DamagedCheckpointError: one is missing, or differs from what was written.
        OSError: one cannot be read, which does not mean that the checkpoint is damaged.
    """
    for name in sorted(manifest.files)[rank::world_size]:
        check_file(checkpoint / name, manifest.files[name])


def check_file(path: Path, record: FileRecord) -> None:
    """Verify one file.

    Raises:
        DamagedCheckpointError, OSError: as `check_files`.
    """
    try:
        actual = file_checksum(path)
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{path} is damaged: the file is missing") from None
    if actual[0] != record.size:
        raise DamagedCheckpointError(f"{path} is damaged: it has {actual[0]} bytes where {record.size} were written")
    if actual[1] != record.crc32:
        raise DamagedCheckpointError(f"{path} is damaged: its checksum is not that of what was written")
