"""Repeats a request to a remote store while its error may pass, with exponential backoff."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from meshwright_worker.checkpoint_errors import CheckpointStoreError

Result = TypeVar("Result")

_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_PERMANENT_ERRNO = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENXIO}
_WRONG = (ImportError, ValueError, TypeError, KeyError, AttributeError, NotImplementedError)
"""Errors of a wrong setting or a missing package, which another attempt would repeat."""

_CREDENTIALS = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
_SECRET = "pods read the Secret of `checkpoint.store.secretName` when they start"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how fast a request is repeated."""

    attempts: int = 6
    first_seconds: float = 0.5
    """Time before the second attempt. It doubles with each further one."""
    longest_seconds: float = 15.0


def retry(
    action: Callable[[], Result], failure: str, policy: RetryPolicy, sleep: Callable[[float], None] = time.sleep
) -> Result:
    """Return the result of `action`, repeated while its error may pass: a time-out, a lost connection, a busy store.

    Raises:
        OSError: it still fails, or its error does not pass. A missing object is a FileNotFoundError.
    """
    for attempt in range(1, policy.attempts + 1):
        try:
            return action()
        except Exception as error:  # a back end raises what it likes
            if isinstance(error, FileNotFoundError):
                raise
            if attempt == policy.attempts or not _may_pass(error):
                number = error.errno if isinstance(error, OSError) else None
                text = (
                    f"{failure} ({attempt} attempt{'s' * (attempt > 1)}): {type(error).__name__}: {error}{_fix(error)}"
                )
                raise (CheckpointStoreError(number, text) if number else CheckpointStoreError(text)) from error
        longest = min(policy.longest_seconds, policy.first_seconds * 2 ** (attempt - 1))
        # Ranks that failed together must not try again together.
        sleep(longest * random.uniform(0.5, 1.0))  # noqa: S311
    raise AssertionError("unreachable")


def error_code(error: BaseException) -> str:
    """The code of the answer of S3 from which an error was made, such as `NoSuchBucket`; empty if there is none."""
    cause: BaseException | None = error
    for _ in range(8):
        if cause is None:
            break
        response = getattr(cause, "response", None)
        if isinstance(response, dict) and isinstance(response.get("Error"), dict):
            return str(response["Error"].get("Code", ""))
        cause = cause.__cause__ or cause.__context__
    return ""


def _fix(error: Exception) -> str:
    """What to do about an error of which the store's own text does not tell it."""
    code = error_code(error)
    if code == "RequestTimeTooSkewed":
        return ": the clock of this node is wrong: correct it"
    if isinstance(error, PermissionError) or code in _CREDENTIALS:
        return f"{f' ({code})' if code else ''}: check the credentials and their rights in the bucket; {_SECRET}"
    return ""


def _may_pass(error: Exception) -> bool:
    if isinstance(error, OSError) and error.errno in _PERMANENT_ERRNO:
        return False
    if error_code(error) in _CREDENTIALS:
        return False
    return not isinstance(error, (*_PERMANENT, *_WRONG)) and type(error).__name__ != "NoCredentialsError"
