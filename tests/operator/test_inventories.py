"""Inventories are made from changes, and are what all nodes at once would give."""

from __future__ import annotations

import asyncio
import copy
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from meshwright.api.parsing import parse_spec
from meshwright.planner.cluster.inventory import Inventory, ReadNode
from meshwright.planner.hardware import Hardware
from meshwright_operator.kube.cache import Cache
from meshwright_operator.scheduling import inventories as module
from meshwright_operator.scheduling.inventories import MAX_INVENTORIES, Inventories
from meshwright_operator.scheduling.node_set import NodeSet
from tests.operator.support import job, node
from tests.randomness import seeds

SPECS = [
    {},
    {"nodeSelector": {"pool": "a"}},
    {"tolerations": [{"key": "gpu", "operator": "Exists"}]},
    {"gpuResource": "amd.com/gpu"},
]


def spec_of(workers: dict[str, Any], gpus: int = 2) -> Any:
    return parse_spec(job("any", workers={"image": "w", "gpusPerWorker": gpus, **workers}))


def from_scratch(cache: Cache, spec: Any) -> Inventory:
    workers = spec.workers
    return Inventory.from_objects(
        list(cache.nodes.values()),
        (),
        gpu_resource=workers.gpu_resource,
        node_selector=workers.node_selector,
        tolerations=workers.tolerations,
        channel=spec.has_channel,
        pods_joined=spec.joins_pods,
    )


def change(cache: Cache, draw: random.Random) -> None:
    """One of the changes that nodes undergo, on one node."""
    name = f"n{draw.randrange(12)}"
    obj = copy.deepcopy(cache.nodes.get(name)) or node(name, f"r{draw.randrange(3)}", draw.choice([2, 8]))
    kind = draw.randrange(9)
    labels = obj["metadata"]["labels"]
    if kind == 0:
        cache.remove_node(name)
        return
    if kind == 1:
        obj.setdefault("spec", {})["unschedulable"] = draw.choice([True, False])
    elif kind == 2:
        obj.setdefault("spec", {})["taints"] = draw.choice([[], [{"key": "gpu", "effect": "NoSchedule"}], [7]])
    elif kind == 3:
        labels["network.topology.nvidia.com/leaf"] = f"r{draw.randrange(3)}"
        labels["nvidia.com/gpu.clique"] = f"d{draw.randrange(4)}"
    elif kind == 4:
        labels["pool"] = draw.choice("ab")
    elif kind == 5:
        obj["status"]["allocatable"] = draw.choice([{}, {"nvidia.com/gpu": "x"}, {"amd.com/gpu": "8", "pods": "9"}])
    elif kind == 6:
        labels["nvidia.com/gpu.product"] = draw.choice(["NVIDIA-H100-80GB-HBM3", "NVIDIA-A100-SXM4-80GB", ""])
        labels["nvidia.com/gpu.memory"] = draw.choice(["81559", "much"])
    elif kind == 7:
        obj["status"]["conditions"] = [{"type": "Ready", "status": draw.choice(["True", "False"])}]
    cache.put_node(obj)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(20))
def test_any_history_of_nodes_gives_what_all_nodes_at_once_give(seed: int) -> None:
    draw, cache = random.Random(seed), Cache()
    known = Inventories(cache)
    for _ in range(60):
        for _ in range(draw.choice([1, 1, 3, 30])):
            change(cache, draw)
        spec = spec_of(draw.choice(SPECS), draw.choice([1, 2]))
        found, expected = known.empty(spec), from_scratch(cache, spec)
        assert dict(found.nodes) == dict(expected.nodes)
        assert sorted(found.warnings) == sorted(expected.warnings)
        assert found.levels == expected.levels
        hardware = Hardware.of(expected, spec.workers.gpus_per_worker)
        assert known.hardware(spec) == hardware


def test_only_a_node_that_changed_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    of = ReadNode.of

    def noting(obj: Any, *args: Any, **options: Any) -> ReadNode:
        read.append(obj["metadata"]["name"])
        return of(obj, *args, **options)

    monkeypatch.setattr(ReadNode, "of", noting)
    cache = Cache()
    for number in range(8):
        cache.put_node(node(f"n{number}", "r0"))
    known = Inventories(cache)
    before = [known.empty(spec_of(workers)) for workers in SPECS[:3]]
    assert len(read) == 8, "the objects are read once for all requirements"
    assert before[0].nodes["n3"] is before[2].nodes["n3"], "equal nodes are shared"
    cache.put_node({**node("n3", "r0"), "spec": {"unschedulable": True}})
    assert [known.empty(spec_of(workers)).nodes["n3"].unusable for workers in SPECS[:3]] == ["cordoned"] * 3
    assert read[8:] == ["n3"]


def test_the_least_recently_used_inventory_is_dropped() -> None:
    cache = Cache()
    cache.put_node(node("n0", "r0"))
    known = Inventories(cache)
    usual = known.empty(spec_of({}))
    for number in range(MAX_INVENTORIES + 8):
        known.empty(spec_of({"nodeSelector": {"pool": str(number)}}))
        assert known.empty(spec_of({})) is usual
    assert len(known._views) == MAX_INVENTORIES


async def test_a_large_cluster_is_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INLINE_NODES", 2)
    threads: set[str] = set()
    of = ReadNode.of

    def noting(*args: Any, **options: Any) -> ReadNode:
        threads.add(threading.current_thread().name)
        return of(*args, **options)

    monkeypatch.setattr(ReadNode, "of", noting)
    cache = Cache()
    for number in range(8):
        cache.put_node(node(f"n{number}", "r0"))
    known, spec = Inventories(cache), spec_of({})
    await asyncio.gather(*(known.prepare(spec) for _ in range(4)))
    assert dict(known.empty(spec).nodes) == dict(from_scratch(cache, spec).nodes)
    prepared = threads - {threading.current_thread().name}
    threads.clear()
    cache.put_node({**node("n1", "r0"), "spec": {"unschedulable": True}})
    await known.prepare(spec)
    assert prepared
    assert threads.isdisjoint({threading.main_thread().name})
    assert known.empty(spec).nodes["n1"].unusable == "cordoned"


def test_other_threads_change_nothing_that_the_event_loop_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    updates: list[tuple[NodeSet, int]] = []
    update = NodeSet.update

    def noted(self: NodeSet, *args: Any) -> None:
        updates.append((self, threading.get_ident()))
        update(self, *args)

    monkeypatch.setattr(NodeSet, "update", noted)
    cache, spec = Cache(), spec_of({})
    known = Inventories(cache)
    with ThreadPoolExecutor(1) as pool:
        for number in range(3):
            cache.put_node(node(f"n{number}", "r0"))
            assert set(pool.submit(known.empty, spec).result().nodes) >= {"n0"}
            assert known.empty(spec) == from_scratch(cache, spec)
            assert pool.submit(known.empty, spec).result() == from_scratch(cache, spec)
    own = {id(nodes) for nodes, thread in updates if thread == threading.get_ident()}
    others = {id(nodes) for nodes, thread in updates if thread != threading.get_ident()}
    assert len(own) == 1
    assert not own & others
