"""Helm on the embedded cluster: the life of a small chart, and our own chart's operator as a process that is ready.

Needs `helm` on the PATH, or its path in HELM. Images mean nothing on the embedded cluster: a container runs the program
on the PATH that is named as its image is.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
import yaml

from meshwright_local.cluster import ClusterShape, LocalCluster
from meshwright_local.kube.resources import CONFIG_MAPS, CRDS, DEPLOYMENTS, LEASES, NAMESPACES, PODS, Resource
from meshwright_local.nodeagent.network.ports import free_port
from tests.patience import patient

CHART = Path(__file__).parents[2] / "helm" / "meshwright"
HELM = os.environ.get("HELM") or shutil.which("helm")
pytestmark = [
    pytest.mark.skipif(HELM is None, reason="no helm on the PATH and none named by HELM"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
]

TEMPLATE = """
apiVersion: v1
kind: ConfigMap
metadata: {name: "{{ .Release.Name }}-config"}
data: {greeting: "{{ .Values.greeting }}"}
---
apiVersion: v1
kind: Service
metadata: {name: "{{ .Release.Name }}"}
spec: {selector: {app: "{{ .Release.Name }}"}, ports: [{port: 80}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: "{{ .Release.Name }}"}
spec:
  replicas: 2
  selector: {matchLabels: {app: "{{ .Release.Name }}"}}
  template:
    metadata: {labels: {app: "{{ .Release.Name }}"}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - {name: main, image: none, command: [sleep, "600"], env: [{name: G, value: "{{ .Values.greeting }}"}]}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster():
    async with LocalCluster(ClusterShape(racks=1)) as running:
        yield running


async def helm(cluster, *words):
    """Helm's output; fails when it does."""
    assert HELM is not None
    # Helm before 3.14 asks for OpenAPI v2 as protobuf, which nobody else does.
    validates = ("--disable-openapi-validation",) if words[0] in ("install", "upgrade") else ()
    process = await asyncio.create_subprocess_exec(
        HELM, "--kubeconfig", str(cluster.kubeconfig), *words, *validates,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out = (await asyncio.wait_for(process.communicate(), patient(300)))[0].decode()
    assert process.returncode == 0, out
    return out


def releases(text):
    return {item["name"]: (item["status"], item["revision"]) for item in json.loads(text)}


async def test_install_upgrade_list_and_uninstall_of_a_small_chart(cluster, tmp_path):
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump({"apiVersion": "v2", "name": "small", "version": "1.0.0"}))
    (tmp_path / "values.yaml").write_text("greeting: hello\n")
    (tmp_path / "templates" / "all.yaml").write_text(TEMPLATE)
    out = await helm(cluster, "install", "tiny", str(tmp_path), "--wait", "--timeout=240s")
    assert "STATUS: deployed" in out
    assert (await cluster.client.get(CONFIG_MAPS, "tiny-config", "default"))["data"] == {"greeting": "hello"}
    assert (await cluster.client.get(DEPLOYMENTS, "tiny", "default"))["status"]["availableReplicas"] == 2
    await helm(cluster, "upgrade", "tiny", str(tmp_path), "--set", "greeting=again", "--wait", "--timeout=240s")
    assert (await cluster.client.get(CONFIG_MAPS, "tiny-config", "default"))["data"] == {"greeting": "again"}
    assert releases(await helm(cluster, "list", "-o", "json")) == {"tiny": ("deployed", "2")}
    await helm(cluster, "rollback", "tiny", "1", "--wait", "--timeout=240s")
    assert (await cluster.client.get(CONFIG_MAPS, "tiny-config", "default"))["data"] == {"greeting": "hello"}
    await helm(cluster, "uninstall", "tiny")
    assert releases(await helm(cluster, "list", "-o", "json")) == {}
    assert await cluster.client.find(DEPLOYMENTS, "tiny", "default") is None
    async with asyncio.timeout(patient(30)):
        while (await cluster.client.list(PODS, "default", label_selector="app=tiny")).items:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_the_charts_operator_runs_with_the_rights_it_is_given(cluster):
    """`--wait` returns when the Deployment is available, so when /readyz says that the operator watches.

    One replica: the pods of the embedded cluster share this machine's ports.
    """
    metrics = free_port()
    # Not by --create-namespace, which old releases of Helm validate against OpenAPI v2 whatever they are told.
    await cluster.client.create(NAMESPACES, {"metadata": {"name": "ops"}})
    ports = f"replicas=1,metrics.port={metrics},coordinator.port={free_port()}"
    out = await helm(
        cluster, "install", "mw", str(CHART), "-n", "ops", "--set", ports, "--wait", "--timeout=240s"
    )  # fmt: skip
    assert "STATUS: deployed" in out
    found = await cluster.client.get(DEPLOYMENTS, "mw-meshwright", "ops")
    assert {item["type"]: item["status"] for item in found["status"]["conditions"]}["Available"] == "True"
    (pod,) = (await cluster.client.list(PODS, "ops")).items
    url = f"http://{pod['status']['podIP']}:{metrics}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200
    assert (await cluster.client.get(LEASES, "mw-meshwright", "ops"))["spec"]["holderIdentity"]
    # It speaks as the chart's service account and not as an administrator: the chart's roles are enough.
    reviews = Resource("authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview", namespaced=False)
    attributes = {"namespace": "default", "verb": "get", "resource": "secrets"}
    spec = {"user": "system:serviceaccount:ops:mw-meshwright", "resourceAttributes": attributes}
    assert not (await cluster.client.create(reviews, {"spec": spec}))["status"]["allowed"]
    await helm(cluster, "uninstall", "mw", "-n", "ops")
    assert await cluster.client.find(CRDS, "paralleltrainingjobs.meshwright.dev") is not None
