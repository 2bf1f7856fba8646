"""Errors of checkpoints, by their handling: only a damaged checkpoint makes loading fall back to the previous one."""

from __future__ import annotations

import errno
from collections.abc import Mapping


class CheckpointError(RuntimeError):
    """A checkpoint could not be written."""


class NewerCheckpointsError(CheckpointError):
    """There are checkpoints of later steps, so the one to write would be removed first."""


class FailedSaveError(CheckpointError):
    """Some ranks could not write their part."""

    def __init__(self, failures: Mapping[int, BaseException]) -> None:
        super().__init__(failures)
        self.failures = failures
        """The error of each of these ranks."""


class DamagedCheckpointError(ValueError):
    """A checkpoint differs from what was written. The message names the file."""

    def __init__(self, message: str, file: str = "") -> None:
        super().__init__(message)
        self.file = file
        """The name of the file in the checkpoint; empty if that is the manifest, or not one file."""


class ForeignCheckpointError(ValueError):
    """A checkpoint is intact, but written by another version or for another kind of model (custom module or
    built-in).
    """


class CheckpointMismatchError(ValueError):
    """A checkpoint belongs to another run. The message names the difference and the fix."""


class ResumeSourceError(ValueError):
    """`checkpoint.resumeFrom` names no checkpoint that the run can begin from. The message says why, and the fix."""


class CheckpointVolumeError(OSError):
    """A rank cannot use the checkpoints' volume, or has another one. This does not mean that a checkpoint is
    damaged.
    """


class CheckpointStoreError(OSError):
    """An object store does not work, or rejects a request. The message names the object and the number of attempts."""


class UnusableStoreError(CheckpointStoreError):
    """An object store cannot be opened in this image: its scheme is unknown, or the package of the scheme is missing.
    Another attempt would end the same way.
    """


def causes_of(error: BaseException) -> list[tuple[str, BaseException]]:
    """What failed on which rank: a prefix such as `rank 3: `, and the error."""
    failures = error.failures if isinstance(error, FailedSaveError) else {}
    return [(f"rank {rank}: ", cause) for rank, cause in sorted(failures.items())] or [("", error)]


def is_storage_failure(error: BaseException) -> bool:
    """Whether only the storage failed, so that the ranks can train on and save later."""
    return all(isinstance(cause, OSError) for _, cause in causes_of(error))


def describe_failed_save(error: BaseException) -> str:
    """What failed on which rank, and the fix if the volume is full or read-only."""
    causes = causes_of(error)
    where, first = causes[0]
    text = f"{where}{type(first).__name__}: {first}"
    if any(isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT) for _, cause in causes):
        text += ": the volume of `checkpoint.claimName` is full: enlarge the claim, or retain fewer (`checkpoint.keep`)"
    elif any(isinstance(cause, OSError) and cause.errno in (errno.EROFS, errno.EACCES) for _, cause in causes):
        text += ": the volume of `checkpoint.claimName` is not writable: check its mount and permissions"
    return text + (f" (and {len(causes) - 1} more ranks)" if len(causes) > 1 else "")
