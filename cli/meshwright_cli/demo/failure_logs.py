"""The last log lines of every component, shown if a demo fails."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from meshwright_cli.child_processes import tail
from meshwright_cli.demo.snapshot import Snapshot
from meshwright_local.kube.client import ApiClient, ApiError
from meshwright_local.kube.resources import PODS

LINES = 15


async def logs(client: ApiClient, namespace: str, now: Snapshot, directory: Path) -> str:
    """The last lines of the operator, the cluster and every worker pod."""
    parts = [section(name, tail(directory / f"{name}.log", LINES)) for name in ("operator", "cluster")]
    for pod in now.pods:
        try:
            path = PODS.path(namespace, pod.name, "log")
            lines = [line.decode(errors="replace") async for line in client.lines(path, {"tailLines": str(LINES)})]
            parts.append(section(f"pod {pod.name} ({pod.state})", "\n".join(lines)))
        except (ApiError, aiohttp.ClientError, TimeoutError) as error:
            parts.append(section(f"pod {pod.name} ({pod.state})", f"no log: {error}"))
    return "\n".join(parts)


def section(title: str, text: str) -> str:
    """A log with its title."""
    return f"--- {title}\n{text or '(empty)'}"
