"""One pod's lifecycle on a node: volumes, init containers, containers, termination, confirmation of its deletion."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from meshwright.api.objects import KubeObject, is_sidecar
from meshwright_local.kube import timestamps
from meshwright_local.kube.client import STRATEGIC_PATCH, ApiError
from meshwright_local.kube.resources import PODS
from meshwright_local.nodeagent import volumes
from meshwright_local.nodeagent.container import Container
from meshwright_local.nodeagent.sandbox import API_ERRORS, PodSpecError, Sandbox, discard_links

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5
_LOST = "The container could not be located when the pod was terminated"


class PodRunner:
    """Runs a pod bound to this node. `run` returns when none of its processes is left and the API has its status."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.over = False
        spec = sandbox.pod["spec"]
        policy = spec.get("restartPolicy") or "Always"
        once = "Never" if policy == "Never" else "OnFailure"
        self.init = [
            Container(sandbox, item, str(item.get("restartPolicy") or once), "PodInitializing")
            for item in spec.get("initContainers") or ()
        ]
        self.sidecars = [container for container in self.init if is_sidecar(container.spec)]
        self.containers = [
            Container(sandbox, item, str(item.get("restartPolicy") or policy), "ContainerCreating")
            for item in spec["containers"]
        ]
        self._start_time = (sandbox.pod.get("status") or {}).get("startTime") or timestamps.now()
        self._initialized = False
        self._failure: tuple[str, str] | None = None
        self._transitions: dict[str, tuple[bool, str]] = {}
        self._stopping, self._kill_at = asyncio.Event(), float("inf")
        self._timers: list[asyncio.TimerHandle] = []
        self._dirty, self._reporting = asyncio.Event(), asyncio.Lock()
        self._sent: KubeObject | None = None
        sandbox.changed = self._dirty.set

    @property
    def all_containers(self) -> list[Container]:
        """The init containers, then the others."""
        return [*self.init, *self.containers]

    @property
    def deleting(self) -> bool:
        """Whether the pod was deleted."""
        return bool(self.sandbox.pod["metadata"].get("deletionTimestamp"))

    def update(self, pod: KubeObject) -> None:
        """Handle a change of the object: a deletion, or a second one with a shorter grace period."""
        self.sandbox.pod = pod
        if self.deleting:
            self._stop(float(pod["metadata"].get("deletionGracePeriodSeconds", self.sandbox.grace)))

    def fail(self, reason: str, message: str, grace: float = 0.0) -> None:
        """End the pod as failed, before or after its containers have started."""
        self._failure = (reason, message)
        self.sandbox.event("Warning", reason, message)
        self._stop(grace)

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
        except Exception:
            logger.exception("pod %s/%s: error in the node agent", self.sandbox.namespace, self.sandbox.name)
            self.fail("NodeAgentError", "see the log of the node agent")
        finally:
            self.kill()
            reporting.cancel()
            for timer in self._timers:
                timer.cancel()
        await self.gone()
        self.over = True
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
            left = seconds - (timestamps.parse(timestamps.now()) - timestamps.parse(self._start_time)).total_seconds()
            self._timers.append(asyncio.get_running_loop().call_later(left, self._deadline_passed))
        # A container may read `status.podIP` as soon as it starts.
        await self._flush()
        await self._prepare_volumes()
        async with asyncio.TaskGroup() as sidecars:
            if await self._initialize(sidecars):
                async with asyncio.TaskGroup() as group:
                    for container in self.containers:
                        group.create_task(container.run())
            await self._stop_sidecars()

    async def _initialize(self, sidecars: asyncio.TaskGroup) -> bool:
        """Run the init containers, and start the sidecars among them, in order. Return whether the others may start."""
        for container in self.init:
            if container in self.sidecars:
                sidecars.create_task(container.run())
                await self._unless_stopping(container.begun)
                if self._stopping.is_set():
                    return False
                continue
            await container.run()
            ended = container.terminated
            if ended is None or ended["exitCode"]:
                return False
            container.status["ready"] = True
        self._initialized = not self._stopping.is_set()
        self._dirty.set()
        return True

    async def _stop_sidecars(self) -> None:
        """Stop the sidecars, the last one first, now that nothing needs them. The grace period is that of the pod."""
        if not self._stopping.is_set():
            self._timers.append(asyncio.get_running_loop().call_later(self.sandbox.grace, self.kill))
        for container in reversed(self.sidecars):
            container.terminate()
            await container.gone()

    async def _unless_stopping(self, event: asyncio.Event) -> None:
        """Wait for an event, or until the pod is to stop."""
        waits = [asyncio.ensure_future(each.wait()) for each in (event, self._stopping)]
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
            self._initialized = True
            begun = (state.get("running") or {}).get("startedAt") or timestamps.now()
            lost = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": _LOST, "startedAt": begun}
            ended = {"terminated": state.get("terminated") or {**lost, "finishedAt": timestamps.now()}}
            if self.sandbox.pod["spec"].get("restartPolicy") == "Never":
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

    def _stop(self, grace: float) -> None:
        """Ask every container to stop, and kill the remaining ones after the grace period."""
        loop = asyncio.get_running_loop()
        at = loop.time() + grace
        if at >= self._kill_at:
            return
        self._kill_at = at
        self._stopping.set()
        if grace <= 0:
            self.kill()
            return
        self._timers.append(loop.call_at(at, self.kill))
        for container in self.all_containers:
            # Sidecars serve the others until those have ended, see `_stop_sidecars`.
            if container not in self.sidecars:
                container.terminate()

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
                body = self.status()
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

    def phase(self) -> str:
        """Return the phase: Pending, Running, Succeeded or Failed."""
        if self.over:
            ends = [container.terminated or {"exitCode": 137} for container in self.containers]
            ends += [one.terminated for one in self.init if one.terminated and one not in self.sidecars]
            return "Failed" if self._failure or any(end["exitCode"] for end in ends) else "Succeeded"
        statuses = [container.status for container in self.containers]
        begun = any("waiting" not in status["state"] or status["lastState"] for status in statuses)
        return "Running" if begun else "Pending"

    def status(self) -> KubeObject:
        """Return the pod status to report, as a strategic merge patch."""
        host, phase = self.sandbox.host.spec, self.phase()
        ready = not self.over and all(each.status["ready"] for each in (*self.containers, *self.sidecars))
        unready = {"Succeeded": "PodCompleted", "Failed": "PodFailed"}.get(phase, "ContainersNotReady")
        conditions = (
            ("PodReadyToStartContainers", not self.over, None),
            ("Initialized", self._initialized, "ContainersNotInitialized"),
            ("ContainersReady", ready, unready),
            ("Ready", ready, unready),
        )
        reason, message = self._failure or (None, None)
        return {
            "phase": phase,
            "reason": reason,
            "message": message,
            "startTime": self._start_time,
            # The merge key is the address: without this, an address of an earlier run of the pod would stay.
            **{"podIP": self.sandbox.ip, "podIPs": [{"$patch": "replace"}, {"ip": self.sandbox.ip}]},
            **{"hostIP": host.address, "hostIPs": [{"$patch": "replace"}, {"ip": host.address}]},
            "conditions": [self._condition(*condition) for condition in conditions],
            "containerStatuses": [dict(container.status) for container in self.containers],
            "initContainerStatuses": [dict(container.status) for container in self.init] or None,
        }

    def _condition(self, kind: str, holds: bool, reason: str | None) -> KubeObject:
        if self._transitions.get(kind, (None,))[0] != holds:
            self._transitions[kind] = (holds, timestamps.now())
        # Write an empty reason too: a patch does not remove fields that it does not name.
        value, since = "True" if holds else "False", self._transitions[kind][1]
        return {"type": kind, "status": value, "lastTransitionTime": since, "reason": None if holds else reason}
