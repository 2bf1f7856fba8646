"""One embedded cluster and one operator for all end-to-end tests.

What runs here is what a user runs: the daemon of `meshwright local`, the operator, worker agents and ranks, each a
process. Tests speak to them through the API server and look at processes, files and metrics.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from meshwright_cli.child_processes import Programs
from meshwright_cli.demo import setup
from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.resources import JOBS, NODES
from meshwright_local.providers.existing import KubeconfigProvider
from tests.e2e.local_stack import NAMESPACE, Stage, operators_kubeconfig, start_operator, tiny


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stage(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    """The cluster with the CRD, and the operator ready."""
    directory = tmp_path_factory.mktemp("e2e")
    provider = request.config.getoption("--cluster")
    async with Programs() as programs:
        if provider == "kubeconfig":
            kubeconfig = await existing_cluster()
        else:
            kubeconfig = await setup.start_cluster(programs, directory, setup.Shape(), provider)
        async with setup.connect(kubeconfig) as client:
            await setup.install_crd(client)
            ports = setup.Ports()
            restricted = await operators_kubeconfig(client, directory)
            operator = await start_operator(programs, directory, restricted, ports)
            yield Stage(directory, kubeconfig, client, programs, operator, ports, restricted)


async def existing_cluster() -> Path:
    """The kubeconfig of a cluster that runs already, if the tests can see what its pods do."""
    path = Path(os.environ["KUBECONFIG"])
    control_plane = await KubeconfigProvider(path).start()
    async with ApiClient(control_plane.connection) as client:
        nodes = (await client.list(NODES)).items
    addresses = {item["address"] for node in nodes for item in node["status"]["addresses"]}
    if "127.0.0.1" not in addresses:
        pytest.skip("looks at pods' processes, volumes and ports; this cluster's pods run on another machine")
    return path


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def tidy(stage: Stage) -> AsyncIterator[None]:
    """A test that failed must not hold GPUs that the next one needs."""
    yield
    for job in (await stage.client.list(JOBS, NAMESPACE)).items:
        await stage.delete(job["metadata"]["name"])


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def reference(stage: Stage) -> dict[str, Any]:
    """What an undisturbed run of the tiny job ends with."""
    await stage.apply(tiny("reference"))
    await stage.complete("reference")
    saved = await stage.saved("reference")
    await stage.delete("reference")
    return saved
