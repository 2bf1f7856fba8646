"""What probes and lifecycle hooks do: run a command, send an HTTP request, open a connection.

Texts of errors are those of a kubelet, because people search for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp
from yarl import URL

from meshwright.api.objects import KubeObject

LONGEST_ANSWER = 10 << 10
"""Bytes that are read of an answer or of a command's output."""


class HandlerError(Exception):
    """The handler could not be executed, which says nothing about the container."""


@dataclass(frozen=True, slots=True)
class Target:
    """A container from outside: address, spec, and a function that runs a command in it: exit code and output."""

    address: str
    container: KubeObject
    run: Callable[[list[str]], Awaitable[tuple[int, str]]]
    session: aiohttp.ClientSession

    def port(self, port: int | str) -> int:
        """Return a port, given by number or by its name in the container's spec.

        Raises:
            HandlerError: No port has this name.
        """
        named = {item.get("name"): item["containerPort"] for item in self.container.get("ports") or ()}
        if port in named:
            return int(named[port])
        if not str(port).isdigit():
            raise HandlerError(f"couldn't find port: {port} in container {self.container['name']}")
        return int(port)


def url(action: KubeObject, target: Target) -> str:
    """Return the URL of an `httpGet`.

    Raises:
        HandlerError: No port has the given name.
    """
    place = f"{action.get('host') or target.address}:{target.port(action['port'])}"
    return f"{(action.get('scheme') or 'HTTP').lower()}://{place}/{(action.get('path') or '').lstrip('/')}"


async def get(action: KubeObject, target: Target, purpose: str) -> int:
    """Send the request of an `httpGet`, and return the status of the answer. Follows redirects to the same host.

    Raises:
        HandlerError: No port has the given name.
        ClientError: There is no answer.
        OSError: There are too many redirects.
    """
    address = url(action, target)
    headers = {"User-Agent": f"kube-{purpose}/1.36", "Accept": "*/*"}
    headers |= {item["name"]: item.get("value", "") for item in action.get("httpHeaders") or ()}
    for _ in range(10):
        # Kubelets do not verify certificates of probed servers either.
        async with target.session.get(address, headers=headers, ssl=False, allow_redirects=False) as response:
            await response.content.read(LONGEST_ANSWER)
            there = response.headers.get("Location", "") if 300 <= response.status < 400 else ""
            after = response.url.join(URL(there)) if there else response.url
            if not there or after.host != response.url.host:
                return response.status
            address = str(after)
    raise OSError(f'Get "{address}": stopped after 10 redirects')


def refused(error: Exception, place: str) -> str:
    """Return the reason why nothing answers at a place, as Go says it."""
    if isinstance(error, TimeoutError):
        return f"dial tcp {place}: i/o timeout"
    cause: BaseException = getattr(error, "os_error", None) or error
    if isinstance(cause, ConnectionRefusedError):
        return f"dial tcp {place}: connect: connection refused"
    return f"dial tcp {place}: connect: {getattr(cause, 'strerror', None) or cause}"


async def connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection.

    Raises:
        OSError: Nothing listens there; the message says so.
    """
    try:
        return await asyncio.open_connection(host, port)
    except OSError as error:
        raise OSError(refused(error, f"{host}:{port}")) from error
