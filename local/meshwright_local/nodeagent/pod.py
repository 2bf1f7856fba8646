"""One pod's lifecycle on a node: volumes, init containers, containers, termination, confirmation of its deletion."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial

from meshwright.api.objects import KubeObject, is_sidecar
from meshwright_local.kube import timestamps
from meshwright_local.kube.client import STRATEGIC_PATCH, ApiError
from meshwright_local.kube.resources import PODS
from meshwright_local.nodeagent import volumes
from meshwright_local.nodeagent.container import Container
from meshwright_local.nodeagent.pod_status import PodStatus
from meshwright_local.nodeagent.restarts import RestartPolicy
from meshwright_local.nodeagent.sandbox import API_ERRORS, PodSpecError, Sandbox, discard_links

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5
_LOST = "The container could not be located when the pod was terminated"


class PodRunner:
    """Runs a pod bound to this node. `run` returns when none of its processes is left and the API has its status."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        spec = sandbox.pod["spec"]
        policy = spec.get("restartPolicy") or "Always"
        once = "Never" if policy == "Never" else "OnFailure"
        self.init = [
            Container(sandbox, item, RestartPolicy.of(item, once), "PodInitializing")
            for item in spec.get("initContainers") or ()
        ]
        self.sidecars = [container for container in self.init if is_sidecar(container.spec)]
        self.containers = [
            Container(sandbox, item, RestartPolicy.of(item, policy), "ContainerCreating") for item in spec["containers"]
        ]
        start_time = (sandbox.pod.get("status") or {}).get("startTime") or timestamps.now()
        self._status = PodStatus(sandbox, self.init, self.sidecars, self.containers, start_time)
        self._stopping, self._grace = asyncio.Event(), float("inf")
        self._termination: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._interrupted = asyncio.Event()
        """Set if the pod is to stop, or all of its containers are to begin again."""
        self._prepared = asyncio.Event()
        """Set once containers can start."""
        self._added: set[asyncio.Task[None]] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._dirty, self._reporting = asyncio.Event(), asyncio.Lock()
        self._sent: KubeObject | None = None
        sandbox.changed, sandbox.restart_all = self._dirty.set, self._restart_all

    @property
    def all_containers(self) -> list[Container]:
        """The init containers, then the others, then ephemeral ones."""
        return [*self.init, *self.containers, *self._status.ephemeral]

    @property
    def over(self) -> bool:
        """Whether none of its processes is left."""
        return self._status.over

    @property
    def deleting(self) -> bool:
        """Whether the pod was deleted."""
        return bool(self.sandbox.pod["metadata"].get("deletionTimestamp"))

    def update(self, pod: KubeObject) -> None:
        """Handle a change of the object: a deletion, or a second one with a shorter grace period; conditions."""
        self.sandbox.pod = pod
        self._dirty.set()
        self._add_ephemeral()
        if self.deleting:
            self.stop(float(pod["metadata"].get("deletionGracePeriodSeconds", self.sandbox.grace)))

    def stop(self, grace: float) -> None:
        """Stop every container within a grace period. Does nothing if it stops within one that is not longer."""
        if grace >= self._grace:
            return
        self._grace = grace
        self._stopping.set()
        self._interrupted.set()
        for container in self.all_containers:
            container.hold()
        if self._termination is not None:
            self._termination.cancel()
        self._termination = asyncio.create_task(self._terminate(max(grace, 1.0)))

    def _add_ephemeral(self) -> None:
        """Run ephemeral containers that were added to the pod: once, whatever the others do."""
        known = {container.name for container in self._status.ephemeral}
        for spec in self.sandbox.pod["spec"].get("ephemeralContainers") or ():
            if spec["name"] not in known and self._prepared.is_set() and not self._stopping.is_set():
                container = Container(self.sandbox, spec, RestartPolicy("Never"), "ContainerCreating")
                self._status.ephemeral.append(container)
                task = asyncio.create_task(container.run())
                self._added.add(task)
                task.add_done_callback(self._added.discard)

    def fail(self, reason: str, message: str, grace: float = 0.0) -> None:
        """End the pod as failed, before or after its containers have started."""
        self._status.failure = (reason, message)
        self.sandbox.event("Warning", reason, message)
        self.stop(grace)

    def kill(self) -> None:
        """Kill every process at once, because the object is gone or the node stops."""
        self._stopping.set()
        for container in self.all_containers:
            container.kill()

    async def gone(self) -> None:
        """Wait until no process of the pod is left, and remove files that only they needed."""
        for container in self.all_containers:
            await container.gone()
        await asyncio.to_thread(discard_links, self.sandbox.directory)

    async def run(self) -> None:
        """Run the pod until it ends."""
        reporting = asyncio.create_task(self._report())
        try:
            await self._live()
            while self._termination is not None and not self._termination.done():
                await asyncio.wait({self._termination})
        except Exception:
            logger.exception("pod %s/%s: error in the node agent", self.sandbox.namespace, self.sandbox.name)
            self.fail("NodeAgentError", "see the log of the node agent")
        finally:
            self.kill()
            for work in (reporting, self._termination, self._restarting):
                if work is not None:
                    work.cancel()
            for timer in self._timers:
                timer.cancel()
        await self.gone()
        self._status.over = True
        await self._flush()
        await self.confirm_deletion()

    async def confirm_deletion(self) -> None:
        """Confirm to the API server that no process of a deleted pod runs; only then is its object removed."""
        sandbox, client = self.sandbox, self.sandbox.host.client
        while self.deleting:
            await sandbox.host.online.wait()
            try:
                await client.delete(PODS, sandbox.name, sandbox.namespace, grace_seconds=0, uid=sandbox.uid)
                return
            except API_ERRORS as error:
                logger.debug("deletion of %s: %r", sandbox.name, error)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _live(self) -> None:
        if self._stopping.is_set() or self._adopt():
            return
        seconds = self.sandbox.pod["spec"].get("activeDeadlineSeconds")
        if seconds is not None:
            left = (
                seconds
                - (timestamps.parse(timestamps.now()) - timestamps.parse(self._status.start_time)).total_seconds()
            )
            self._timers.append(asyncio.get_running_loop().call_later(left, self._deadline_passed))
        # A container may read `status.podIP` as soon as it starts.
        await self._flush()
        await self._prepare_volumes()
        self._prepared.set()
        self._add_ephemeral()
        await self._run_containers()
        while self._restarting is not None and not self._stopping.is_set():
            await self._restarting
            self._restarting, self._status.restarting = None, False
            if not self._stopping.is_set():
                self._interrupted.clear()
                self._status.initialized = False
                for container in (*self.containers, *self.init):
                    container.begin_again()
                await self._run_containers()

    async def _run_containers(self) -> None:
        async with asyncio.TaskGroup() as sidecars:
            if await self._initialize(sidecars):
                async with asyncio.TaskGroup() as group:
                    for container in self.containers:
                        group.create_task(container.run())
                        await container.attempted.wait()
            if self._restarting is None:
                # Nothing needs sidecars and ephemeral containers any more.
                self.stop(self.sandbox.grace)

    async def _initialize(self, sidecars: asyncio.TaskGroup) -> bool:
        """Run the init containers, and start the sidecars among them, in order. Return whether the others may start."""
        for container in self.init:
            if container in self.sidecars:
                sidecars.create_task(container.run())
                await self._unless_interrupted(container.begun)
            else:
                await container.run()
                ended = container.terminated
                if ended is None or ended["exitCode"]:
                    return False
                container.status["ready"] = True
            if self._interrupted.is_set():
                return False
        self._status.initialized = not self._interrupted.is_set()
        self._dirty.set()
        return self._status.initialized

    async def _terminate(self, grace: float) -> None:
        """Stop all containers. Their hooks begin at once; sidecars end after the others, the last one first."""
        async with asyncio.TaskGroup() as group:
            others = (container for container in self.all_containers if container not in self.sidecars)
            stops = [group.create_task(container.stop(grace)) for container in others]
            for sidecar in reversed(self.sidecars):
                stops.append(group.create_task(sidecar.stop(grace, turn=partial(asyncio.wait, [*stops]))))

    def _restart_all(self) -> None:
        """Begin again with the first init container, in the same sandbox: a rule of a container demands it."""
        if self._restarting is None and not self._stopping.is_set():
            for container in (*self.containers, *self.init):
                container.hold()
            self._interrupted.set()
            self._restarting, self._status.restarting = asyncio.create_task(self._remove_all()), True
            self._dirty.set()

    async def _remove_all(self) -> None:
        for container in (*self.containers, *self.init):
            await container.stop(0, "killing")

    async def _unless_interrupted(self, event: asyncio.Event) -> None:
        """Wait for an event, unless something interrupts the start of the pod."""
        waits = [asyncio.ensure_future(each.wait()) for each in (event, self._interrupted)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _adopt(self) -> bool:
        """Take over a pod of an earlier agent. Its processes died with that agent.

        Returns:
            Whether the pod has ended because nothing may be restarted.
        """
        reported = (self.sandbox.pod.get("status") or {}).get("containerStatuses") or ()
        before = {item["name"]: item for item in reported}
        for container in self.containers:
            item = before.get(container.name) or {}
            state = item.get("state") or {"waiting": {}}
            # A log proves a run that the earlier agent did not report. To run it twice would be worse than to fail.
            runs = len(list(container.logs.glob("*.log")))
            if not runs and "waiting" in state:
                continue
            self._status.initialized = True
            begun = (state.get("running") or {}).get("startedAt") or timestamps.now()
            lost = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": _LOST, "startedAt": begun}
            ended = {"terminated": state.get("terminated") or {**lost, "finishedAt": timestamps.now()}}
            if not container.policy.action(ended["terminated"]["exitCode"]):
                container.status["state"] = ended
            else:
                restarts = max(runs, int(item.get("restartCount") or 0) + 1)
                container.status.update(lastState=ended, restartCount=restarts)
        return any(container.terminated for container in self.containers)

    async def _prepare_volumes(self) -> None:
        """Set up the volumes. Wait for missing objects until the pod is stopped."""
        stop_requested = ""
        while not self._stopping.is_set():
            try:
                await volumes.prepare(self.sandbox)
                return
            except (PodSpecError, *API_ERRORS) as error:
                if str(error) != stop_requested:
                    stop_requested = str(error)
                    self.sandbox.event("Warning", "FailedMount", f"MountVolume.SetUp failed: {error}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_SECONDS):
                    await self._stopping.wait()

    def _deadline_passed(self) -> None:
        message = "Pod was active on the node longer than the specified deadline"
        self.fail("DeadlineExceeded", message, self.sandbox.grace)

    async def _report(self) -> None:
        while True:
            await self._dirty.wait()
            await self._flush()

    async def _flush(self) -> None:
        """Return once the API server has the current status, or the pod's object is gone."""
        sandbox, client = self.sandbox, self.sandbox.host.client
        async with self._reporting:
            while True:
                await sandbox.host.online.wait()
                self._dirty.clear()
                body = self._status.patch()
                if body == self._sent:
                    return
                # The uid makes the server reject a report about an earlier pod of the same name.
                patch = {"metadata": {"uid": sandbox.uid}, "status": body}
                how = {"subresource": "status", "content_type": STRATEGIC_PATCH}
                try:
                    await client.patch(PODS, sandbox.name, patch, sandbox.namespace, **how)
                    self._sent = body
                    return
                except API_ERRORS as error:
                    if isinstance(error, ApiError) and error.status in (404, 409):
                        return
                    logger.debug("status of %s: %r", sandbox.name, error)
                await asyncio.sleep(_RETRY_SECONDS)
