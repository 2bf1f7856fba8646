"""Checks of a container from outside: probes, and its memory use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp

from meshwright.api.objects import KubeObject
from meshwright_local.nodeagent.runtime import grpc_health, handlers
from meshwright_local.nodeagent.runtime.environment import expand
from meshwright_local.nodeagent.runtime.handlers import HandlerError, Target
from meshwright_local.nodeagent.runtime.process import StartError
from meshwright_local.nodeagent.runtime.shim import descendants

_MEMORY_SECONDS = 2.0


async def probe_results(probe: KubeObject, target: Target, report: Callable[[str], None]) -> AsyncIterator[str]:
    """Probe periodically, and yield each result that counts: empty for success, else the error.

    A success counts after `successThreshold` successes in a row, a failure after `failureThreshold` failures. Every
    failure is reported. A probe that could not be executed is reported, and is neither.
    """
    await asyncio.sleep(probe.get("initialDelaySeconds") or 0)
    good = bad = 0
    due, period = time.monotonic(), probe.get("periodSeconds") or 10
    while True:
        try:
            why = await _probe_once(probe, target)
        except (HandlerError, StartError) as error:
            report(f"probe errored and resulted in unknown state: {error}")
        else:
            good, bad = (0, bad + 1) if why else (good + 1, 0)
            if why:
                report(f"probe failed: {why}")
            if good >= (probe.get("successThreshold") or 1) or bad >= (probe.get("failureThreshold") or 3):
                yield why
        # Like a ticker: the time that a probe takes does not delay the next one, and no probe is made up for.
        due += period
        while due <= time.monotonic():
            due += period
        await asyncio.sleep(due - time.monotonic())


async def _probe_once(probe: KubeObject, target: Target) -> str:
    """Return why a probe failed, or an empty text."""
    seconds = probe.get("timeoutSeconds") or 1
    try:
        async with asyncio.timeout(seconds):
            if grpc := probe.get("grpc"):
                return await grpc_health.check(target.address, grpc["port"], grpc.get("service") or "")
            if tcp := probe.get("tcpSocket"):
                _, writer = await handlers.connect(tcp.get("host") or target.address, target.port(tcp["port"]))
                writer.close()
                return ""
            return await (_get if probe.get("httpGet") else _execute)(probe, target)
    except TimeoutError:
        return _timed_out(probe, target, seconds)
    except OSError as error:
        return str(error)


async def _execute(probe: KubeObject, target: Target) -> str:
    # Only values that the spec says are replaced, as in a kubelet.
    values = {entry["name"]: str(entry.get("value") or "") for entry in target.container.get("env") or ()}
    code, output = await target.run([expand(word, values) for word in probe["exec"]["command"]])
    return (output or f"command exited with {code}") if code else ""


async def _get(probe: KubeObject, target: Target) -> str:
    action = probe["httpGet"]
    try:
        status = await handlers.get(action, target, "probe")
    except aiohttp.ClientError as error:
        return f'Get "{handlers.url(action, target)}": {_because(error, action, target)}'
    return "" if 200 <= status < 400 else f"HTTP probe failed with statuscode: {status}"


def _because(error: Exception, action: KubeObject, target: Target) -> str:
    if not isinstance(error, aiohttp.ClientConnectorError):
        return str(error) or repr(error)
    return handlers.refused(error, f"{action.get('host') or target.address}:{target.port(action['port'])}")


def _timed_out(probe: KubeObject, target: Target, seconds: float) -> str:
    """Return what a kubelet says of a probe that took too long."""
    if command := (probe.get("exec") or {}).get("command"):
        return f'command timed out: "{" ".join(command)}" timed out after {seconds}s'
    if action := probe.get("httpGet"):
        why = "context deadline exceeded (Client.Timeout exceeded while awaiting headers)"
        return f'Get "{handlers.url(action, target)}": {why}'
    if action := probe.get("tcpSocket"):
        return f"dial tcp {action.get('host') or target.address}:{target.port(action['port'])}: i/o timeout"
    return f"timeout: health rpc did not complete within {seconds}s"


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
