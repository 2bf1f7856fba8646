"""Clusters that recorded plans are made for, as the inventory files that `meshwright plan --inventory` reads."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

H100 = "NVIDIA-H100-80GB-HBM3"
A100 = "NVIDIA-A100-SXM4-80GB"
GB200 = "NVIDIA-GB200"
LEAF = "network.topology.nvidia.com/leaf"
SPINE = "network.topology.nvidia.com/spine"
ZONE = "topology.kubernetes.io/zone"
CLIQUE = "nvidia.com/gpu.clique"
PRODUCT = "nvidia.com/gpu.product"
GPU = "nvidia.com/gpu"


class Draws:
    """Pseudo-random choices that depend on a name alone: a new case changes no other."""

    def __init__(self, name: str) -> None:
        self._random = random.Random(name)

    def below(self, limit: int) -> int:
        """A number from 0 to `limit` - 1. Of `random` only `random()` is promised to stay the same."""
        return int(self._random.random() * limit)

    def choice(self, values: Any) -> Any:
        """One of a sequence."""
        return values[self.below(len(values))]


def nodes(name: str, count: int, gpus: int = 8, product: str = H100, **more: Any) -> dict[str, Any]:
    """One entry of an inventory file: `count` nodes that are alike."""
    return {"name": name, "count": count, "gpus": gpus, "product": product, **more}


def racks(
    name: str,
    *,
    racks: int,
    nodes_each: int,
    gpus: int = 8,
    product: str = H100,
    free: tuple[int, ...] = (),
    domains: bool = False,
    racks_of_spine: int = 0,
) -> list[dict[str, Any]]:
    """A cluster with rack labels. `free`: what is left of each node, drawn from these. `domains`: a rack is one."""
    draws = Draws(f"cluster {name}")
    found = []
    for rack in range(racks):
        labels = {LEAF: f"rack{rack}"}
        if domains:
            labels[CLIQUE] = f"domain{rack}"
        if racks_of_spine:
            labels |= {SPINE: f"spine{rack // racks_of_spine}", ZONE: f"zone{rack // racks_of_spine}"}
        for node in range(nodes_each):
            entry = {"name": f"r{rack}n{node}", "gpus": gpus, "product": product, "labels": labels}
            found.append(entry | ({"free": draws.choice(free)} if free else {}))
    return found


def raw_node(name: str, *, labels: Mapping[str, str] | None = None, gpus: int = 8, **more: Any) -> dict[str, Any]:
    """A Node object as `kubectl get nodes -o json` prints it; `more` replaces `spec`, `status` or parts of metadata."""
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": {PRODUCT: H100, **(labels or {})}, **more.get("metadata", {})},
        "spec": more.get("spec", {}),
        "status": more.get("status")
        or {
            "allocatable": {GPU: str(gpus), "cpu": "96", "memory": "1Ti", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def raw_pod(name: str, node: str, gpus: int, cpu: str = "0") -> dict[str, Any]:
    """A running Pod object that holds GPUs of a node."""
    requests = {GPU: str(gpus), "cpu": cpu}
    return {
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "uid": name},
        "spec": {"nodeName": node, "containers": [{"name": "main", "resources": {"requests": requests}}]},
        "status": {"phase": "Running"},
    }


def strange() -> dict[str, Any]:
    """Nodes that may not be used, each for another reason, between some that may; and pods of all kinds."""
    taint = {"key": "dedicated", "value": "infra", "effect": "NoSchedule"}
    not_ready = {"allocatable": {GPU: "8"}, "conditions": [{"type": "Ready", "status": "False"}]}
    items = [
        *[raw_node(f"good-{n}", labels={LEAF: "a" if n < 3 else "b"}) for n in range(6)],
        raw_node("cordoned", spec={"unschedulable": True}),
        raw_node("tainted", spec={"taints": [taint]}),
        raw_node("leaving", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}),
        raw_node("down", status=not_ready),
        raw_node("slices", labels={PRODUCT: "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"}),
        raw_node("shared", labels={"nvidia.com/gpu.replicas": "4"}),
        raw_node("odd-memory", labels={"nvidia.com/gpu.memory": "lots", LEAF: "b"}),
        raw_node("small", labels={PRODUCT: "Tesla-T4", LEAF: "b"}, gpus=4),
        raw_node("no-gpu", gpus=0),
        {"kind": "Node", "metadata": "broken"},
        raw_pod("half", "good-0", 4),
        raw_pod("cpu-hog", "good-1", 0, cpu="95"),
        raw_pod("too-much", "good-2", 12),
        {**raw_pod("done", "good-3", 8), "status": {"phase": "Succeeded"}},
    ]
    return {"kind": "List", "items": items}


def _clusters() -> dict[str, Any]:
    memory = {"nvidia.com/gpu.memory": "81559"}
    spread = (0, 1, 2, 3, 4, 5, 6, 7, 8)
    return {
        "one gpu": [nodes("n", 1, 1)],
        "1 h100 node": [nodes("n", 1)],
        "4 h100 nodes": [nodes("n", 4)],
        "32 h100 nodes": [nodes("n", 32)],
        "h100 racks": racks("h100 racks", racks=4, nodes_each=8),
        "h100 holes": racks("h100 holes", racks=4, nodes_each=8, free=spread),
        "h100 whole nodes taken": racks("h100 whole nodes taken", racks=6, nodes_each=6, free=(0, 8, 8)),
        "h100 quarters": [nodes("n", 32, free=2)],
        "h100 singles": [nodes("n", 64, free=1)],
        "h100 spines": racks("h100 spines", racks=8, nodes_each=4, racks_of_spine=2),
        "h100 spines with holes": racks("spine holes", racks=8, nodes_each=4, racks_of_spine=2, free=(0, 4, 8, 8)),
        "128 h100 nodes": racks("128 h100 nodes", racks=16, nodes_each=8, racks_of_spine=8),
        "full": [nodes("n", 4, free=0)],
        "nvl72": racks("nvl72", racks=2, nodes_each=18, gpus=4, product=GB200, domains=True),
        "nvl72 holes": racks("nvl72 h", racks=3, nodes_each=18, gpus=4, product=GB200, domains=True, free=(0, 4)),
        "16 a100 nodes": [nodes("n", 16, product=A100)],
        "a100 holes": racks("a100 holes", racks=3, nodes_each=8, product=A100, free=(2, 4, 8)),
        "mixed": [nodes("h", 4), nodes("a", 8, product=A100)],
        "mixed and short": [nodes("h", 1), nodes("a", 1, product=A100)],
        "l40s": [nodes("n", 8, product="NVIDIA-L40S")],
        "t4": [nodes("n", 4, 4, "Tesla-T4")],
        "v100": [nodes("n", 8, product="Tesla-V100-SXM2-16GB")],
        "h200": [nodes("n", 8, product="NVIDIA-H200")],
        "b300": [nodes("n", 16, product="NVIDIA-B300")],
        "unknown gpus with memory": [nodes("n", 4, product="Home-Made", labels=memory)],
        "unknown gpus": [nodes("n", 4, product="Home-Made")],
        "no gpus": [nodes("n", 4, 0)],
        "strange": strange(),
    }


CLUSTERS: Mapping[str, Any] = _clusters()
