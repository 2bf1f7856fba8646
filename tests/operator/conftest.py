"""Fixtures of the operator's integration tests: one control plane a module, everything else a test."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.operator.support import JOBS, Api, Kubelet, OperatorThread, install, until, write_kubeconfig

StartOperator = Callable[..., Awaitable[OperatorThread]]
Settled = Callable[[str], Awaitable[dict[str, Any]]]


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield session


@pytest_asyncio.fixture
async def api(session: aiohttp.ClientSession) -> AsyncIterator[Api]:
    """An API server with the CRD and four nodes: the embedded one, or that of MESHWRIGHT_TEST_SERVER."""
    url = os.environ.get("MESHWRIGHT_TEST_SERVER")
    if url:
        yield await _clean(Api(url, os.environ.get("MESHWRIGHT_TEST_TOKEN"), session))
        return
    from meshwright.local.apiserver.server import ApiServer

    server = ApiServer(None)
    await server.start()
    try:
        yield await _clean(Api(server.url, server.token, session))
    finally:
        await server.stop()


async def _clean(api: Api) -> Api:
    """A server that several tests use begins each without what the one before left."""
    for node in await api.items("/api/v1/nodes"):
        await api.delete(f"/api/v1/nodes/{node['metadata']['name']}")
    await install(api)
    for job in await api.items(JOBS):
        await api.delete(f"{JOBS}/{job['metadata']['name']}")
    for pod in await api.items("/api/v1/namespaces/default/pods"):
        await api.delete(f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}", grace=0)
    for event in await api.items("/api/v1/namespaces/default/events"):
        await api.delete(f"/api/v1/namespaces/default/events/{event['metadata']['name']}")
    for lease in await api.items("/apis/coordination.k8s.io/v1/namespaces/default/leases"):
        await api.delete(f"/apis/coordination.k8s.io/v1/namespaces/default/leases/{lease['metadata']['name']}")
    return api


@pytest_asyncio.fixture
async def kubelet(api: Api, session: aiohttp.ClientSession) -> AsyncIterator[Kubelet]:
    kubelet = Kubelet(api, session)
    task = asyncio.create_task(kubelet.run())
    yield kubelet
    task.cancel()
    kubelet.stop()
    for result in await asyncio.gather(task, return_exceptions=True):
        assert isinstance(result, asyncio.CancelledError), result


@pytest.fixture
def coordinator_port() -> int:
    return unused_port()


@pytest.fixture
def free_port() -> int:
    return unused_port()


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest_asyncio.fixture
async def start_operator(api: Api, tmp_path: Path, coordinator_port: int) -> AsyncIterator[StartOperator]:
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", api.url, api.token)
    started: list[OperatorThread] = []

    async def start(wait: bool = True, **settings: Any) -> OperatorThread:
        operator = OperatorThread(kubeconfig, tmp_path, coordinator_port, **settings)
        started.append(operator)
        return await operator.start(wait)

    yield start
    for operator in started:
        await operator.stop()


@pytest.fixture
def settled(api: Api) -> Settled:
    """Waits until a job trains with all its ranks; gives its status."""

    async def wait(name: str) -> dict[str, Any]:
        async def running() -> dict[str, Any] | None:
            status = await api.status(name)
            ready = next((c for c in status.get("conditions") or () if c["type"] == "Ready"), {})
            return status if (ready.get("status"), ready.get("reason")) == ("True", "Running") else None

        found: dict[str, Any] = await until(running, f"{name} runs", 20)
        return found

    return wait
