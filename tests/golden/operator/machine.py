"""A virtual cluster that records: `tests.operator.world` with any nodes, an external scheduler and richer agents.

Seeds alone decide what happens. The operator's clocks are virtual too; only the event loop uses real time.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any, TypeVar
from unittest.mock import patch

from meshwright.api.objects import KubeObject
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.client import ApiError
from meshwright_operator.kube.job_event import JobEvent
from meshwright_operator.kube.pod_info import Pod
from meshwright_operator.kube.recorder import EventRecorder
from meshwright_operator.kube.watches import EventHandlers
from meshwright_operator.operator_metrics import OperatorMetrics
from tests.golden.operator.agents import Worker
from tests.golden.operator.record import Record
from tests.golden.operator.wire import Server, served_by
from tests.operator.support import JOBS, PODS, node
from tests.operator.world import Agent, Operator, World

BOOT = 1000.0
"""The monotonic clock at the start."""
T = TypeVar("T")

_monotonic = time.monotonic


class RealTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers do not follow the virtual clock."""

    def time(self) -> float:
        return _monotonic()


class Machine(World):
    """Nodes, pods, agents and operators. Records all that they do."""

    def __init__(self, seed: int, nodes: list[KubeObject], record: Record, *, work: float = 60.0) -> None:
        self.record = record
        self.processes = 0
        self.recorders: dict[int, EventRecorder] = {}
        self.down: set[str] = set()
        """Nodes that are NotReady."""
        self.binds = True
        """Whether the external scheduler works."""
        self.stalled = False
        """Whether containers do not start and no status says why."""
        self.saved: dict[str, int] = {}
        """Step of the newest checkpoint by the uid of its job."""
        self.starting = 2.0
        """Seconds between the start of a generation and training."""
        self._server: Server | None = None
        self._documents: set[tuple[str, int]] = set()
        super().__init__(seed, nodes=0, work=work)
        for body in nodes:
            self.nodes[body["metadata"]["name"]] = body
        self.operators[0].relist()

    @property
    def server(self) -> Server:
        """The API server as operators reach it."""
        if self._server is None:
            self._server = Server(self.cluster, self.record.wrote)
        return self._server

    def connect(self, metrics: OperatorMetrics) -> Any:
        self.processes += 1
        return self.server.client(metrics, self.processes)

    def operator(self) -> Operator:
        operator = super().operator()
        operator.metrics.registry.register(operator.jobs)
        recorder = EventRecorder(operator.cluster, f"operator-{self.processes}", operator.metrics)
        self.recorders[id(operator)] = recorder
        keep = operator.notes.post

        def post(job: Any, note: JobEvent) -> None:
            keep(job, note)
            self.record.noted(self.seconds(), job["metadata"]["name"], note.reason, note.type, note.message)
            recorder.post(job, note)

        operator.notes.post = post  # type: ignore[method-assign]
        reconcile = operator.reconciler

        async def reconciler(key: JobKey) -> None:
            try:
                await reconcile(key)
            except ApiError:
                raise
            except Exception:
                # Like the work queue of a real operator: retry after any error.
                self.record.add("raised", job=key.name)
                raise ApiError(0, "Raised", "anything else") from None

        operator.reconciler = reconciler  # type: ignore[assignment]
        return operator

    def agent(self, pod: Pod, address: str) -> Agent:
        return Worker(pod, pod.owner, address, silent=self.mute, machine=self)

    async def tick(self, step: float = 1.0) -> None:
        self.record.now = self.seconds() + step
        self._collect_garbage()
        for agent in list(self.agents.values()):
            if isinstance(agent, Worker):
                agent.notice()
        await super().tick(step)
        for operator in self.operators:
            await self.recorders[id(operator)].flush(60.0)

    def job(self, name: str) -> KubeObject | None:
        """The stored job of this name; None without one."""
        return self.cluster.objects.get(f"{JOBS}/{name}")

    def jobs(self) -> list[str]:
        """Names of all jobs, oldest first."""
        return [obj["metadata"]["name"] for obj in self.cluster.of("paralleltrainingjobs")]

    def edit(self, name: str, change: Callable[[KubeObject], None]) -> None:
        """Edits the spec of a job."""
        obj = self.job(name)
        if obj is None:
            return
        new = copy.deepcopy(obj)
        change(new["spec"])
        if new["spec"] != obj["spec"]:
            new["metadata"]["generation"] += 1
            self.cluster.update(f"{JOBS}/{name}", new)

    async def put_node(self, body: KubeObject, kind: str = "MODIFIED") -> None:
        """Adds, changes or deletes a node, and sends the watch event."""
        name = body["metadata"]["name"]
        self.nodes[name] = body
        if kind == "DELETED":
            self.nodes.pop(name)
        for operator in self.operators:
            if not operator.blind:
                watch = EventHandlers(operator.cache, operator.queue, operator.metrics)
                watch.node({"type": kind, "object": copy.deepcopy(body)})

    def restart(self) -> None:
        """Kills every operator and starts one."""
        self.cluster.watchers.clear()
        self.operators = [self.operator()]

    def see_again(self) -> None:
        """Restores the watches that were cut, after a list of everything."""
        for operator in self.operators:
            if not operator.blind:
                continue
            operator.blind = False
            there = {obj["metadata"]["uid"] for obj in self.cluster.objects.values()}
            for pod in operator.cache.all_pods():
                if pod.uid not in there:
                    operator.cache.remove_pod(pod)
            for key, obj in list(operator.cache.jobs.items()):
                if obj["metadata"]["uid"] not in there:
                    operator.cache.remove_job(obj)
                    operator.queue.add(key)
            for name in sorted(set(operator.cache.nodes) - set(self.nodes)):
                operator.cache.remove_node(name)
            operator.relist()

    def _collect_garbage(self) -> None:
        owners = {obj["metadata"]["uid"] for obj in self.cluster.of("paralleltrainingjobs")}
        for path, obj in list(self.cluster.objects.items()):
            references = obj["metadata"].get("ownerReferences") or ()
            if references and references[0]["uid"] not in owners:
                self.crash(obj["metadata"]["name"]) if path.startswith(PODS) else self.cluster.remove(path)

    def _kubelet(self, obj: KubeObject) -> None:
        on = obj["spec"].get("nodeName", "")
        if on in self.down or "ownerReferences" not in obj["metadata"]:
            return
        if on and on not in self.nodes:
            self.crash(obj["metadata"]["name"])
            return
        scheduler = obj["spec"].get("schedulerName")
        if scheduler and not on and "deletionTimestamp" not in obj["metadata"]:
            self._bind(obj)
        else:
            super()._kubelet(obj)

    def _start(self, path: str, obj: KubeObject, pod: Pod) -> None:
        if not self.stalled:
            super()._start(path, obj, pod)

    def _bind(self, obj: KubeObject) -> None:
        """Binds a pod to the first node with enough GPUs."""
        path = f"{PODS}/{obj['metadata']['name']}"
        if not self.binds or path not in self.cluster.objects:
            return
        for name in sorted(self.nodes):
            if self._has_room(obj, name):
                obj["spec"]["nodeName"] = name
                self.cluster.update(path, obj)
                return

    def _schedule(self, pod: Pod) -> bool:
        obj = self.cluster.objects[f"{PODS}/{pod.name}"]
        return pod.node not in self.unschedulable and self._has_room(obj, pod.node)

    def _has_room(self, obj: KubeObject, name: str) -> bool:
        body = self.nodes.get(name)
        if body is None or name in self.down or body.get("spec", {}).get("unschedulable"):
            return False
        others = [
            other
            for other in self.cluster.of("pods")
            if other["spec"].get("nodeName") == name and other["status"]["phase"] not in ("Succeeded", "Failed")
        ]
        return all(
            sum(_asked(other, resource) for other in [*others, obj]) <= int(body["status"]["allocatable"][resource])
            for resource in _resources(obj)
            if resource in body["status"]["allocatable"]
        )

    def _check_start(self, agent: Agent) -> None:
        """Records the start, and the mesh document of each generation once."""
        if agent.document is not None and (agent.uid, agent.generation) not in self._documents:
            self._documents.add((agent.uid, agent.generation))
            self.record.add("mesh", job=agent.pod.job, document=agent.document.wire())
        self.record.add("start", pod=agent.pod.name, generation=agent.generation)

    def _check_change(self, old: KubeObject, new: KubeObject) -> None:
        """Other tests check this."""

    def _check_pods(self) -> None:
        """Other tests check this."""


