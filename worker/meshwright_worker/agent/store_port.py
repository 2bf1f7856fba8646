"""Reserves the port on which this pod would host the rendezvous store of the next generation.

The port must be announced before rank 0 is chosen, and be free when rank 0 listens on it later. Until then a socket
that is bound but does not listen reserves it. The port lies below the kernel's range for outgoing connections, so that
none of these can take it between release and use. It is reserved on every address, because the store listens on every
address.
"""

from __future__ import annotations

import random
import socket

FIRST_PORT = 20000
LAST_PORT = 32767
TRIES = 64


class ReservedPort:
    """A free port, reserved until `release`."""

    def __init__(self) -> None:
        self._socket = _bind()
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Free the port for rank 0's store."""
        self._socket.close()


def _bind() -> socket.socket:
    for _ in range(TRIES):
        candidate = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            candidate.bind(("", random.randint(FIRST_PORT, LAST_PORT)))  # noqa: S311 - spreading, not secrecy
        except OSError:
            candidate.close()
            continue
        return candidate
    raise OSError(f"no free port between {FIRST_PORT} and {LAST_PORT} in {TRIES} tries")
