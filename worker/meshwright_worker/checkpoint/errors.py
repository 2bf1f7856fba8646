"""What can be wrong with checkpoints, by what to do about it: only a damaged one gives way to the one before it."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written."""


class DamagedCheckpointError(ValueError):
    """A checkpoint is not what was written. The message names the file."""


class ForeignCheckpointError(ValueError):
    """A checkpoint is whole, but of another version, or of a module of one's own instead of a model of the runtime."""


class CheckpointVolumeError(OSError):
    """A rank cannot use the checkpoints' volume, or has another one: nothing says that a checkpoint is damaged."""
