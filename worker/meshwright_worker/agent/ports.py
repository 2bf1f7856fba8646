"""Ports that a pod announces to its peers before it uses them."""

from __future__ import annotations

import random
import socket

FIRST_PORT = 20000
LAST_PORT = 32767
PORT_TRIES = 64


class ReservedPort:
    """The free port on which this pod would host the rendezvous store of the next generation, reserved until `release`.

    The port must be announced before rank 0 is chosen, and be free when rank 0 listens on it later. Until then a socket
    that is bound but does not listen reserves it. The port lies below the kernel's range for outgoing connections, so
    that none of these can take it between release and use. It is reserved on every address, because the store listens
    on every address.
    """

    def __init__(self) -> None:
        self._socket = _bind()
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Free the port for rank 0's store."""
        self._socket.close()


def _bind() -> socket.socket:
    # The store listens on `::`, for IPv4 too, unless the machine has no IPv6.
    dual_stack = socket.has_dualstack_ipv6()
    for _ in range(PORT_TRIES):
        candidate = socket.socket(socket.AF_INET6 if dual_stack else socket.AF_INET, socket.SOCK_STREAM)
        try:
            if dual_stack:
                candidate.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            candidate.bind(("", random.randint(FIRST_PORT, LAST_PORT)))  # noqa: S311 - spreading, not secrecy
        except OSError:
            candidate.close()
            continue
        return candidate
    raise OSError(f"no free port between {FIRST_PORT} and {LAST_PORT} in {PORT_TRIES} tries")
