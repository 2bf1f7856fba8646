"""A release of the chart from installation to removal, while a job trains.

The chart of 0.1.0 is installed and a job started; then the chart is upgraded to the current one, rolled back, upgraded
again, removed and installed again. Pods keep their uids and start times, no rank restarts, and training goes on.

Needs `helm` on the PATH, or its path in HELM. `--cluster assets` runs it on a real kube-apiserver. The operator of the
old chart is the current one, unless OPERATOR_0_1_0 names a program on the PATH that is that version's.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from meshwright.api import conditions, labels
from meshwright.api.objects import KubeObject
from meshwright.api.parsing import parse_status
from meshwright_cli import manifest
from meshwright_cli.demo import setup
from meshwright_cli.demo.observer import gauge
from meshwright_local.cluster import ClusterShape, LocalCluster
from meshwright_local.kube.client import ApiError
from meshwright_local.kube.resources import CRDS, DEPLOYMENTS, JOBS, LEASES, NAMESPACES, PODS, Resource
from meshwright_local.providers.envtest import EnvtestProvider
from tests.e2e.local_stack import eventually, operator_ports, tiny

ROOT = Path(__file__).parents[2]
CHART, OLD_CHART = ROOT / "helm" / "meshwright", ROOT / "tests" / "compatibility" / "0.1.0" / "chart"
HELM = os.environ.get("HELM") or shutil.which("helm")
NAME, NAMESPACE = "mw-meshwright", "ops"
CRD_NAME = "paralleltrainingjobs.meshwright.dev"
ROLLING = """\
  strategy:
    type: RollingUpdate
    rollingUpdate:
      maxSurge: 1
      maxUnavailable: 0
"""
JOB_NAME = "training"
HELM_SECONDS = 600
"""On a busy machine, a new operator takes minutes to be ready."""
NETWORK_POLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
pytestmark = [
    pytest.mark.skipif(HELM is None, reason="no helm on the PATH and none named by HELM"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.long,
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalCluster]:
    shape = ClusterShape(racks=1)
    if request.config.getoption("--cluster") == "assets":
        directory = tmp_path_factory.mktemp("cluster")
        async with LocalCluster(shape, directory, provider=EnvtestProvider(directory)) as running:
            yield running
    else:
        async with LocalCluster(shape) as running:
            yield running


@pytest.fixture
def ports() -> Iterator[setup.Ports]:
    """Ports of the operator, which each change of the release restarts."""
    with operator_ports() as reserved:
        yield reserved


def recreating(chart: Path, directory: Path) -> Path:
    """A copy of the chart that stops the old operator first: all pods of this cluster share the machine's ports."""
    copy = directory / f"{chart.parent.name}-{chart.name}"
    shutil.copytree(chart, copy, symlinks=False)
    template = copy / "templates" / "deployment.yaml"
    text = template.read_text()
    assert ROLLING in text
    template.write_text(text.replace(ROLLING, "  strategy:\n    type: Recreate\n"))
    return copy


