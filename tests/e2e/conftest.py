"""One embedded cluster and one operator for all end-to-end tests.

What runs here is what a user runs: the daemon of `meshwright local`, the operator, worker agents and ranks, each a
process. Tests speak to them through the API server and look at processes, files and metrics.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from meshwright.api.parsing import parse_status
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_cli.child_processes import Programs
from meshwright_cli.demo import setup
from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.resources import JOBS, NODES
from meshwright_local.providers.existing import KubeconfigProvider
from tests.e2e.local_stack import NAMESPACE, Stage, operator_ports, operators_kubeconfig, start_operator, tiny
from tests.patience import patient

setup.READY_SECONDS = patient(setup.READY_SECONDS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = {path for path in {item.path for item in items} if path.parent == Path(__file__).parent}
    for item in items:
        if item.path in here:
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
            restricted = await operators_kubeconfig(client, directory)
            with operator_ports() as ports:
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


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Leave on the test whether it failed, for `tidy`."""
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def tidy(stage: Stage, request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """A test that failed must not hold GPUs that the next one needs. It leaves the story of its jobs."""
    yield
    failed = request.node.stash.get(FAILED, False)
    for job in (await stage.client.list(JOBS, NAMESPACE)).items:
        name = job["metadata"]["name"]
        if failed:
            print(f"=== {name}\n{await stage.story(name, parse_status(job))}")
        await stage.delete(name)


@dataclass(frozen=True)
class Undisturbed:
    """A run of the tiny job to its end, with evaluation, which leaves no trace in training."""

    saved: dict[str, Any]
    """The state in the manifest of its last checkpoint."""
    status: ParallelTrainingJobStatus
    checkpoints: list[str]
    """Names of the directories that it left."""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def undisturbed(stage: Stage) -> Undisturbed:
    """One run for all tests that look at an ordinary run or compare with one."""
    await stage.apply(tiny("reference", training={"evaluation": {"everySteps": 30, "samples": 8}}))
    await stage.until("reference", lambda s: s.ready_ranks == "4/4", "4/4 ranks")
    status = await stage.complete("reference")
    checkpoints = (await stage.checkpoint("reference")).parent.glob("step-*")
    run = Undisturbed(await stage.saved("reference"), status, sorted(path.name for path in checkpoints))
    await stage.delete("reference")
    return run


@pytest.fixture(scope="session")
def reference(undisturbed: Undisturbed) -> dict[str, Any]:
    """What an undisturbed run of the tiny job ends with."""
    return undisturbed.saved
