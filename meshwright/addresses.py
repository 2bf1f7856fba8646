"""Hosts and ports in one string. An IPv6 address is in brackets there (RFC 3986, section 3.2.2)."""

from __future__ import annotations

MAX_PORT = 65535


def join_host_port(host: str, port: int) -> str:
    """`host:port`, or `[host]:port` if the host is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(text: str) -> tuple[str, int]:
    """Split `host:port` or `[host]:port`. The host may be empty.

    Raises:
        ValueError: The text has another format: without a port, or an IPv6 address without brackets.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > MAX_PORT or (":" in host) != bracketed:
        raise ValueError(f"`{text}` must be HOST:PORT, with an IPv6 address in brackets")
    return host.strip("[]"), int(port)