class Release:
    """The release `mw` in the namespace `ops`, and the job that trains under it."""

    def __init__(self, cluster: LocalCluster, directory: Path, ports: setup.Ports, policies: bool) -> None:
        self.cluster = cluster
        self.old, self.new = recreating(OLD_CHART, directory), recreating(CHART, directory)
        values = {
            "replicas": 1,
            "metrics": {"port": ports.metrics},
            "coordinator": {
                "port": ports.coordinator,
                "url": f"https://127.0.0.1:{ports.coordinator}",
                "tls": {"names": ["127.0.0.1"]},
            },
            "networkPolicy": {"enabled": True},
        }
        self.values, self.new_values = directory / "values.yaml", directory / "new-values.yaml"
        old_image = {"repository": os.environ.get("OPERATOR_0_1_0") or "meshwright-operator"}
        self.values.write_text(yaml.safe_dump({**values, "image": old_image}))
        new = {
            "image": {"tag": "next"},
            "admissionPolicy": {"enabled": policies},
            "networkPolicy": {"enabled": True, "jobs": {"enabled": True}},
        }
        self.new_values.write_text(yaml.safe_dump({**values, **new}))

    async def helm(self, *words: str) -> str:
        """Helm's output; fails if it fails."""
        # The embedded server has no OpenAPI v2 as protobuf, by which Helm before 3.14 validates.
        validates = ("--disable-openapi-validation",) if words[0] in ("install", "upgrade") else ()
        waits = ("--wait", f"--timeout={HELM_SECONDS}s") if words[0] != "history" else ()
        process = await asyncio.create_subprocess_exec(
            str(HELM), "--kubeconfig", str(self.cluster.kubeconfig), "-n", NAMESPACE, *words, *validates, *waits,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), HELM_SECONDS + 60)
        if process.returncode != 0:
            pytest.fail(f"helm {words}: {err.decode()}\n{await self.story()}")
        return out.decode()

    async def story(self) -> str:
        """The operator's log and the job's status."""
        parts = []
        for pod in (await self.cluster.client.list(PODS, NAMESPACE)).items:
            path = PODS.path(NAMESPACE, pod["metadata"]["name"], "log")
            parts.append(json.dumps(pod["status"]))
            for query in ("?previous=true", ""):
                with suppress(ApiError):
                    parts += [line.decode() async for line in self.cluster.client.lines(path + query)][-25:]
        job = None
        with suppress(ApiError):
            job = await self.cluster.client.find(JOBS, JOB_NAME, "default")
        return "\n".join([*parts, json.dumps((job or {}).get("status"), indent=1)])

    async def workers(self) -> dict[str, Any]:
        """What must not change of the job's pods: uid, start time, and start and restarts of the container."""
        selector = f"{labels.LABEL_JOB}={JOB_NAME}"
        found = {}
        for pod in (await self.cluster.client.list(PODS, "default", label_selector=selector)).items:
            (container,) = pod["status"]["containerStatuses"]
            started = container["state"]["running"]["startedAt"]
            identity = (pod["metadata"]["uid"], pod["status"]["startTime"], started, container["restartCount"])
            found[pod["metadata"]["name"]] = (identity, pod["status"]["podIP"], pod["spec"])
        return found

    async def step(self) -> float:
        """The latest step of rank 0, by its own metric; -1 before the first one."""
        for pod in (await self.cluster.client.list(PODS, "default", label_selector=labels.LABEL_JOB)).items:
            if pod["metadata"]["labels"][labels.LABEL_WORKER] == "0" and pod["status"].get("podIP"):
                url = f"http://{pod['status']['podIP']}:{labels.METRICS_PORT}/metrics"
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with aiohttp.ClientSession() as session, session.get(url) as response:
                        if (value := gauge(await response.text(), "ptj_step")) is not None:
                            return value
        return -1.0

    async def trains_on(self) -> None:
        """Wait until rank 0 has completed another three steps."""
        before = await self.step()

        async def further() -> bool:
            return await self.step() >= before + 3

        try:
            await eventually(f"steps after {before:.0f}", further, 180)
        except AssertionError as error:
            pytest.fail(f"{error}\n{await self.story()}")

    async def status(self) -> Any:
        return parse_status(await self.cluster.client.get(JOBS, JOB_NAME, "default"))

    async def reported(self) -> None:
        """Wait until the job is Ready and its status is newer than now: an operator receives reports and writes."""
        # The step at which the ranks are now: the status has it only after a report that was sent from now on.
        start = await self.step()

        async def newer() -> bool:
            status = await self.status()
            ready = conditions.is_true(status.conditions, conditions.READY)
            return ready and status.step is not None and status.step > start

        try:
            await eventually("the status follows training", newer, 180)
        except AssertionError as error:
            pytest.fail(f"{error}\n{await self.story()}")

    async def holder(self) -> str:
        """The process that has the Lease."""
        return str((await self.cluster.client.get(LEASES, NAME, NAMESPACE))["spec"]["holderIdentity"])


def longer_job() -> list[KubeObject]:
    """A job that trains for longer than the test."""
    return tiny(JOB_NAME, training={"steps": 1_000_000})


