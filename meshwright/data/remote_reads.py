"""Reads of remote files: repeated while their error may pass, and checked for their length.

Most back ends of fsspec report the first lost connection or busy server as an error, which would end a step of training
on every rank.
"""

from __future__ import annotations

import logging
import random
import re
import tarfile
import time
import zipfile
from collections.abc import Callable
from typing import IO, Any, TypeVar

from meshwright.data.errors import DataError, StorageUnavailableError, is_permanent

log = logging.getLogger(__name__)

Result = TypeVar("Result")

PATIENCE_SECONDS = 60.0
"""How long a request is repeated. All ranks wait for the one whose samples are late."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 10.0
_BUSY = frozenset({408, 425, 429})
"""Statuses of HTTP below 500 that say: later."""
_SERVER_ERRORS = 500
_REJECTED = frozenset({401, 403})
_NO_RANGES = ("range request", "seek streaming")
"""Words of the errors with which fsspec says that a server can only send a file from its beginning."""
_WRONG = (ImportError, ValueError, TypeError, KeyError, AttributeError, zipfile.BadZipFile, tarfile.ReadError)
"""Errors of a wrong URI, a missing package or a broken archive."""


class ShortReadError(OSError):
    """A server has sent fewer bytes than were asked for."""


def may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed later: not if the URI, its package, its archive or its rights are wrong."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and cause is not None and _is_of_transport(cause):
        # fsspec says of each answer to a question for a size, and of none, that there is no such file.
        return may_pass(cause)
    status = _status(error)
    if status is not None:
        return status >= _SERVER_ERRORS or status in _BUSY
    if isinstance(error, _WRONG) or _is_of_another_file(error):
        return isinstance(error, StorageUnavailableError)
    return not (isinstance(error, OSError) and is_permanent(error))


def remote_error(failure: str, error: Exception) -> DataError:
    """The error to raise after a request has failed. `failure` says what could not be done."""
    text = without_passwords(f"{failure}: {str(error) or type(error).__name__}")
    if may_pass(error):
        return StorageUnavailableError(text)
    if _status(error) in _REJECTED or _status(error.__cause__) in _REJECTED:
        text += ": check the credentials in `workers.env`, and their rights"
    if isinstance(error, ValueError) and any(words in text for words in _NO_RANGES):
        reason = "the server does not send parts of a file (range requests): copy the files to a volume"
        text = without_passwords(f"{failure}: {reason}")
    if _is_of_another_file(error):
        text += ": the files of `data` must not change while a job runs"
    return DataError(text)


def without_passwords(text: str) -> str:
    """A text in which no URI has a password: it is for logs."""
    return re.sub(r"(://[^\s/@:]*):[^\s/]+@", r"\1:***@", text)


def repeated(
    action: Callable[[], Result],
    failure: str,
    patience: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Result:
    """Return the result of `action`, which is repeated while its error may pass, for `PATIENCE_SECONDS` by default.

    Raises:
        DataError: it still fails, or its error does not pass.
    """
    end = time.monotonic() + (PATIENCE_SECONDS if patience is None else patience)
    pause = _FIRST_PAUSE
    while True:
        try:
            return action()
        except DataError:
            raise
        except Exception as error:  # a back end raises what it likes
            # Ranks that failed together must not try again together.
            wait = max(pause * random.uniform(0.5, 1.0), _retry_after(error))  # noqa: S311
            if not may_pass(error) or time.monotonic() + wait > end:
                raise remote_error(failure, error) from error
            if pause == _FIRST_PAUSE:
                log.warning("%s; trying again for %.0f s", remote_error(failure, error), end - time.monotonic())
        sleep(wait)
        pause = min(2 * pause, _LONGEST_PAUSE)


def with_repeated_reads(file: IO[bytes], failure: str, *, ahead: bool) -> IO[bytes]:
    """Return an open file of fsspec whose requests are repeated.

    Without `ahead`, each read asks for its own bytes only: back ends read 5 to 50 MB ahead, which is a thousand times a
    sample.
    """
    from fsspec.caching import BaseCache
    from fsspec.spec import AbstractBufferedFile

    if isinstance(file, AbstractBufferedFile):
        cache = file.cache
        cache.fetcher = _repeated_fetcher(cache.fetcher, failure)
        # Asked for everything, a file over HTTP is loaded in one request, past its cache.
        file.read = _repeated_read(file.read, failure)
        if not ahead:
            file.cache = BaseCache(cache.blocksize, cache.fetcher, cache.size)
    return file


def _repeated_read(read: Callable[[int], bytes], failure: str) -> Callable[[int], bytes]:
    def read_repeatedly(length: int | None = -1) -> bytes:
        if length is None or length < 0:
            return repeated(lambda: read(-1), failure)
        return read(length)

    return read_repeatedly


def _repeated_fetcher(fetch: Callable[[int, int], bytes], failure: str) -> Callable[[int, int], bytes]:
    def fetch_all(start: int, end: int) -> bytes:
        content = fetch(start, end)
        if len(content) != end - start:
            # A reader would take this for the end of the file.
            raise ShortReadError(f"the server sent {len(content)} of the {end - start} bytes from {start} on")
        return content

    return lambda start, end: repeated(lambda: fetch_all(start, end), failure)


def _is_of_transport(error: BaseException) -> bool:
    """Whether an error is one of a request over HTTP, and not of what was answered."""
    return type(error).__module__.startswith("aiohttp") or isinstance(error, ConnectionError | TimeoutError)


def _is_of_another_file(error: BaseException) -> bool:
    """Whether s3fs says that an object is another one than the one that was listed."""
    return type(error).__name__ == "FileExpired"


def _status(error: BaseException | None) -> int | None:
    """The status of HTTP that an error was made from."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) and hasattr(error, "request_info") else None


def _retry_after(error: BaseException) -> float:
    """Seconds that a server asks to wait, 0 if it does not."""
    headers: Any = getattr(error, "headers", None)
    found = str(headers.get("Retry-After", "")) if headers is not None and hasattr(headers, "get") else ""
    return float(found) if re.fullmatch(r"\d{1,6}", found) else 0.0
