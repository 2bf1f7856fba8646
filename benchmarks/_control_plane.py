"""A control plane without node agents, as a process of its own: `python benchmarks/_control_plane.py DIR PROVIDER`.

Nodes are objects that the benchmark makes, pods never run: what is measured is the control plane and the operator.
Writes DIR/kubeconfig, then DIR/ready. Ends on SIGTERM.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import replace
from pathlib import Path

from meshwright_local.cluster import ClusterShape, LocalCluster
from meshwright_local.controllers.node_lifecycle import NodeTimes
from meshwright_local.providers.base import ControlPlane, Provider
from meshwright_local.providers.embedded import EmbeddedProvider
from meshwright_local.providers.envtest import EnvtestProvider

FOREVER = NodeTimes(heartbeat=86400.0)
"""Nodes that never show that they live must count as living."""


class WithoutNodes:
    """A provider whose control plane gets no node of ours."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider

    async def start(self) -> ControlPlane:
        return replace(await self._provider.start(), kubelet=None)

    async def stop(self) -> None:
        await self._provider.stop()


async def serve(directory: Path, kind: str) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    provider: Provider
    if kind == "assets":
        provider = EnvtestProvider(directory, FOREVER)
    else:
        provider = EmbeddedProvider(directory, in_memory=True)
    cluster = LocalCluster(ClusterShape(), directory, provider=WithoutNodes(provider), times=FOREVER)
    async with cluster:
        (directory / "ready").touch()
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2]))
