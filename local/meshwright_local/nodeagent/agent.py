"""A simulated node: registers itself and runs the pods that are bound to it."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any

import aiohttp

from meshwright.api.objects import KubeObject
from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.quantities import milli_value
from meshwright_local.kube.recorder import EventRecorder
from meshwright_local.kube.reflector import Change, ChangeType, Reflector
from meshwright_local.kube.resources import PODS, has_ended
from meshwright_local.nodeagent.container import Container
from meshwright_local.nodeagent.network.addresses import NoAddressError, PodAddresses
from meshwright_local.nodeagent.node import NodeRegistration, NodeSpec
from meshwright_local.nodeagent.pod import PodRunner
from meshwright_local.nodeagent.runtime.mount_namespace import FileSystemView, Mount
from meshwright_local.nodeagent.runtime.process import Process, ProcessSpec, StartError
from meshwright_local.nodeagent.sandbox import Host, Sandbox, discard_links
from meshwright_local.nodeagent.server.kubelet_server import KubeletServer, KubeletTls
from meshwright_local.scheduler.resource_requests import pod_requests

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of an agent, apart from its node."""

    directory: Path
    """Directory of pods' volumes, logs and home directories, by uid."""
    kubelet: KubeletTls
    renew_seconds: float = 10.0
    """Interval between two renewals of the node's lease."""
    restart_backoff_seconds: float = 10.0
    """Seconds before the second restart of a container, as in the kubelet."""
    isolate: bool = True
    """Give containers their own view of the file system if this process is permitted to; False: never."""
    images: Path | None = None
    """Directory of images (`runtime/images.py`)."""


