"""Which proxy the environment names for a URL, by the rules of kubectl (Go's `golang.org/x/net/http/httpproxy`)."""

from __future__ import annotations

import ipaddress
import os
from urllib.parse import urlsplit

from meshwright_cli.client.errors import ConfigurationError

_PORTS = {"http": 80, "https": 443}
_SCHEMES = ("http", "https")


def environment_proxy(url: str) -> str | None:
    """The URL of the proxy in `HTTPS_PROXY` or `HTTP_PROXY`; None without one, if `NO_PROXY` lists the host, or if it
    is this machine.

    Raises:
        ConfigurationError: the proxy cannot be used. The message names the variable.
    """
    parts = urlsplit(url)
    name = f"{parts.scheme.upper()}_PROXY"
    proxy = _variable(name)
    if not proxy or not parts.hostname or _is_direct(parts.hostname, parts.port or _PORTS.get(parts.scheme, 0)):
        return None
    try:
        return checked_proxy(proxy)
    except ValueError as error:
        raise ConfigurationError(f"{name}: {error}, or list the host in NO_PROXY") from None


def checked_proxy(url: str) -> str:
    """The URL of a proxy, with its scheme.

    Raises:
        ValueError: it is no HTTP proxy.
    """
    url = url if "://" in url else f"http://{url}"
    scheme = urlsplit(url).scheme
    if scheme not in _SCHEMES:
        raise ValueError(f"proxies of the kind `{scheme}` are not supported: use an HTTP proxy")
    return url


def _variable(name: str) -> str:
    return os.environ.get(name) or os.environ.get(name.lower()) or ""


def _is_direct(host: str, port: int) -> bool:
    """Whether no proxy is used for a host, in lower case."""
    address = _address(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    entries = (entry.strip().lower() for entry in _variable("NO_PROXY").split(","))
    return any(_matches(entry, host, address, port) for entry in entries if entry)


def _matches(entry: str, host: str, address: _Address | None, port: int) -> bool:
    """Whether an entry of NO_PROXY means a host: `*`, a range of addresses, an address, or a domain; the latter two may
    have a port.
    """
    if entry == "*":
        return True
    if "/" in entry:
        try:
            return address is not None and address in ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
    name = entry
    if _address(entry) is None:
        name, colon, own_port = entry.rpartition(":")
        if colon and own_port.isdigit():
            if int(own_port) != port:
                return False
        else:
            name = entry
    name = name.removeprefix("[").removesuffix("]")
    if (own_address := _address(name)) is not None:
        return own_address == address
    name = name.removeprefix("*")
    return host.endswith(name) if name.startswith(".") else host == name or host.endswith(f".{name}")


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _address(host: str) -> _Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
