"""Faults of nodes, pods, ranks, the operator and users, drawn from a seed, for one elastic job."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from meshwright.api import labels
from meshwright.api.conditions import RESCALING, SUSPENDED, is_true
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_cli.demo import setup
from meshwright_cli.demo.observer import gauge
from meshwright_local.control_socket import ControlError, send
from meshwright_local.kube.client import ApiError
from meshwright_local.kube.resources import JOBS, NODES, PODS
from tests.e2e.local_stack import NAMESPACE, Stage, eventually
from tests.e2e.rank_watch import RankWatch

LEASE = ["--lease-seconds", "5"]
RACK = "rack0"
TAINT = {"key": "example.com/maintenance", "effect": "NoSchedule"}

RESUMES = 0.4
"""How likely the fault after one of a suspended job is that it resumes: faults of a job without ranks show little."""


class NotNow(Exception):
    """The fault cannot happen in the present state: draw another one."""


@dataclass
class Faults:
    """What happens to the job and its cluster. Knows which nodes are usable, and undoes everything at the end."""

    stage: Stage
    name: str
    nodes: list[str]
    chance: random.Random
    ranks: RankWatch
    wanted: int
    least: int = 1
    """Nodes that always stay usable."""
    away: dict[str, str] = field(default_factory=dict)
    """Node -> the command that brings it back."""
    drained: set[str] = field(default_factory=set)
    suspended: bool = False
    done: Counter[str] = field(default_factory=Counter)
    operator: asyncio.Task[None] | None = None
    """Starts the operator again."""

    def kinds(self) -> dict[str, tuple[int, Callable[[], Awaitable[None]]]]:
        """Each kind of fault with its weight."""
        return {
            "rank killed": (6, self.kill_rank),
            "agent killed": (4, self.kill_agent),
            "pod deleted": (8, lambda: self.delete_pod(None)),
            "pod deleted at once": (8, lambda: self.delete_pod(0)),
            "pod evicted": (6, self.evict_pod),
            "node removed": (8, self.remove_node),
            "node off and deleted": (5, self.lose_node),
            "node rebooted": (3, self.reboot_node),
            "node returned": (14, self.return_node),
            "all nodes but one removed": (2, self.remove_most_nodes),
            "node cordoned": (5, lambda: self.drain({"unschedulable": True})),
            "node tainted": (5, lambda: self.drain({"taints": [TAINT]})),
            "node undrained": (9, self.undrain),
            "scaled": (12, self.scale),
            "suspended": (5, self.suspend),
            "resumed": (12, self.resume),
            "operator killed": (9, self.kill_operator),
        }

    async def draw(self) -> str:
        """Do one fault that can happen now, and return its kind."""
        kinds = self.kinds()
        if self.suspended and self.chance.random() < RESUMES and await self.do("resumed"):
            return "resumed"
        while True:
            kind = self.chance.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
            if await self.do(kind):
                return kind

    async def do(self, kind: str) -> bool:
        """Do a fault of a kind, and return whether it was possible."""
        try:
            await self.kinds()[kind][1]()
        except (NotNow, ControlError, ApiError, ProcessLookupError):
            return False  # what it was about has just ended
        self.done[kind] += 1
        return True

    def usable(self) -> list[str]:
        """Nodes that run and take pods."""
        return [node for node in self.nodes if node not in self.away and node not in self.drained]

    async def _pod(self) -> tuple[str, str]:
        """Return one of the job's running pods, and its node."""
        running = [
            pod
            for pod in await self.stage.pods(self.name)
            if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]
        if not running:
            raise NotNow
        pod = self.chance.choice(sorted(running, key=lambda item: str(item["metadata"]["name"])))
        return pod["metadata"]["name"], pod["spec"]["nodeName"]

    def _node(self, among: list[str]) -> str:
        if not among:
            raise NotNow
        return self.chance.choice(sorted(among))

    async def _control(self, **command: str) -> None:
        await asyncio.to_thread(send, self.stage.directory / "cluster", **command)

    async def kill_rank(self) -> None:
        living = self.ranks.living()
        if not living:
            raise NotNow
        os.kill(self.chance.choice(living).pid, signal.SIGKILL)

    async def kill_agent(self) -> None:
        pod, _ = await self._pod()
        await self._control(action="kill", namespace=NAMESPACE, pod=pod, container="")

    async def delete_pod(self, grace_seconds: int | None) -> None:
        pod, _ = await self._pod()
        await self.stage.client.delete(PODS, pod, NAMESPACE, grace_seconds=grace_seconds)

    async def evict_pod(self) -> None:
        await self._evict((await self._pod())[0])

    async def _evict(self, pod: str) -> None:
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACE}}
        await self.stage.client.request("POST", PODS.path(NAMESPACE, pod, "eviction"), body=body)

    async def remove_node(self) -> None:
        node = self._node(self.usable() if len(self.usable()) > self.least else [])
        await self._control(action="remove", node=node)
        self.away[node] = "add"

    async def remove_most_nodes(self) -> None:
        usable = self.usable()
        if len(usable) < 3 or self.least > 1:
            raise NotNow
        for node in self.chance.sample(usable, len(usable) - 1):
            await self._control(action="remove", node=node)
            self.away[node] = "add"

    async def lose_node(self) -> None:
        """Power off, and delete the Node as a cloud's controller does."""
        node = self._node(self.usable() if len(self.usable()) > self.least else [])
        await self._control(action="power-off", node=node)
        self.away[node] = "recover"
        await self.stage.client.delete(NODES, node)

    async def reboot_node(self) -> None:
        """Power off and on again before anything notices."""
        node = self._node(self.usable())
        await self._control(action="power-off", node=node)
        await asyncio.sleep(self.chance.uniform(0, 2))
        await self._control(action="recover", node=node)

    async def return_node(self) -> None:
        node = self._node(list(self.away))
        how = {"rack": RACK} if self.away[node] == "add" else {}
        await self._control(action=self.away[node], node=node, **how)
        del self.away[node]

    async def drain(self, how: dict[str, object]) -> None:
        """Cordon or taint a node; half the time evict its pods too, as `kubectl drain` does."""
        node = self._node(self.usable() if len(self.usable()) > 2 else [])
        await self.stage.client.patch(NODES, node, {"spec": how})
        self.drained.add(node)
        if self.chance.random() < 0.5:
            for pod in await self.stage.pods(self.name):
                if pod["spec"].get("nodeName") == node:
                    with contextlib.suppress(ApiError):  # it has just ended
                        await self._evict(pod["metadata"]["name"])

    async def undrain(self) -> None:
        node = self._node(list(self.drained))
        if node not in self.away:
            await self.stage.client.patch(NODES, node, {"spec": {"unschedulable": None, "taints": None}})
        self.drained.discard(node)

    async def scale(self) -> None:
        self.wanted = 3 - self.wanted
        body = {"spec": {"replicas": self.wanted}}
        await self.stage.client.patch(JOBS, self.name, body, NAMESPACE, subresource="scale")

    async def suspend(self) -> None:
        if self.suspended:
            raise NotNow
        await self._suspend(True)

    async def resume(self) -> None:
        if not self.suspended:
            raise NotNow
        await self._suspend(False)

    async def _suspend(self, value: bool) -> None:
        await self.stage.client.patch(JOBS, self.name, {"spec": {"suspend": value}}, NAMESPACE)
        self.suspended = value

    async def kill_operator(self) -> None:
        """kill -9. It starts again up to 3 s later, and waits out its lease, while other faults may happen."""
        await self.operator_runs()
        await self.stage.kill_operator()
        self.operator = asyncio.create_task(self._start_operator(self.chance.uniform(0, 3)))

    async def _start_operator(self, pause: float) -> None:
        await asyncio.sleep(pause)
        stage = self.stage
        stage.operator = await setup.start_operator(
            stage.programs, stage.directory, stage.restricted, stage.ports, LEASE
        )

    async def operator_runs(self) -> None:
        """Wait until the operator leads again."""
        if self.operator is not None:
            await self.operator
            self.operator = None

    async def undo(self) -> None:
        """All nodes return, and the job is to run with two replicas."""
        await self.operator_runs()
        while self.away:
            await self.return_node()
        while self.drained:
            await self.undrain()
        if self.suspended:
            await self._suspend(False)
        if self.wanted == 1:
            await self.scale()

    async def settled(self) -> float:
        """Wait until the job is as it should be with the nodes that are left, and return the seconds that it took."""
        begin = time.monotonic()
        await self.operator_runs()
        if self.suspended:
            await self.stage.until(self.name, lambda s: is_true(s.conditions, SUSPENDED), "Suspended")
            return time.monotonic() - begin
        low, high = self._size(len(self.usable())), self._size(len(self.nodes) - len(self.away))
        await self.stage.until(self.name, lambda s: trains(s, low, high), f"training, {low} to {high} replicas", 400)
        step = await self.step()
        await eventually(f"past step {step}", lambda: self._is_past(step))
        return time.monotonic() - begin

    async def step(self) -> int:
        """Return the step that the job is at, as its agents report it; 0 while no rank runs."""
        steps = [0.0]
        for pod in await self.stage.pods(self.name):
            if address := pod.get("status", {}).get("podIP"):
                page = await self.stage.scrape(f"http://{address}:{labels.METRICS_PORT}/metrics")
                steps.append(gauge(page, "ptj_step") or 0.0)
        return int(max(steps))

    async def _is_past(self, step: int) -> bool:
        return await self.step() > step

    def _size(self, nodes: int) -> int:
        """Return the replicas that fit; 0 if the job is planned anew."""
        return min(self.wanted, nodes // 2)


def trains(status: ParallelTrainingJobStatus, low: int, high: int) -> bool:
    """Whether all ranks train with this many replicas of two ranks each, planned anew if 0, and no resize is due."""
    if is_true(status.conditions, RESCALING) or status.plan is None:
        return False
    replanned = bool(status.plan.replanned)
    ranks = 1 if replanned else 2 * (status.replicas or 0)
    return low <= (0 if replanned else status.replicas or 0) <= high and status.ready_ranks == f"{ranks}/{ranks}"
