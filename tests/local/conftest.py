"""One embedded cluster per test module, and the few verbs that its tests speak."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from meshwright.api.objects import KubeObject
from meshwright_local.cluster import ClusterShape, LocalCluster
from meshwright_local.controllers.node_lifecycle import NodeTimes
from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.kubeconfig import Connection
from meshwright_local.kube.resources import EVENTS, NODES, PODS
from meshwright_local.providers.base import Provider
from meshwright_local.providers.envtest import EnvtestProvider
from meshwright_local.providers.existing import KubeconfigProvider
from tests.patience import LEAST_SECONDS, patient

Check = Callable[[KubeObject | None], Any]


@dataclass
class Kit:
    """A cluster and a namespace."""

    cluster: LocalCluster
    namespace: str = "default"
    made: list[str] = field(default_factory=list)

    @property
    def client(self) -> ApiClient:
        return self.cluster.client

    async def pod(
        self, name: str, *command: str, spec: KubeObject | None = None, meta: KubeObject | None = None, **container
    ):
        """Create a pod of one container that runs `command`, or `sh -c` with a single word."""
        words = ["sh", "-c", command[0]] if len(command) == 1 else list(command)
        main = {"name": "main", "image": "none", "command": words, **container}
        body = {
            "metadata": {"name": name, **(meta or {})},
            "spec": {"restartPolicy": "Never", "containers": [main], **(spec or {})},
        }
        return await self.client.create(PODS, body, self.namespace)

    async def until(self, look: Callable[[], Awaitable[Any]], seconds: float = 10.0, what: str = "") -> Any:
        """Repeat `look` until it gives something true."""
        deadline = time.monotonic() + patient(seconds)
        while True:
            found = await look()
            if found:
                return found
            assert time.monotonic() < deadline, f"not within {seconds} s: {what or look}"
            await asyncio.sleep(0.03)  # a look takes the API server milliseconds

    async def pod_when(self, name: str, check: Check, seconds: float = 10.0) -> KubeObject:
        """The pod as soon as `check` holds."""
        last: KubeObject | None = None

        async def look():
            nonlocal last
            last = await self.client.find(PODS, name, self.namespace)
            return last if last is not None and check(last) else None

        try:
            return await self.until(look, seconds)
        except AssertionError:
            raise AssertionError(f"{name} is not as expected after {seconds} s: {last and last['status']}") from None

    async def ended(self, name: str, seconds: float = 10.0) -> KubeObject:
        """The pod once it has succeeded or failed."""
        return await self.pod_when(name, lambda pod: pod["status"].get("phase") in ("Succeeded", "Failed"), seconds)

    async def running(self, name: str) -> KubeObject:
        """The pod once it runs."""
        return await self.pod_when(name, lambda pod: pod["status"].get("phase") == "Running")

    async def vanished(self, name: str, seconds: float = 10.0) -> None:
        """Wait until there is no such pod."""

        async def look():
            return await self.client.find(PODS, name, self.namespace) is None

        await self.until(look, seconds, f"pod {name} vanishes")

    async def delete(self, name: str, **options: Any) -> None:
        await self.client.delete(PODS, name, self.namespace, **options)

    def needs_own_nodes(self) -> None:
        """Skip a test that looks into the directories of nodes which are not ours."""
        if not self.cluster.nodes:
            pytest.skip("looks into its nodes' directories; this cluster's nodes are not ours")

    def log_of(self, pod: KubeObject, container: str = "main") -> str:
        """The text of a pod's log, read from its node's directory."""
        uid, node = pod["metadata"]["uid"], pod["spec"]["nodeName"]
        directory = self.cluster.directory / "nodes" / node / "pods" / uid / "logs" / container
        files = sorted(directory.glob("*.log"), key=lambda path: int(path.stem))
        return "".join(line.split(" ", 3)[3] + "\n" for line in files[-1].read_text().splitlines()) if files else ""

    async def events_of(self, name: str) -> set[str]:
        """Reasons of the events about an object."""
        selector = f"involvedObject.name={name}"
        listed = await self.client.list(EVENTS, self.namespace, field_selector=selector)
        return {item["reason"] for item in listed.items}


@pytest.fixture(scope="module")
def shape() -> ClusterShape:
    return ClusterShape()


@pytest.fixture(scope="module")
def times() -> NodeTimes:
    """No node of a busy machine is so late that it counts as lost."""
    return NodeTimes(renew=0.3, heartbeat=LEAST_SECONDS, tolerate=LEAST_SECONDS, check=0.2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(shape, times, request, tmp_path_factory) -> AsyncIterator[LocalCluster]:
    option = request.config.getoption("--cluster")
    directory = None if option == "embedded" else tmp_path_factory.mktemp(option)
    provider: Provider | None = None
    if option == "assets":
        provider = EnvtestProvider(directory, times)
    elif option == "kubeconfig":
        path = Path(os.environ["KUBECONFIG"])
        async with ApiClient(Connection.from_kubeconfig(path)) as client:
            bare = not (await client.list(NODES)).items
        provider = KubeconfigProvider(path, directory=directory, with_nodes=bare)
    async with LocalCluster(shape, directory, provider=provider, times=times, restart_backoff_seconds=0.2) as running:
        yield running


_WITH_OWN_NODES = ("test_pods", "test_kubelet", "test_deletion", "test_nodes")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kit(cluster, request) -> Kit:
    if not cluster.nodes and request.module.__name__.rpartition(".")[2] in _WITH_OWN_NODES:
        pytest.skip("looks at processes of its own nodes; this cluster's nodes are not ours")
    return Kit(cluster)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[LocalCluster]:
    """An embedded cluster without nodes, fresh for each test: ready in a fraction of a second."""
    async with LocalCluster(ClusterShape(racks=0)) as running:
        yield running
