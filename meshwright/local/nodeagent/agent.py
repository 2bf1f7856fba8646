"""A simulated node: registers itself and runs the pods that are bound to it."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from meshwright.local.client import ApiClient
from meshwright.local.events import EventRecorder
from meshwright.local.nodeagent.addresses import NoAddressError, PodAddresses
from meshwright.local.nodeagent.context import PodContext
from meshwright.local.nodeagent.fields import PodPlace
from meshwright.local.nodeagent.kubelet import KubeletServer, KubeletTls
from meshwright.local.nodeagent.node import NodeRegistration, NodeSpec
from meshwright.local.nodeagent.pod import PodRunner
from meshwright.local.nodeagent.references import References
from meshwright.local.quantities import thousandths
from meshwright.local.reflector import Change, ChangeType, Reflector
from meshwright.local.resources import PODS, Object
from meshwright.local.scheduler.requests import pod_requests
from meshwright.local.scheduler.snapshot import is_over

logger = logging.getLogger(__name__)

_TEMPORARY_PREFIX = "mw-"


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What an agent needs beside its node."""

    directory: Path
    """Volumes, logs and homes of pods go here, by uid."""
    kubelet: KubeletTls
    renew_seconds: float = 10.0
    """Between two renewals of the node's lease."""
    restart_pause: float = 10.0
    """Seconds before the second restart of a container, as a kubelet has it."""


class NodeAgent:
    """One node. `start` returns when it is registered; `stop` leaves no process behind."""

    def __init__(self, client: ApiClient, spec: NodeSpec, addresses: PodAddresses, settings: AgentSettings) -> None:
        self.spec = spec
        self.kubelet = KubeletServer(self, settings.kubelet)
        self._client = client
        self._addresses = addresses
        self._settings = settings
        self._recorder = EventRecorder(client, "kubelet", spec.name)
        self._pods = Reflector(client, PODS, field_selector=f"spec.nodeName={spec.name}")
        self._pods.listeners.append(self._changed)
        self._runners: dict[str, PodRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._services: list[asyncio.Task[None]] = []
        self._leaving: set[str] = set()
        self._temporary = Path()
        self._probing: aiohttp.ClientSession

    async def start(self) -> None:
        """Serve the kubelet's endpoints, register the node, then run pods."""
        # Not the client's session: that one sends the cluster's token along.
        self._probing = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        self._temporary = await asyncio.to_thread(_temporary_directory, self._settings.directory)
        port = await self.kubelet.start(self.spec.address)
        registration = NodeRegistration(self._client, self.spec, port, self._settings.renew_seconds)
        await registration.register()
        for service in (registration.run(), self._recorder.run(), self._pods.run()):
            self._services.append(asyncio.create_task(service))

    async def stop(self) -> None:
        """Kill every pod's processes and end. The API is told nothing: to it, the node just falls silent."""
        for task in (*self._services, *self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._services, *self._tasks.values(), return_exceptions=True)
        for runner in self._runners.values():
            await runner.gone()
        self._services.clear()
        self._runners.clear()
        self._tasks.clear()
        await self.kubelet.stop()
        await self._probing.close()
        await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)

    def find(self, namespace: str, name: str) -> Object | None:
        """A pod of this node."""
        return self._pods.objects.get((namespace, name))

    def runner(self, uid: str) -> PodRunner | None:
        """The runner of a pod that this agent has started; it stays until the pod's object is gone."""
        return self._runners.get(uid)

    def pod_directory(self, uid: str) -> Path:
        """Everything a pod left on this node, such as its logs."""
        return self._settings.directory / "pods" / uid

    def _changed(self, change: Change) -> None:
        pod = change.object
        uid = pod["metadata"]["uid"]
        runner = self._runners.get(uid)
        if change.type is ChangeType.DELETED:
            self._leaving.add(uid)
            task = asyncio.create_task(self._forget(uid))
            self._services.append(task)
            task.add_done_callback(self._services.remove)
        elif runner is None:
            if not is_over(pod):
                self._begin(pod)
        else:
            runner.update(pod)
            if self._tasks[uid].done() and runner.state.deleting:
                self._tasks[uid] = asyncio.create_task(runner.confirm_deletion())

    def _begin(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        try:
            address = self._addresses.take()
        except NoAddressError as error:
            logger.error("pod %s: %s", pod["metadata"]["name"], error)
            return
        place = PodPlace(self.spec.name, address, self.spec.address, self.spec.capacity)
        context = PodContext(
            pod=pod,
            place=place,
            directory=self.pod_directory(uid),
            temporary=self._temporary / uid[:8],
            references=References(self._client, pod["metadata"]["namespace"]),
            recorder=self._recorder,
            session=self._probing,
            restart_pause=self._settings.restart_pause,
            changed=lambda: None,
        )
        runner = PodRunner(self._client, context)
        refused = self._refuses(pod)
        if refused:
            runner.refuse(*refused)
        self._runners[uid] = runner
        self._tasks[uid] = asyncio.create_task(self._run(runner))
        runner.update(pod)

    async def _run(self, runner: PodRunner) -> None:
        metadata = runner.context.pod["metadata"]
        try:
            await runner.run()
        except Exception:
            logger.exception("pod %s/%s", metadata["namespace"], metadata["name"])

    def _refuses(self, pod: Object) -> tuple[str, str] | None:
        """Why a pod does not fit what is left, as `(reason, message)`: it may have come past the scheduler."""
        used: Counter[str] = Counter()
        for uid, runner in self._runners.items():
            # The scheduler gave away what a pod held as soon as its object was gone, and its processes die right now.
            if not runner.state.over and uid not in self._leaving:
                used += pod_requests(runner.context.pod)
        for name, amount in pod_requests(pod).items():
            capacity = thousandths(self.spec.capacity.get(name, 0))
            if amount and used[name] + amount > capacity:
                what = f"requested: {amount}, used: {used[name]}, capacity: {capacity} (thousandths)"
                return f"OutOf{name}", f"Node didn't have enough resource: {name}, {what}"
        return None

    async def _forget(self, uid: str) -> None:
        """The object is gone: so must everything of the pod be, at once."""
        runner, task = self._runners.get(uid), self._tasks.get(uid)
        if runner is not None and task is not None:
            runner.kill()
            await asyncio.gather(task, return_exceptions=True)
            await runner.gone()
            self._addresses.give_back(runner.context.place.pod_ip)
            self._runners.pop(uid, None)
            self._tasks.pop(uid, None)
        self._leaving.discard(uid)
        await asyncio.to_thread(shutil.rmtree, self.pod_directory(uid), ignore_errors=True)


def _temporary_directory(directory: Path) -> Path:
    """A directory with a short name for pods' temporary files; one that a killed agent left is removed."""
    record = directory / "temporary"
    if record.exists():
        left = Path(record.read_text())
        if left.name.startswith(_TEMPORARY_PREFIX):
            shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX))
    directory.mkdir(parents=True, exist_ok=True)
    record.write_text(str(made))
    return made
