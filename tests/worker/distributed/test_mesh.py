"""The parts of joining a mesh that need no other rank."""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from meshwright_worker.agent.ports import ReservedPort
from meshwright_worker.distributed import mesh
from meshwright_worker.distributed.mesh import await_listener, find_interface
from meshwright_worker.rank.torchrun import _own_address


@pytest.mark.skipif("lo" not in {name for _, name in socket.if_nameindex()}, reason="no loopback interface")
def test_interfaces() -> None:
    assert find_interface("127.0.0.1") == find_interface("127.8.0.3") == "lo"
    assert find_interface("192.0.2.77") is None


def test_collectives_use_the_pods_interface_and_none_whose_name_begins_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setattr(mesh, "find_interface", lambda address: "net1")
    mesh._pin_interface("192.0.2.1")
    assert [os.environ[name] for name in names] == ["net1", "=net1"]
    monkeypatch.setenv(names[1], "ib0,ib1")
    mesh._pin_interface("192.0.2.1")
    assert os.environ[names[1]] == "ib0,ib1", "the user's choice"


IPV6 = Path("/proc/net/if_inet6")


def _ipv6_loopback() -> bool:
    return IPV6.exists() and " lo" in IPV6.read_text()


needs_ipv6 = pytest.mark.skipif(not _ipv6_loopback(), reason="no IPv6 loopback address")


@needs_ipv6
def test_an_ipv6_address_has_an_interface_too() -> None:
    assert find_interface("::1") == "lo"
    assert find_interface("2001:db8::77") is None
    for line in IPV6.read_text().splitlines():
        packed, *_, interface = line.split()
        assert find_interface(str(ipaddress.IPv6Address(bytes.fromhex(packed)))) == interface


@needs_ipv6
def test_this_machines_address_toward_an_ipv6_master() -> None:
    assert _own_address("::1") == "::1"
    assert _own_address("127.0.0.1") == "127.0.0.1"


@needs_ipv6
def test_ranks_join_over_ipv6_on_a_reserved_port() -> None:
    """The store of rank 0 listens where the agent reserved the port, and is reached at an IPv6 address."""
    port = ReservedPort()
    with socket.socket(socket.AF_INET) as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port.number))
    port.release()
    store = TCPStore("::1", port.number, 1, is_master=True, wait_for_workers=False)
    store.set("key", "value")
    assert TCPStore("::1", port.number, 1, is_master=False, wait_for_workers=False).get("key") == b"value"


def test_a_rank_waits_until_the_store_listens() -> None:
    port, listens = ReservedPort(), threading.Event()

    def listen() -> None:
        port.release()
        with socket.create_server(("127.0.0.1", port.number)) as server:
            listens.set()
            server.accept()

    thread = threading.Timer(0.3, listen)
    thread.start()
    await_listener("127.0.0.1", port.number, 4)
    assert listens.is_set()
    thread.join()


def test_a_rank_does_not_wait_for_longer_than_the_rendezvous_may_take() -> None:
    port = ReservedPort()
    await_listener("127.0.0.1", port.number, 4, seconds=0.2)
    port.release()
