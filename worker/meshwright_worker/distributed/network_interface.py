"""Finds the network interface of an address. By default gloo resolves the host's name, which may be on another
interface.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

_SIOCGIFADDR = 0x8915
_LOOPBACK = "lo"


def find_interface(address: str) -> str | None:
    """Return the name of the interface with this IPv4 address, or None. All of 127.0.0.0/8 is `lo`."""
    parsed = ipaddress.ip_address(address)
    names = [name for _, name in socket.if_nameindex()]
    if parsed.is_loopback:
        return _LOOPBACK if _LOOPBACK in names else None
    return next((name for name in names if _address_of(name) == address), None)


def _address_of(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
