"""Hosts and ports in one string."""

import pytest

from meshwright.addresses import join_host_port, split_host_port


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [
        ("10.0.0.1", 80, "10.0.0.1:80"),
        ("::1", 80, "[::1]:80"),
        ("fd00::2", 65535, "[fd00::2]:65535"),
        ("coordinator.ops", 0, "coordinator.ops:0"),
        ("", 9470, ":9470"),
    ],
)
def test_a_host_and_a_port_are_joined_and_split(host: str, port: int, text: str) -> None:
    assert join_host_port(host, port) == text
    assert split_host_port(text) == (host, port)


@pytest.mark.parametrize(
    "text", ["", "host", "host:", "::1:80", "[::1]80", "host:65536", "host:-1", "host:²", "[::1:80"]
)
def test_anything_else_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        split_host_port(text)