def play(make: Callable[[], Machine], story: Callable[[Machine], Awaitable[T]]) -> T:
    """Runs a story on a new machine in virtual time."""
    machine: Machine | None = None

    def monotonic() -> float:
        return BOOT + (machine.seconds() if machine is not None else 0.0)

    async def run() -> T:
        nonlocal machine
        machine = make()
        return await story(machine)

    def server() -> Server:
        assert machine is not None
        return machine.server

    with ExitStack() as stack:
        stack.enter_context(patch("time.monotonic", monotonic))
        stack.enter_context(served_by(server))
        stack.enter_context(patch("logging.Logger.isEnabledFor", return_value=False))
        runner = stack.enter_context(asyncio.Runner(loop_factory=RealTimeLoop))
        return runner.run(run())


def make_nodes(
    count: int, gpus: int, *, per_rack: int = 4, product: str = "", labels: dict[str, str] | None = None
) -> list[KubeObject]:
    """Equal nodes."""
    found = []
    for number in range(count):
        body = node(f"n{number}", f"r{number // per_rack}", gpus)
        body["metadata"]["labels"] |= labels or {}
        if product:
            body["metadata"]["labels"]["nvidia.com/gpu.product"] = product
        found.append(body)
    return found


def stamp(machine: World) -> str:
    """Virtual time in the format of Kubernetes."""
    return machine.now.strftime("%Y-%m-%dT%H:%M:%SZ")


def _resources(obj: KubeObject) -> list[str]:
    limits = obj["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return sorted(name for name in limits if "/" in name)


def _asked(obj: KubeObject, resource: str) -> int:
    limits = obj["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return int(limits.get(resource, 0))