class NodeAgent:
    """The agent of one node. `start` returns when it is registered; `stop` leaves no process behind."""

    def __init__(self, client: ApiClient, spec: NodeSpec, addresses: PodAddresses, settings: AgentSettings) -> None:
        self.spec = spec
        self.isolated = False
        """Whether containers of this node have their own view of the file system; known once it is started."""
        self._client = client
        self._addresses = addresses
        self._settings = settings
        self._kubelet = KubeletServer(self, settings.kubelet)
        self._online = asyncio.Event()
        self._runners: dict[str, PodRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._services: set[asyncio.Task[None]] = set()
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._host: Host | None = None
        self._pods: Reflector

    async def start(self) -> None:
        """Serve the kubelet's endpoints, register the node, and begin to run pods."""
        directory = self._settings.directory
        self.isolated = self._settings.isolate and await _can_isolate(directory / "trial")
        if self.isolated:
            await self._addresses.names.join(self._client)
        self._pods = Reflector(self._client, PODS, field_selector=f"spec.nodeName={self.spec.name}")
        self._pods.listeners.append(self._changed)
        self._host = Host(
            client=self._client,
            spec=self.spec,
            directory=directory,
            recorder=EventRecorder(self._client, "kubelet", self.spec.name),
            probe_session=aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)),
            restart_backoff_seconds=self._settings.restart_backoff_seconds,
            isolated=self.isolated,
            online=self._online,
            images=self._settings.images,
        )
        await self._connect(self._host)
        self._serve(self._sweep())

    async def stop(self) -> None:
        """Kill every pod's processes and stop. Reports nothing to the API server, which only misses heartbeats."""
        self._online.clear()
        for runner in self._runners.values():
            runner.kill()
        await self._disconnect()
        tasks = [*self._tasks.values(), *self._leaving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for runner in self._runners.values():
            await self._release(runner)
        for registry in (self._runners, self._tasks, self._leaving):
            registry.clear()
        if self._host is not None:
            await self._host.probe_session.close()
            if self.isolated:
                await self._addresses.names.leave()
        self._host = None

    async def power_off(self) -> None:
        """Simulate a power loss: kill all processes at once, without a report to the API server, until `recover`."""
        await self.stop()

    async def partition(self) -> None:
        """Simulate a partition from the control plane: pods keep running and can reach each other.

        Until `recover`, the agent sends no heartbeat, status or event, notices no new or deleted pod, and rejects logs
        and exec.
        """
        await self._disconnect()

    async def recover(self) -> None:
        """End `power_off` or `partition`: register again and catch up. Does nothing on a healthy node."""
        if self._host is None:
            await self.start()
        elif not self._online.is_set():
            await self._connect(self._host)

    def signal(self, namespace: str, pod: str, container: str = "", number: Signals = SIGKILL) -> None:
        """Send a signal to a container's main process; by default kill the pod's first container.

        The restart policy applies. After SIGKILL the container's other processes are killed too.

        Raises:
            KeyError: The container does not run on this node.
        """
        found = self.find(namespace, pod)
        running = self.container(found, container or found["spec"]["containers"][0]["name"]) if found else None
        if running is None or running.over:
            raise KeyError(f"node {self.spec.name} runs no container {container!r} of pod {namespace}/{pod}")
        running.signal(number)

    def find(self, namespace: str, name: str) -> KubeObject | None:
        """Return a pod of this node."""
        return self._pods.objects.get((namespace, name))

    def container(self, pod: KubeObject, name: str) -> Container | None:
        """Return a container that this agent has started. It exists until the pod's object is gone."""
        runner = self._runners.get(pod["metadata"]["uid"])
        return next((item for item in runner.all_containers if item.name == name), None) if runner else None

    def pod_directory(self, uid: str) -> Path:
        """Return the directory of everything that a pod leaves on this node, such as its logs."""
        return self._settings.directory / "pods" / uid

    async def _connect(self, host: Host) -> None:
        port = await self._kubelet.start(self.spec.address)
        file_system = "mounted" if self.isolated else "rewritten"
        registration = NodeRegistration(self._client, self.spec, port, file_system)
        await registration.register()
        self._online.set()
        for work in (registration.run(self._settings.renew_seconds), host.recorder.run(), self._pods.run()):
            self._serve(work)

    async def _disconnect(self) -> None:
        self._online.clear()
        services = list(self._services)
        for task in services:
            task.cancel()
        await asyncio.gather(*services, return_exceptions=True)
        await self._kubelet.stop()

    def _serve(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._services.add(task)
        task.add_done_callback(self._services.discard)

    def _changed(self, change: Change) -> None:
        pod = change.object
        uid = pod["metadata"]["uid"]
        runner = self._runners.get(uid)
        if change.type is ChangeType.DELETED:
            self._leaving[uid] = asyncio.create_task(self._forget(uid))
        elif runner is None:
            if not has_ended(pod):
                self._start_pod(pod)
        else:
            runner.update(pod)
            if self._tasks[uid].done() and runner.deleting:
                self._tasks[uid] = asyncio.create_task(runner.confirm_deletion())

    def _start_pod(self, pod: KubeObject) -> None:
        uid, host = pod["metadata"]["uid"], self._host
        refused = self._admission_failure(pod)
        try:
            address = self._addresses.allocate()
        except NoAddressError as error:
            logger.error("pod %s: %s", pod["metadata"]["name"], error)
            return
        if host is None:
            return
        sandbox = Sandbox(host, pod, address)
        if self.isolated:
            self._addresses.names.add(sandbox.hosts, pod, address)
        runner = self._runners[uid] = PodRunner(sandbox)
        if refused:
            runner.fail(*refused)
        self._tasks[uid] = asyncio.create_task(runner.run())
        runner.update(pod)

    def _admission_failure(self, pod: KubeObject) -> tuple[str, str] | None:
        """Return why a pod does not fit, as `(reason, message)`: it may have bypassed the scheduler."""
        used: Counter[str] = Counter()
        for uid, runner in self._runners.items():
            # The scheduler reuses a pod's resources once its object is gone; its processes may not be killed yet.
            if not runner.over and uid not in self._leaving:
                used += pod_requests(runner.sandbox.pod)
        for name, amount in pod_requests(pod).items():
            capacity = milli_value(self.spec.capacity.get(name, 0))
            if amount and used[name] + amount > capacity:
                what = f"requested: {amount}, used: {used[name]}, capacity: {capacity} (thousandths)"
                return f"OutOf{name}", f"Node didn't have enough resource: {name}, {what}"
        return None

    async def _forget(self, uid: str) -> None:
        """Remove everything of a pod at once, because its object is gone."""
        runner, task = self._runners.get(uid), self._tasks.get(uid)
        if runner is not None and task is not None:
            # As a kubelet does: also what is deleted by force may end by itself within two seconds.
            runner.stop(0)
            await asyncio.gather(task, return_exceptions=True)
            await self._release(runner)
        self._runners.pop(uid, None)
        self._tasks.pop(uid, None)
        self._leaving.pop(uid, None)
        await asyncio.to_thread(_remove, self.pod_directory(uid))

    async def _release(self, runner: PodRunner) -> None:
        """Release a pod's resources, once its processes are gone."""
        await runner.gone()
        self._addresses.names.remove(runner.sandbox.hosts)
        self._addresses.release(runner.sandbox.ip)

    async def _sweep(self) -> None:
        """Remove the files of pods that were deleted while no agent ran."""
        await self._pods.synced.wait()
        known = {pod["metadata"]["uid"] for pod in self._pods.objects.values()} | set(self._runners)
        for directory in (self._settings.directory / "pods").glob("*"):
            if directory.name not in known:
                await asyncio.to_thread(_remove, directory)


def _remove(directory: Path) -> None:
    discard_links(directory)
    shutil.rmtree(directory, ignore_errors=True)


async def _can_isolate(trial: Path) -> bool:
    """Return whether containers can have their own view of the file system, by trying it."""
    trial.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
    view = FileSystemView(
        str(trial), "trial", [Mount(str(trial), "/meshwright/trial"), Mount(str(trial), "/dev/meshwright")]
    )
    command = [sys.executable, "-I", "-S", "-c", ""]
    try:
        return await (await Process.start(ProcessSpec(command, {}, Path("/"), view=view))).wait() == 0
    except StartError as error:
        logger.info("containers share the machine's file system, and mount paths are rewritten: %s", error)
        return False
