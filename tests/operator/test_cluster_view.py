"""The view that changes update says what counting from scratch says, whatever comes and goes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.placement.capacity import FreeCapacity, GangShape
from meshwright_operator.kube.pod_requests import PodRequest, request_json_for, requested_by_node
from meshwright_operator.scheduling.cluster_view import ClusterView
from tests.operator.queueing import GPU, Tenants
from tests.operator.support import node
from tests.randomness import seeds


def drawn(chance: random.Random, plan_request: object, names: list[str]) -> PodRequest:
    job = chance.choice(["", "a", "b", "c"])
    amount = replace(plan_request, gpus=chance.choice((0, 1, 2)))  # type: ignore[type-var]
    return PodRequest(f"p{chance.randrange(9)}", "ns", chance.choice(names), request_json_for(amount, GPU), job, job)


@pytest.mark.parametrize("seed", seeds(4))
def test_changes_give_what_counting_from_scratch_gives(seed: int) -> None:
    chance = random.Random(seed)
    plans = [Tenants(4).request(f"job{size}", size).plan for size in (1, 2, 4, 6)]
    names = [f"n{number}" for number in range(6)]
    objects = {name: node(name, f"r{chance.randrange(2)}", gpus=chance.choice((2, 4))) for name in names}
    empty = Inventory.from_objects(list(objects.values()), ())
    view, pods = ClusterView(), dict[str, PodRequest]()
    for _ in range(120):
        if chance.random() < 0.1:
            name = chance.choice(names)
            if not objects.pop(name, None):
                objects[name] = node(name, "r0", gpus=chance.choice((2, 4)))
            empty = Inventory.from_objects(list(objects.values()), ())
        pod_id, new = f"id{chance.randrange(8)}", drawn(chance, plans[0].worker_request, names)
        if chance.random() < 0.4:
            pods.pop(pod_id, None)
            view.apply({pod_id: None})
        else:
            pods[pod_id] = new
            view.apply({pod_id: new})
        free = view.free_nodes("all", empty, GPU)
        expected = empty.holding(*requested_by_node(pods.values(), GPU))
        assert free.inventory({}) == expected
        for plan in plans:
            fits = FreeCapacity(plan, expected, {}).total_blocks() >= GangShape(plan).blocks
            assert free.has_capacity(plan, {}) is fits
        for job in "abc":
            others = requested_by_node([one for one in pods.values() if one.job_uid != job], GPU)[0]
            changed = free.without(view.used_by_job("ns", job, GPU))
            without = empty.holding(others)
            for plan in plans:
                fits = FreeCapacity(plan, without, {}).total_blocks() >= GangShape(plan).blocks
                assert free.has_capacity(plan, changed) is fits
        in_use = sum(one.amount(GPU).gpus for one in pods.values() if one.job_uid)
        assert view.gpus_in_use("ns") == in_use
