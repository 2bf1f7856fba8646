"""Waits of a day in virtual time: for another controller's scheduling gate, and for a scheduler or an autoscaler."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from meshwright.api.objects import KubeObject
from meshwright_operator.decide import gang, gang_actions
from meshwright_operator.decide.observed import BindingLimits
from meshwright_operator.kube.pod_info import Pod, read_pod
from meshwright_operator.timestamps import format_time
from tests.operator.builders import NOW, pod
from tests.operator.memory import MemoryCluster
from tests.operator.support import PODS, node
from tests.operator.test_gang_races import small
from tests.operator.test_other_scheduler import seen, unbound
from tests.operator.world import World

HOUR, STEP = 3600.0, 120.0
HOLD = "queue.example.com/hold"


class Queueing(MemoryCluster):
    """An API server with a webhook that adds another controller's gate to each pod."""

    async def create(self, path: str, body: KubeObject) -> KubeObject:
        if path.endswith("/pods"):
            body["spec"].setdefault("schedulingGates", []).append({"name": HOLD})
        return await super().create(path, body)


class Autoscaled(World):
    """Pods without nodes are bound to what is free. Until `grows_at`, no autoscaler adds nodes for them."""

    grows_at = float("inf")
    grows_by = 1

    def _schedule(self, pod: Pod) -> bool:
        used = {other.node for other in self.pods() if other.bound and not other.terminal}
        free = [name for name in self.nodes if name not in used]
        if not free and self.seconds() >= self.grows_at:
            self.grows_at += 600.0  # the next node takes its time
            free = [f"new{len(self.nodes)}"]
            self.nodes[free[0]] = node(free[0], "r0", self.gpus)
            self.nodes[free[0]]["metadata"]["uid"] = f"uid-of-{free[0]}"
            self.cluster.stamp(self.nodes[free[0]])
            for operator in self.operators:
                operator.cache.put_node(self.nodes[free[0]])
        if not free:
            return False
        obj = self.cluster.objects[f"{PODS}/{pod.name}"]
        obj["spec"]["nodeName"] = free[0]
        bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": format_time(self.now)}
        obj["status"]["conditions"] = [bound]
        return True

    def _start(self, path: str, obj: KubeObject, pod: Pod) -> None:
        conditions = obj["status"]["conditions"]
        super()._start(path, obj, pod)
        obj["status"]["conditions"] = conditions
        self.cluster.update(path, obj)

    def _kubelet(self, obj: KubeObject) -> None:
        found = read_pod(obj)
        if found is not None and not found.gates and not found.bound and not found.deleting:
            if self._schedule(found):
                self.cluster.update(f"{PODS}/{found.name}", obj)
            return
        super()._kubelet(obj)


def queued_seconds(world: World, name: str) -> float:
    booked = world.status(name)["goodput"]["booked"]
    return sum(entry["milliseconds"] for entry in booked if entry["cause"] == "Queued") / 1000


def remove_gates(world: World) -> None:
    for obj in list(world.cluster.of("pods")):
        gates = [gate for gate in obj["spec"].get("schedulingGates") or () if gate["name"] != HOLD]
        obj["spec"]["schedulingGates"] = gates
        world.cluster.update(f"{PODS}/{obj['metadata']['name']}", obj)


