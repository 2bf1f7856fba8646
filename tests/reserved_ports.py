"""Ports of servers that stop and start again in a test."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from meshwright_local.nodeagent.network.ports import bind_free_port


@contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Free ports of 127.0.0.1 that only this test's servers get, however often they stop and start.

    A socket that is bound but does not listen reserves each. Linux lets another socket bind the same port only if both
    have SO_REUSEADDR. Servers of asyncio, `socket.create_server` and Go do, code that looks for a free port does not.
    """
    with ExitStack() as stack:
        reservations = [stack.enter_context(bind_free_port("127.0.0.1")) for _ in range(count)]
        for reservation in reservations:
            # Not before it is bound: two tests could reserve the same port.
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield [reservation.getsockname()[1] for reservation in reservations]
