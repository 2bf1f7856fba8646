"""Errors of checkpoints, by their handling: only a damaged checkpoint makes loading fall back to the previous one."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written."""


class DamagedCheckpointError(ValueError):
    """A checkpoint differs from what was written. The message names the file."""


class ForeignCheckpointError(ValueError):
    """A checkpoint is intact, but written by another version or for another kind of model (custom module or
    built-in).
    """


class CheckpointMismatchError(ValueError):
    """A checkpoint belongs to another run. The message names the difference and the fix."""


class CheckpointVolumeError(OSError):
    """A rank cannot use the checkpoints' volume, or has another one. This does not mean that a checkpoint is
    damaged.
    """