async def test_a_gang_waits_a_day_for_the_gates_of_another_controller() -> None:
    world = World(1, nodes=2, work=1e6, cluster=Queueing)
    world.submit(small("held", 2, activeDeadlineSeconds=int(4 * HOUR)))
    await world.run(60)
    uids = {found.uid for found in world.pods("held")}
    assert len(uids) == 2
    assert all(found.gates == (HOLD,) for found in world.pods("held")), "the operator's own gate is off"
    ready = world.condition("held", "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "SchedulingGated")
    assert HOLD in ready["message"]
    writes = world.cluster.writes
    await world.run(24 * HOUR, STEP)
    assert {found.uid for found in world.pods("held")} == uids, "a day later they are the same pods"
    assert world.status("held")["mesh"].get("attempts", 0) == 0
    assert world.cluster.writes == writes, "waiting writes nothing"
    remove_gates(world)
    await world.run(60)
    assert world.true("held", "Ready"), "the hours before count neither as a slow start nor toward the deadline"
    assert {found.uid for found in world.pods("held")} == uids
    assert queued_seconds(world, "held") == pytest.approx(24 * HOUR, abs=120)
    await world.run(2 * HOUR, STEP)
    assert not world.true("held", "Failed")


async def test_pods_that_do_not_start_after_their_gates_are_gone_end_the_attempt_as_usual() -> None:
    world = World(1, nodes=2, work=1e6, cluster=Queueing)
    world.unschedulable = {"n0", "n1"}
    world.submit(small("released", 2))
    await world.run(6 * HOUR, STEP)
    uids = {found.uid for found in world.pods("released")}
    remove_gates(world)
    await world.run(60)
    assert {found.uid for found in world.pods("released")} == uids, "the limit counts from the release"
    await world.run(300)
    assert world.status("released")["mesh"]["attempts"] == 1


async def test_pods_wait_a_day_for_an_autoscaler_whose_nodes_come_one_by_one() -> None:
    world = Autoscaled(1, nodes=0, work=1e6)
    workers = {"image": "worker", "gpusPerWorker": 2, "schedulerName": "default-scheduler"}
    recovery = {"unboundSeconds": 0, "partlyBoundSeconds": 1800}
    body = small("asks", 2, recovery=recovery)
    body["spec"]["workers"] = workers
    world.submit(body)
    await world.run(24 * HOUR, STEP)
    uids = {found.uid for found in world.pods("asks")}
    assert len(uids) == 2, "the pods are there for an autoscaler to act on"
    world.grows_at = world.seconds()
    await world.run(1200, STEP)
    assert world.true("asks", "Ready")
    assert {found.uid for found in world.pods("asks")} == uids
    assert queued_seconds(world, "asks") == pytest.approx(24 * HOUR + 600, abs=120)


@pytest.mark.parametrize(
    ("limits", "operator", "waited", "ends"),
    [
        ({}, BindingLimits(), 1799, False),
        ({}, BindingLimits(), 1801, True),
        ({}, BindingLimits(unbound=0), 10 * 86400, False),
        ({"unboundSeconds": 0}, BindingLimits(), 10 * 86400, False),
        ({"unboundSeconds": 7200}, BindingLimits(unbound=0), 7199, False),
        ({"unboundSeconds": 7200}, BindingLimits(unbound=0), 7201, True),
    ],
)
def test_a_job_says_how_long_its_pods_may_wait_unbound(
    limits: dict[str, int], operator: BindingLimits, waited: int, ends: bool
) -> None:
    pods = [unbound(w, created=NOW - timedelta(seconds=waited)) for w in range(4)]
    assert isinstance(_action(pods, limits, operator, waited), gang_actions.EndAttempt) == ends


@pytest.mark.parametrize(
    ("limits", "operator", "ends"),
    [
        ({}, BindingLimits(), True),
        ({}, BindingLimits(partly_bound=1200), False),
        ({"partlyBoundSeconds": 0}, BindingLimits(), False),
        ({"partlyBoundSeconds": 30}, BindingLimits(partly_bound=0), True),
    ],
)
def test_a_job_says_how_long_its_pods_may_wait_for_each_other(
    limits: dict[str, int], operator: BindingLimits, ends: bool
) -> None:
    first = [pod(0, scheduled=NOW - timedelta(seconds=310)), *(unbound(w) for w in (1, 2, 3))]
    assert isinstance(_action(first, limits, operator, 3000), gang_actions.EndAttempt) == ends


def _action(pods: list[Pod], limits: dict[str, int], operator: BindingLimits, since: float) -> gang_actions.GangAction:
    found = seen(pods, since=since)
    recovery = {
        "unbound_seconds": limits.get("unboundSeconds"),
        "partly_bound_seconds": limits.get("partlyBoundSeconds"),
    }
    changed = found.spec.recovery.model_copy(update=recovery)
    spec = found.spec.model_copy(update={"recovery": changed})
    return gang.next_action(replace(found, spec=spec, binding=operator), "Start")
