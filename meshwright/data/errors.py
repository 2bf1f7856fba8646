"""Errors of training data, and which of them may resolve by themselves."""

from __future__ import annotations

import errno

_PERMANENT_ERRNOS = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM),
        *(errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EROFS),
    }
)
"""A path that is wrong or must not be read. Others, such as EIO, ESTALE or ETIMEDOUT, are faults of the storage."""


class DataError(ValueError):
    """The training data cannot be read. The message names the field, the file and the fix."""


class CorruptRecordError(DataError):
    """One record cannot be read. The message names file and line."""


class StorageUnavailableError(DataError):
    """The storage of the data does not answer now. Another attempt may succeed."""


def is_permanent(error: OSError) -> bool:
    """Whether an operation on a file would fail again, because its path or its permissions are wrong."""
    kinds = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)  # remote ones have no errno
    return isinstance(error, kinds) or error.errno in _PERMANENT_ERRNOS


def is_storage_fault(error: BaseException) -> bool:
    """Whether an error, or one that caused it, is a fault of the storage that may resolve by itself."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, StorageUnavailableError) or (isinstance(cause, OSError) and not is_permanent(cause)):
            return True
        cause = cause.__cause__
    return False
