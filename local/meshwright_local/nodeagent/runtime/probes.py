"""Checks of a container from outside: probes, and its memory use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from meshwright.api.objects import KubeObject
from meshwright_local.nodeagent.runtime.process import StartError
from meshwright_local.nodeagent.runtime.shim import descendants

_MEMORY_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """The target of a probe: address, container spec, and a function that runs a command and returns its exit code."""

    address: str
    container: KubeObject
    run: Callable[[list[str]], Awaitable[int]]
    session: aiohttp.ClientSession

    def port(self, port: int | str) -> int:
        """Return a port, given by number or by its name in the container's spec."""
        named = {item.get("name"): item["containerPort"] for item in self.container.get("ports") or ()}
        return int(named.get(port, port if str(port).isdigit() else 0))


async def probe_results(probe: KubeObject, target: ProbeTarget) -> AsyncIterator[str]:
    """Probe periodically, and yield each result: empty for success, else the error.

    A success is yielded after `successThreshold` successes in a row, a failure after `failureThreshold` failures.
    """
    await asyncio.sleep(probe.get("initialDelaySeconds") or 0)
    good = bad = 0
    while True:
        try:
            async with asyncio.timeout(probe.get("timeoutSeconds") or 1):
                why = await _probe_once(probe, target)
        except TimeoutError:
            why = "timed out"
        except (OSError, aiohttp.ClientError, StartError) as error:
            why = str(error)
        good, bad = (0, bad + 1) if why else (good + 1, 0)
        if good >= (probe.get("successThreshold") or 1) or bad >= (probe.get("failureThreshold") or 3):
            yield why
        await asyncio.sleep(probe.get("periodSeconds") or 10)


async def _probe_once(probe: KubeObject, target: ProbeTarget) -> str:
    if command := probe.get("exec"):
        code = await target.run(command["command"])
        return f"command exited with {code}" if code else ""
    if tcp := probe.get("tcpSocket"):
        _, writer = await asyncio.open_connection(tcp.get("host") or target.address, target.port(tcp["port"]))
        writer.close()
        return ""
    if http := probe.get("httpGet"):
        place = f"{http.get('host') or target.address}:{target.port(http['port'])}"
        url = f"{(http.get('scheme') or 'HTTP').lower()}://{place}/{(http.get('path') or '').lstrip('/')}"
        headers = {item["name"]: item["value"] for item in http.get("httpHeaders") or ()}
        # Kubelets do not verify certificates of probed servers either.
        async with target.session.get(url, headers=headers, ssl=False, allow_redirects=False) as response:
            return "" if response.status < 400 else f"HTTP probe failed with statuscode: {response.status}"
    return "the probe is none of exec, httpGet, tcpSocket"


async def memory_exceeded(root: int, limit: int) -> int:
    """Return the memory use of a process's descendants, in bytes, once it exceeds `limit`.

    This needs no cgroups: it measures periodically, so it misses a peak between two measurements. It counts what a
    cgroup would count: anonymous and shared memory, each page once even if several processes share it (the
    proportional set size of `smaps_rollup`). That file is slow to read, so it is read only if the sums of
    `/proc/PID/status`, which count shared pages several times, exceed the limit.
    """
    while True:
        await asyncio.sleep(_MEMORY_SECONDS)
        used = await asyncio.to_thread(_sum, root, "status", ("RssAnon:", "RssShmem:"))
        if used > limit:
            used = await asyncio.to_thread(_sum, root, "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:"))
        if used > limit:
            return used


def _sum(root: int, file: str, fields: tuple[str, ...]) -> int:
    total = 0
    for pid in descendants(root):
        try:
            lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
        except OSError:
            # The process has ended.
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith(fields))
    return total * 1024
