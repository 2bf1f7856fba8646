"""A server of the S3 API (moto) for the tests of a module."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

from tests.distributed.rank_pool import free_port

START_SECONDS = 120.0


@contextlib.contextmanager
def serving(bucket: str) -> Iterator[str]:
    """Serve an empty bucket. Yields the address of the server."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(urllib.request.Request(f"{url}/{bucket}", method="PUT"), timeout=30).close()
                break
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of the server, which has the bucket `checkpoints`."""
    with serving("checkpoints") as url:
        yield url
