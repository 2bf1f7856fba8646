"""One container's life: start, probe, stop, restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Sequence
from pathlib import Path
from subprocess import DEVNULL

from meshwright.local import clock
from meshwright.local.nodeagent import memory, probes
from meshwright.local.nodeagent.command import CommandLine, NoCommandError, termination_file, termination_message
from meshwright.local.nodeagent.context import PodContext
from meshwright.local.nodeagent.fields import FieldError
from meshwright.local.nodeagent.process import Process, StartError, Stream
from meshwright.local.nodeagent.references import MissingReferenceError
from meshwright.local.nodeagent.state import ContainerState, Terminated
from meshwright.local.nodeagent.volumes import VolumeError
from meshwright.local.quantities import whole
from meshwright.local.resources import Object

logger = logging.getLogger(__name__)

_CONFIG_RETRY_SECONDS = 1.0
_LONGEST_PAUSE = 300.0
_START_ERROR_CODE = 128


class Container:
    """Runs one container of a pod by its restart policy until it is over or told to stop."""

    def __init__(self, context: PodContext, spec: Object, state: ContainerState, policy: str) -> None:
        self.spec = spec
        self.state = state
        self._context = context
        self._policy = policy
        self._process: Process | None = None
        self._command: CommandLine | None = None
        self._beside: set[Process] = set()
        self._stopping = asyncio.Event()
        self._probes: list[asyncio.Task[None]] = []
        self._hooks: set[asyncio.Task[None]] = set()
        self._out_of_memory = ""

    @property
    def log(self) -> Path:
        """The log of the present run."""
        return self._context.log_directory(self.state.name) / f"{self.state.restarts}.log"

    @property
    def over(self) -> bool:
        """Whether the present run has ended, or none will ever begin."""
        if self._process is None:
            return self._stopping.is_set() or self.state.terminated is not None
        return not self._process.running

    async def run(self) -> None:
        """Live until no restart is due. Afterwards `state.terminated` says how it ended, if it ever began."""
        pause = 0.0
        while not self._stopping.is_set():
            ended = await self._run_once()
            if ended is None:
                continue
            self._set(terminated=ended)
            again = self._policy == "Always" or (self._policy == "OnFailure" and ended.exit_code != 0)
            if not again or self._stopping.is_set():
                return
            if pause:
                await self._back_off(pause, ended)
            pause = min(pause * 2 or self._context.restart_pause, _LONGEST_PAUSE)
            if not self._stopping.is_set():
                self.state.last, self.state.restarts = ended, self.state.restarts + 1

    async def terminate(self, reason: str = "") -> None:
        """Ask it to end: the preStop hook, then SIGTERM to the main process. It is not restarted."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._process is not None and self._process.running:
            self._context.event("Normal", "Killing", reason or f"Stopping container {self.state.name}")
            await self._stop_gently(self._process)

    def kill(self) -> None:
        """End it at once, with everything that was started beside it."""
        self._stopping.set()
        for process in [self._process, *self._beside]:
            if process is not None:
                process.kill()

    async def gone(self) -> None:
        """Wait until no process of it is left."""
        for process in [self._process, *self._beside]:
            if process is not None:
                await process.wait()

    async def start_beside(
        self, words: Sequence[str], *, stdin: Stream, stdout: Stream, stderr: Stream, tty: bool = False
    ) -> Process:
        """Run another command in the container, which dies with it.

        Raises:
            StartError: The container does not run, or there is no such command.
        """
        if self._command is None or self._process is None or self.over:
            raise StartError(f"container {self.state.name} is not running")
        process = await Process.start(self._command.beside(words, tty=tty), stdin=stdin, stdout=stdout, stderr=stderr)
        self._beside.add(process)
        waiter = asyncio.ensure_future(process.wait())
        waiter.add_done_callback(lambda _: self._beside.discard(process))
        return process

    async def _run_once(self) -> Terminated | None:
        """One run from start to end; None when it could not be started yet and a while was waited."""
        try:
            self._command = await CommandLine.resolve(self._context, self.spec)
            for directory in (self.log.parent, termination_file(self._context, self.spec).parent):
                directory.mkdir(parents=True, exist_ok=True)
            termination_file(self._context, self.spec).write_bytes(b"")
            command = self._command.main(self.log)
        except (MissingReferenceError, FieldError, VolumeError, NoCommandError) as error:
            reason = "CreateContainerError" if isinstance(error, NoCommandError) else "CreateContainerConfigError"
            self._wait_state(reason, str(error))
            self._context.event("Warning", "Failed", f"Error: {error}")
            await self._pause(_CONFIG_RETRY_SECONDS)
            return None
        name, begun = self.state.name, clock.now()
        self._context.event("Normal", "Created", f"Container created: {name}")
        try:
            self._process = await Process.start(command)
        except StartError as error:
            self._context.event("Warning", "Failed", f"Error: {error}")
            return Terminated(_START_ERROR_CODE, "StartError", begun, clock.now(), str(error))
        if self._stopping.is_set():
            self._process.kill()
        self._context.event("Normal", "Started", f"Container started: {name}")
        self._out_of_memory = ""
        self._set(running_since=begun)
        self._start_probes(self._process)
        code = await self._process.wait()
        await self._clean_up()
        if self._out_of_memory:
            return Terminated(code, "OOMKilled", begun, clock.now(), self._out_of_memory)
        message = await asyncio.to_thread(termination_message, self._context, self.spec, code, self.log)
        return Terminated(code, "Completed" if code == 0 else "Error", begun, clock.now(), message)

    async def _clean_up(self) -> None:
        for task in (*self._probes, *self._hooks):
            task.cancel()
        self._probes.clear()
        for process in list(self._beside):
            process.kill()
            await process.wait()

    def _set(self, *, running_since: str | None = None, terminated: Terminated | None = None) -> None:
        self.state.running_since, self.state.terminated = running_since, terminated
        running = running_since is not None
        self.state.started = running and "startupProbe" not in self.spec
        self.state.ready = self.state.started and "readinessProbe" not in self.spec
        self._context.changed()

    def _wait_state(self, reason: str, message: str) -> None:
        self.state.waiting = (reason, message)
        self.state.terminated = None
        self._set()

    async def _back_off(self, pause: float, ended: Terminated) -> None:
        name = self.state.name
        self.state.last = ended
        self._wait_state("CrashLoopBackOff", f"back-off {pause:g}s restarting failed container={name}")
        self._context.event("Warning", "BackOff", f"Back-off restarting failed container {name}")
        await self._pause(pause)
        if self._stopping.is_set():
            self._set(terminated=ended)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def _start_probes(self, process: Process) -> None:
        limit = ((self.spec.get("resources") or {}).get("limits") or {}).get("memory")
        if limit is not None:
            self._probes.append(asyncio.create_task(self._watch_memory(process, whole(limit))))
        hook = (self.spec.get("lifecycle") or {}).get("postStart")
        if hook:
            self._background(self._post_start(hook))
        if probe := self.spec.get("startupProbe"):
            self._probes.append(asyncio.create_task(self._startup(probe)))
        else:
            self._start_later_probes()

    def _start_later_probes(self) -> None:
        for kind, told in (("readinessProbe", self._readiness), ("livenessProbe", self._liveness)):
            if probe := self.spec.get(kind):
                self._probes.append(asyncio.create_task(probes.watch(probe, self._target(), told)))

    async def _watch_memory(self, process: Process, limit: int) -> None:
        used = await memory.until_exceeded(process.shim_pid, limit)
        self._out_of_memory = f"memory: {used} bytes in use, the limit is {limit}"
        process.kill()

    async def _startup(self, probe: Object) -> None:
        await probes.watch(probe, self._target(), self._started, once=True)
        self._start_later_probes()

    def _started(self, good: bool, why: str) -> None:
        if not good:
            self._unhealthy("Startup", why)
            return
        self.state.started = True
        self.state.ready = "readinessProbe" not in self.spec
        self._context.changed()

    def _readiness(self, good: bool, why: str) -> None:
        if not good:
            self._context.event("Warning", "Unhealthy", f"Readiness probe failed: {why}")
        if self.state.ready != good:
            self.state.ready = good
            self._context.changed()

    def _liveness(self, good: bool, why: str) -> None:
        if not good:
            self._unhealthy("Liveness", why)

    def _unhealthy(self, kind: str, why: str) -> None:
        if self._process is None or self._hooks:
            return
        self._context.event("Warning", "Unhealthy", f"{kind} probe failed: {why}")
        name = self.state.name
        message = f"Container {name} failed {kind.lower()} probe, will be restarted"
        self._context.event("Normal", "Killing", message)
        self._background(self._stop_unhealthy(self._process))

    async def _stop_unhealthy(self, process: Process) -> None:
        grace = self._context.pod["spec"].get("terminationGracePeriodSeconds")
        await self._stop_gently(process)
        await asyncio.sleep(30 if grace is None else grace)
        process.kill()

    async def _stop_gently(self, process: Process) -> None:
        hook = (self.spec.get("lifecycle") or {}).get("preStop")
        if hook:
            why = await probes.act(hook, self._target())
            if why:
                self._context.event("Warning", "FailedPreStopHook", f"PreStopHook failed: {why}")
        process.signal(signal.Signals[(self.spec.get("lifecycle") or {}).get("stopSignal", "SIGTERM")])

    async def _post_start(self, hook: Object) -> None:
        why = await probes.act(hook, self._target())
        if why and self._process is not None:
            self._context.event("Warning", "FailedPostStartHook", f"PostStartHook failed: {why}")
            self._process.kill()

    def _background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._hooks.add(task)
        task.add_done_callback(self._hooks.discard)

    def _target(self) -> probes.ProbeTarget:
        ports = {item["name"]: item["containerPort"] for item in self.spec.get("ports") or () if item.get("name")}
        return probes.ProbeTarget(self._context.place.pod_ip, ports, self._run_probe, self._context.session)

    async def _run_probe(self, words: list[str]) -> int:
        try:
            process = await self.start_beside(words, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
        except StartError:
            return 127
        try:
            return await process.wait()
        except asyncio.CancelledError:
            process.kill()
            raise
