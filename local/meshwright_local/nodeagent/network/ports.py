"""Ports that are free, and stay so until they are used."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST_PORT = 12_000
_LINUX_FIRST_PORT = 32_768
"""The first port that Linux gives to outgoing connections, if it is not configured."""


def free_port(address: str = "127.0.0.1") -> int:
    """Return a TCP port of an address (empty for all) that no process has bound now.

    It is below those that the kernel gives to outgoing connections: one of these could take it before it is used. And a
    client that connects again and again before a server listens could be connected to itself.
    """
    with bind_free_port(address) as probe:
        return int(probe.getsockname()[1])


def bind_free_port(address: str) -> socket.socket:
    """Return a socket that is bound to a free port of an address, as `free_port` chooses it, and does not listen."""
    for port in random.SystemRandom().sample(range(_FIRST_PORT, _first_port_of_connections()), 100):
        candidate = socket.socket()
        try:
            candidate.bind((address, port))
        except OSError:
            candidate.close()
            continue
        return candidate
    raise OSError(f"no port of {address or 'this machine'} is free below those of connections")


def _first_port_of_connections() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        first = _LINUX_FIRST_PORT
    # Where connections may get all ports, one is as good as another.
    return first if first >= 2 * _FIRST_PORT else _LINUX_FIRST_PORT
