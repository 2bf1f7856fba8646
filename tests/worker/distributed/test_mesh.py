"""The parts of joining a mesh that need no other rank."""

from __future__ import annotations

import socket

import pytest

from meshwright_worker.distributed.mesh import find_interface


@pytest.mark.skipif("lo" not in {name for _, name in socket.if_nameindex()}, reason="no loopback interface")
def test_interfaces() -> None:
    assert find_interface("127.0.0.1") == find_interface("127.8.0.3") == "lo"
    assert find_interface("192.0.2.77") is None
