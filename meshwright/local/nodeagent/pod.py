"""One pod's life on a node: volumes, init containers, containers, the end, and the confirmation of its deletion."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Iterator

import aiohttp

from meshwright.local import clock
from meshwright.local.client import ApiClient, ApiError
from meshwright.local.nodeagent import volumes
from meshwright.local.nodeagent.container import Container
from meshwright.local.nodeagent.context import PodContext
from meshwright.local.nodeagent.fields import FieldError
from meshwright.local.nodeagent.references import MissingReferenceError
from meshwright.local.nodeagent.reporter import StatusReporter
from meshwright.local.nodeagent.state import ContainerState, PodState, Terminated
from meshwright.local.nodeagent.volumes import VolumeContext, VolumeError
from meshwright.local.resources import PODS, Object

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5
_DEFAULT_GRACE = 30.0
_LOST = "The container could not be located when the pod was terminated"


class PodRunner:
    """Runs a pod bound to this node. `run` returns when no process of it is left and the API knows."""

    def __init__(self, client: ApiClient, context: PodContext) -> None:
        self.context = context
        self._client = client
        spec = context.pod["spec"]
        self.state = PodState(
            pod_ip=context.place.pod_ip,
            host_ip=context.place.host_ip,
            start_time=(context.pod.get("status") or {}).get("startTime") or clock.now(),
            init=[_initial(item, context.pod, "PodInitializing") for item in spec.get("initContainers") or ()],
            containers=[_initial(item, context.pod, "ContainerCreating") for item in spec["containers"]],
        )
        self._reporter = StatusReporter(client, context, self.state)
        context.changed = self._reporter.changed
        policy = spec.get("restartPolicy") or "Always"
        init_policy = "Never" if policy == "Never" else "OnFailure"
        self.init = self._containers("initContainers", self.state.init, init_policy)
        self.containers = self._containers("containers", self.state.containers, policy)
        self._stopping = asyncio.Event()
        self._kill_at: float | None = None
        self._kill_timer: asyncio.TimerHandle | None = None
        self._terminating: set[asyncio.Task[None]] = set()

    def all_containers(self) -> Iterator[Container]:
        """Init containers, then the others."""
        yield from self.init
        yield from self.containers

    def update(self, pod: Object) -> None:
        """The object changed: notice its deletion, also when a later one gives it less time."""
        self.context.pod = pod
        metadata = pod["metadata"]
        if metadata.get("deletionTimestamp"):
            self.state.deleting = True
            grace = metadata.get("deletionGracePeriodSeconds")
            self._stop(_DEFAULT_GRACE if grace is None else float(grace))

    def refuse(self, reason: str, message: str) -> None:
        """The node does not take the pod: it fails without having begun. To be called before `run`."""
        self.state.reason, self.state.message = reason, message
        self._stopping.set()
        self.context.event("Warning", reason, message)

    def kill(self) -> None:
        """End every process at once: the object is gone, or the node ends."""
        self._stopping.set()
        for container in self.all_containers():
            container.kill()

    async def run(self) -> None:
        """Live."""
        reporting = asyncio.create_task(self._reporter.run())
        deadline = self._start_deadline()
        try:
            await self._live_guarded()
            self.state.over = True
            await self._reporter.flush()
            await self.confirm_deletion()
        finally:
            self.kill()
            for handle in (deadline, self._kill_timer):
                if handle is not None:
                    handle.cancel()
            reporting.cancel()
            await asyncio.to_thread(shutil.rmtree, self.context.temporary, ignore_errors=True)

    async def gone(self) -> None:
        """Wait until no process of the pod is left."""
        for container in self.all_containers():
            await container.gone()

    async def confirm_deletion(self) -> None:
        """Tell the API that nothing of a deleted pod runs any more; only then does its object go away."""
        metadata = self.context.pod["metadata"]
        while self.state.deleting:
            try:
                await self._client.delete(
                    PODS, metadata["name"], metadata["namespace"], grace_seconds=0, uid=metadata["uid"]
                )
                return
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
                logger.debug("deletion of %s: %r", metadata["name"], error)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _live_guarded(self) -> None:
        try:
            await self._live()
        except Exception:
            logger.exception("pod %s failed in its agent", self.context.pod["metadata"]["name"])
            self.state.reason, self.state.message = "NodeAgentError", "the node agent's log says more"
            self.kill()
            await self.gone()

    async def _live(self) -> None:
        if self._stopping.is_set() or self._was_running_before():
            return
        for directory in (self.context.home, self.context.temporary):
            directory.mkdir(parents=True, exist_ok=True)
        # Whoever reads `status.podIP` may do so from the container's first moment on.
        await self._reporter.flush()
        if not await self._prepare_volumes() or not await self._initialize():
            return
        self.state.initialized = True
        self._reporter.changed()
        async with asyncio.TaskGroup() as group:
            for container in self.containers:
                group.create_task(container.run())

    def _was_running_before(self) -> bool:
        """Take over a pod that an earlier agent ran. Its processes died with that agent.

        Returns:
            Whether the pod is over because nothing may be restarted.
        """
        old = self.context.pod.get("status") or {}
        before = {item["name"]: item for item in old.get("containerStatuses") or ()}
        final: bool = self.context.pod["spec"].get("restartPolicy") == "Never"
        begun = False
        for state in self.state.containers:
            item = before.get(state.name) or {}
            # A log shows a run that its agent did not live to report. Running twice would be worse than failing.
            runs = len(list(self.context.log_directory(state.name).glob("*.log")))
            if not runs and "waiting" in (item.get("state") or {"waiting": {}}):
                continue
            begun = True
            ended = _ended_before(item)
            if final:
                state.terminated = ended
            else:
                state.last, state.restarts = ended, max(runs, int(item.get("restartCount") or 0) + 1)
        self.state.initialized = begun
        return final and begun

    async def _prepare_volumes(self) -> bool:
        """Make the volumes, waiting for what is missing; False when the pod was told to stop."""
        context = self.context
        told = ""
        while not self._stopping.is_set():
            source = VolumeContext(context.pod, context.place, context.references, context.directory / "volumes")
            try:
                context.volumes = await volumes.prepare(source)
                return True
            except (MissingReferenceError, VolumeError, FieldError) as error:
                if str(error) != told:
                    told = str(error)
                    context.event("Warning", "FailedMount", f"MountVolume.SetUp failed: {error}")
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
                logger.debug("volumes of %s: %r", context.pod["metadata"]["name"], error)
            try:
                async with asyncio.timeout(_RETRY_SECONDS):
                    await self._stopping.wait()
            except TimeoutError:
                pass
        return False

    async def _initialize(self) -> bool:
        """Run the init containers one after the other; False when one failed or the pod was told to stop."""
        for container in self.init:
            await container.run()
            ended = container.state.terminated
            if ended is None or ended.exit_code:
                return False
            container.state.ready = True
        return not self._stopping.is_set()

    def _start_deadline(self) -> asyncio.TimerHandle | None:
        seconds = self.context.pod["spec"].get("activeDeadlineSeconds")
        if seconds is None:
            return None
        begun = clock.parse(self.state.start_time).timestamp()
        left = begun + seconds - clock.parse(clock.now()).timestamp()
        return asyncio.get_running_loop().call_later(max(0.0, left), self._deadline_passed)

    def _deadline_passed(self) -> None:
        self.state.reason = "DeadlineExceeded"
        self.state.message = "Pod was active on the node longer than the specified deadline"
        self.context.event("Normal", "DeadlineExceeded", self.state.message)
        grace = self.context.pod["spec"].get("terminationGracePeriodSeconds")
        self._stop(_DEFAULT_GRACE if grace is None else float(grace))

    def _stop(self, grace: float) -> None:
        """Ask every container to end, and kill what is left when the grace period is over."""
        loop = asyncio.get_running_loop()
        at = loop.time() + grace
        if self._kill_at is not None and at >= self._kill_at:
            return
        self._kill_at = at
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        if grace <= 0:
            self.kill()
            return
        self._kill_timer = loop.call_at(at, self.kill)
        if not self._stopping.is_set():
            self._stopping.set()
            for container in self.all_containers():
                task = asyncio.create_task(container.terminate())
                self._terminating.add(task)
                task.add_done_callback(self._terminating.discard)

    def _containers(self, section: str, states: list[ContainerState], policy: str) -> list[Container]:
        specs = self.context.pod["spec"].get(section) or ()
        return [Container(self.context, spec, state, policy) for spec, state in zip(specs, states, strict=True)]


def _initial(spec: Object, pod: Object, waiting: str) -> ContainerState:
    # Unique per container and stable, like a runtime's; not a hash of content.
    identity = f"process://{pod['metadata']['uid']}/{spec['name']}"
    return ContainerState(spec["name"], spec.get("image", ""), identity, (waiting, ""))


def _ended_before(item: Object) -> Terminated:
    """How a container that an earlier agent reported ended: as reported, or unseen."""
    state = item.get("state") or {}
    if ended := state.get("terminated"):
        begun, finished = ended.get("startedAt") or clock.now(), ended.get("finishedAt") or clock.now()
        return Terminated(ended["exitCode"], ended.get("reason", ""), begun, finished, ended.get("message", ""))
    begun = (state.get("running") or {}).get("startedAt") or clock.now()
    return Terminated(137, "ContainerStatusUnknown", begun, clock.now(), _LOST)
