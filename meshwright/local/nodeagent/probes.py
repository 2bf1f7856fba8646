"""Probes and lifecycle hooks: what is asked of a container from outside, and when its answer counts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from meshwright.local.resources import Object

RunCommand = Callable[[list[str]], Awaitable[int]]
"""Runs a command in the container and returns its exit code."""


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """Whom to ask."""

    address: str
    ports: dict[str, int]
    """Named container ports."""
    run: RunCommand
    session: aiohttp.ClientSession


async def act(action: Object, target: ProbeTarget) -> str:
    """One probe or hook action: `exec`, `httpGet`, `tcpSocket` or `sleep`. Empty when good, else what was wrong."""
    if command := action.get("exec"):
        code = await target.run(command["command"])
        return "" if code == 0 else f"command exited with {code}"
    if http := action.get("httpGet"):
        return await _http(http, target)
    if tcp := action.get("tcpSocket"):
        try:
            _, writer = await asyncio.open_connection(tcp.get("host") or target.address, _port(tcp["port"], target))
        except OSError as error:
            return f"dial tcp: {error.strerror or error}"
        writer.close()
        return ""
    if sleep := action.get("sleep"):
        await asyncio.sleep(float(sleep["seconds"]))
        return ""
    return "the action is none of exec, httpGet, tcpSocket"


async def watch(probe: Object, target: ProbeTarget, told: Callable[[bool, str], None], *, once: bool = False) -> None:
    """Ask again and again; `told(good, why)` whenever a threshold is reached.

    Args:
        probe: The probe with its action and thresholds.
        target: Whom to ask.
        told: Called with True after `successThreshold` good answers in a row, False after `failureThreshold` bad ones;
            then again after each further answer of the same kind.
        once: End after the first True, as startup probes do.
    """
    await asyncio.sleep(probe.get("initialDelaySeconds") or 0)
    good = bad = 0
    while True:
        try:
            async with asyncio.timeout(probe.get("timeoutSeconds") or 1):
                why = await act(probe, target)
        except TimeoutError:
            why = "timed out"
        good, bad = (0, bad + 1) if why else (good + 1, 0)
        if good >= (probe.get("successThreshold") or 1):
            told(True, "")
            if once:
                return
        elif bad >= (probe.get("failureThreshold") or 3):
            told(False, why)
        await asyncio.sleep(probe.get("periodSeconds") or 10)


async def _http(http: Object, target: ProbeTarget) -> str:
    scheme = (http.get("scheme") or "HTTP").lower()
    path = http.get("path") or "/"
    host = http.get("host") or target.address
    url = f"{scheme}://{host}:{_port(http['port'], target)}{path if path.startswith('/') else '/' + path}"
    headers = {item["name"]: item["value"] for item in http.get("httpHeaders") or ()}
    try:
        # Kubelets do not check certificates of probed servers either.
        async with target.session.get(url, headers=headers, ssl=False, allow_redirects=False) as response:
            return "" if 200 <= response.status < 400 else f"HTTP probe failed with statuscode: {response.status}"
    except aiohttp.ClientError as error:
        return f"Get {url!r}: {error}"


def _port(port: object, target: ProbeTarget) -> int:
    text = str(port)
    return int(text) if text.isdigit() else target.ports.get(text, 0)
