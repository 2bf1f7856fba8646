"""Where a control plane comes from: real binaries when there are some, an existing cluster, or a clear refusal."""

import os
import socket
from pathlib import Path

import pytest

from meshwright_local.cluster import LEAF_LABEL, ClusterShape, LocalCluster
from meshwright_local.kube.resources import NODES, PODS
from meshwright_local.providers.base import ProviderError
from meshwright_local.providers.embedded import EmbeddedProvider
from meshwright_local.providers.envtest import EnvtestProvider, find_binary
from meshwright_local.providers.existing import KubeconfigProvider


def executable(path: Path) -> Path:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_binaries_are_found_as_envtest_finds_them(tmp_path):
    own, common = executable(tmp_path / "my-etcd"), tmp_path / "assets"
    common.mkdir()
    shared = executable(common / "etcd")
    (common / "kube-apiserver").write_text("not executable")
    every = {"KUBEBUILDER_ASSETS": str(common)}
    assert find_binary("etcd", every) == shared
    assert find_binary("etcd", {**every, "TEST_ASSET_ETCD": str(own)}) == own
    assert find_binary("etcd", {**every, "TEST_ASSET_ETCD": "/nowhere"}) is None
    assert find_binary("kube-apiserver", every) is None


async def test_missing_binaries_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    with pytest.raises(ProviderError, match="etcd not found: set KUBEBUILDER_ASSETS"):
        await EnvtestProvider(tmp_path).start()


async def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ProviderError, match=f"port {port}"):
            await EmbeddedProvider(tmp_path, in_memory=True, port=port).start()


async def test_objects_have_one_server(tmp_path):
    first, second = (EmbeddedProvider(tmp_path, in_memory=False) for _ in range(2))
    await first.start()
    try:
        with pytest.raises(ProviderError, match="another API server"):
            await second.start()
    finally:
        await first.stop()


async def test_an_existing_cluster_gets_nothing_added(tmp_path):
    async with (
        LocalCluster(ClusterShape(racks=1, nodes_per_rack=1)) as there,
        LocalCluster(provider=KubeconfigProvider(there.kubeconfig)) as seen,
    ):
        assert seen.url == there.url
        assert not seen.nodes
        names = [node["metadata"]["name"] for node in (await seen.client.list(NODES)).items]
        assert names == ["rack0-node0"]
    with pytest.raises(ProviderError, match="cannot be read"):
        await KubeconfigProvider(tmp_path / "none").start()


async def test_an_existing_cluster_needs_gpus_or_gets_simulated_nodes(server, tmp_path):
    bare = KubeconfigProvider(server.kubeconfig)
    with pytest.raises(ProviderError, match=r"none of its 0 nodes offers nvidia.com/gpu: .* add simulated nodes"):
        await bare.start()
    shape = ClusterShape(racks=1, nodes_per_rack=1)
    provider = KubeconfigProvider(server.kubeconfig, directory=tmp_path, with_nodes=True)
    async with LocalCluster(shape, tmp_path, provider=provider):
        (node,) = (await server.client.list(NODES)).items
        assert node["metadata"]["name"] == "rack0-node0"
        assert node["status"]["allocatable"]["nvidia.com/gpu"] == "2"


async def test_nodes_come_and_go():
    async with LocalCluster(ClusterShape(racks=1, nodes_per_rack=1)) as cluster:
        await cluster.add_node(cluster.shape.node("rack5", "late"))
        with pytest.raises(ValueError, match="late: a node of that name already exists"):
            await cluster.add_node(cluster.shape.node("rack5", "late"))
        with pytest.raises(ValueError, match="'' cannot be the name of a node"):
            await cluster.add_node(cluster.shape.node("rack5", ""))
        with pytest.raises(ValueError, match="'../late' cannot be the name of a node"):
            await cluster.add_node(cluster.shape.node("rack5", "../late"))
        assert (await cluster.client.get(NODES, "late"))["metadata"]["labels"][LEAF_LABEL] == "rack5"
        await cluster.remove_node("late")
        assert await cluster.client.find(NODES, "late") is None


@pytest.mark.slow
@pytest.mark.skipif(
    find_binary("kube-apiserver", os.environ) is None, reason="needs KUBEBUILDER_ASSETS with etcd and kube-apiserver"
)
async def test_real_binaries(tmp_path):
    shape = ClusterShape(racks=1, nodes_per_rack=1)
    async with LocalCluster(shape, tmp_path, provider=EnvtestProvider(tmp_path)) as cluster:
        container = {"name": "main", "image": "none", "command": ["echo", "real"]}
        body = {"metadata": {"name": "p"}, "spec": {"restartPolicy": "Never", "containers": [container]}}
        await cluster.client.create(PODS, body, "default")
        async for event in cluster.client.watch(PODS, "0", "default"):
            if event["object"]["status"].get("phase") == "Succeeded":
                break
        path = PODS.path("default", "p", "log")
        assert [line async for line in cluster.client.lines(path)] == [b"real"]


@pytest.mark.parametrize("field", ["nodes_per_rack", "cpus_per_node", "pods_per_node"])
def test_a_shape_without_nodes_is_rejected(field):
    with pytest.raises(ValueError, match=f"{field}: must be at least 1"):
        ClusterShape(**{field: 0}).nodes()


def test_nodes_without_gpus():
    node = ClusterShape(gpus_per_node=0).nodes()[0]
    assert "nvidia.com/gpu" not in node.capacity
    assert not any("gpu" in label for label in node.labels)
