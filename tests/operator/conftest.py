"""Fixtures of the operator's integration tests: one control plane a module, everything else a test."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from meshwright_local.apiserver.rest.server import ApiServer
from meshwright_operator.planning import process_client
from tests.operator import loop_watchdog, planning_template, role_rules
from tests.operator.agents import Kubelet
from tests.operator.support import JOBS, ROOT, Api, OperatorThread, install, until, write_kubeconfig
from tests.patience import patient
from tests.reserved_ports import reserved_ports

StartOperator = Callable[..., Awaitable[OperatorThread]]
Settled = Callable[[str], Awaitable[dict[str, Any]]]


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> Iterator[None]:
    """Fails a test in which a callback of an operator's event loop takes more than 50 ms of CPU time."""
    with loop_watchdog.watching() as slow:
        yield
    assert slow == []


@pytest.fixture(autouse=True)
def planning_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning processes that have nothing to import."""
    monkeypatch.setattr(process_client, "start_process", planning_template.start_process)


@pytest_asyncio.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield session


@pytest.fixture(scope="session")
def real_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address and administrator's token of a real API server, when one was asked for; else nothing."""
    given = os.environ.get("MESHWRIGHT_TEST_SERVER")
    if given or request.config.getoption("--cluster") == "embedded":
        yield f"{given} {os.environ.get('MESHWRIGHT_TEST_TOKEN', '')}" if given else ""
        return
    directory = tmp_path_factory.mktemp("server")
    command = [sys.executable, "-m", "tests.operator.real_server", str(directory)]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            deadline = time.monotonic() + patient(90)
            while not (directory / "ready").exists():
                assert process.poll() is None, "the API server did not start"
                assert time.monotonic() < deadline, "the API server is not ready"
                time.sleep(0.1)
            yield (directory / "ready").read_text()
        finally:
            process.terminate()
            process.wait(patient(30))


@pytest_asyncio.fixture
async def api(session: aiohttp.ClientSession, real_server: str) -> AsyncIterator[Api]:
    """An API server with the CRD and four nodes: the embedded one, unless another was asked for."""
    if real_server:
        url, _, token = real_server.partition(" ")
        yield await _clean(Api(url, token or None, session))
        return
    server = ApiServer(None)
    await server.start()
    try:
        yield await _clean(Api(server.url, server.token, session, server.ca_pem))
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
    for secret in await api.items("/api/v1/namespaces/default/secrets"):
        await api.delete(f"/api/v1/namespaces/default/secrets/{secret['metadata']['name']}")
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
def coordinator_port() -> Iterator[int]:
    with reserved_ports(1) as (port,):
        yield port


@pytest.fixture
def metrics_port() -> Iterator[int]:
    with reserved_ports(1) as (port,):
        yield port


@pytest_asyncio.fixture
async def operators_token(api: Api) -> str:
    """A token with exactly the rights that the chart gives the operator."""
    for path, body in role_rules.objects():
        await api.call("POST", path, body, ok=False)
    path, body = role_rules.token_request()
    token: str = (await api.create(path, body))["status"]["token"]
    return token


@pytest_asyncio.fixture
async def start_operator(
    api: Api, operators_token: str, tmp_path: Path, coordinator_port: int
) -> AsyncIterator[StartOperator]:
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", api.url, operators_token, api.ca_pem)
    started: list[OperatorThread] = []

    async def start(wait: bool = True, **settings: Any) -> OperatorThread:
        operator = OperatorThread(settings.pop("kubeconfig", kubeconfig), tmp_path, coordinator_port, **settings)
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

        found: dict[str, Any] = await until(running, f"{name} runs", 60)
        return found

    return wait
