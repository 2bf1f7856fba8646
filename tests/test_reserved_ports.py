"""A reserved port is free for a server that stops and starts again, and for no other program."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest

from meshwright_local.nodeagent.network import ports
from meshwright_worker.agent.ports import ReservedPort
from tests.reserved_ports import reserved_ports


async def test_a_server_gets_its_port_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_ports(1) as (port,):
        for _ in range(2):
            _no_other_gets(port, monkeypatch)
            server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await reader.read() == b""
            writer.close()
            _no_other_gets(port, monkeypatch)
            server.close()
            await server.wait_closed()
        with socket.create_server(("127.0.0.1", port)):
            _no_other_gets(port, monkeypatch)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the server that are closed
        other.bind(("127.0.0.1", port))


def _no_other_gets(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither another test nor an agent, if chance gives them this port."""
    with monkeypatch.context() as patch:
        patch.setattr(random.SystemRandom, "sample", lambda *_: [port])
        patch.setattr(random, "randint", lambda *_: port)
        with pytest.raises(OSError, match="no port of 127.0.0.1 is free"):
            ports.free_port()
        with pytest.raises(OSError, match="no port of this machine is free"):
            ports.free_port("")
        with pytest.raises(OSError, match="no port of 127.0.0.1 is free"), reserved_ports(1):
            pass
        with pytest.raises(OSError, match="no free port"):
            ReservedPort()