async def fields(cluster: LocalCluster) -> set[str]:
    """The fields of `spec.workers` in the installed definition."""
    crd = await cluster.client.get(CRDS, CRD_NAME)
    (version,) = crd["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return set(spec["properties"]["workers"]["properties"])


async def test_a_job_trains_through_the_life_of_a_release(
    cluster: LocalCluster, tmp_path: Path, ports: setup.Ports, request: pytest.FixtureRequest
) -> None:
    # The embedded server has no admission policies.
    release = Release(cluster, tmp_path, ports, policies=request.config.getoption("--cluster") == "assets")
    await cluster.client.create(NAMESPACES, {"metadata": {"name": NAMESPACE}})
    await release.helm("install", "mw", str(release.old), "-f", str(release.values))
    old_fields = await fields(cluster)
    for item in longer_job():
        await manifest.apply(cluster.client, item, "default")
    await release.reported()
    workers, generation = await release.workers(), (await release.status()).mesh.generation
    assert len(workers) == 2
    uid = (await cluster.client.get(JOBS, JOB_NAME, "default"))["metadata"]["uid"]

    async def unchanged(after: str) -> None:
        """The job is the same object, its pods and ranks run as before, and they train."""
        await release.trains_on()
        assert await release.workers() == workers, after
        job = await cluster.client.get(JOBS, JOB_NAME, "default")
        assert job["metadata"]["uid"] == uid, after
        status = parse_status(job)
        assert status.mesh is not None
        assert (status.mesh.generation, status.restart_count) == (generation, 0), after

    async def changes_operator(*words: str) -> None:
        holder = await release.holder()
        await release.helm(*words)
        await release.reported()
        assert await release.holder() != holder
        await unchanged(words[0])

    await changes_operator("upgrade", "mw", str(release.new), "-f", str(release.new_values))
    assert await fields(cluster) > old_fields, "the definition is that of the new chart"
    await changes_operator("rollback", "mw", "1")
    assert await fields(cluster) == old_fields
    await changes_operator("upgrade", "mw", str(release.new), "-f", str(release.new_values))

    await release.helm("uninstall", "mw")
    assert await cluster.client.find(DEPLOYMENTS, NAME, NAMESPACE) is None
    assert await cluster.client.find(CRDS, CRD_NAME) is not None
    await unchanged("uninstall")
    await release.helm("install", "mw", str(release.new), "-f", str(release.new_values))
    await release.reported()
    await unchanged("install")
    assert not (await cluster.client.list(NETWORK_POLICIES, "default")).items, "only new pods come with one"
    await _a_new_job_can_be_edited_and_deleted(release, generation)


async def _a_new_job_can_be_edited_and_deleted(release: Release, generation: int) -> None:
    """Under the roles and policies of the chart, the operator restarts a gang, and removes all that a job had."""
    client = release.cluster.client
    edit = {"spec": {"workers": {"env": [{"name": "ADDED", "value": "1"}]}}}
    await client.patch(JOBS, JOB_NAME, edit, "default")

    async def restarted() -> bool:
        status = await release.status()
        ready = conditions.is_true(status.conditions, conditions.READY)
        return ready and status.mesh is not None and status.mesh.generation > generation

    started = time.monotonic()
    try:
        await eventually("a new generation trains", restarted, 180)
    except AssertionError as error:
        pytest.fail(f"{error} after {time.monotonic() - started:.0f} s\n{await release.story()}")
    (policy,) = (await client.list(NETWORK_POLICIES, "default")).items
    assert policy["spec"]["podSelector"]["matchLabels"][labels.LABEL_JOB] == JOB_NAME
    await client.delete(JOBS, JOB_NAME, "default")

    async def gone() -> bool:
        pods = (await client.list(PODS, "default", label_selector=labels.LABEL_JOB)).items
        return not pods and not (await client.list(NETWORK_POLICIES, "default")).items

    await eventually("neither a pod of the job nor its NetworkPolicy is left", gone)
