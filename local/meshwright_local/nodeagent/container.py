"""One container's lifecycle: start, hooks, probes, stop, restart."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from io import FileIO
from pathlib import Path
from signal import SIGTERM, Signals
from subprocess import DEVNULL
from typing import Any

from meshwright.api.objects import KubeObject
from meshwright_local.kube import timestamps
from meshwright_local.kube.quantities import integer_value
from meshwright_local.nodeagent import volumes
from meshwright_local.nodeagent.console import Console
from meshwright_local.nodeagent.hooks import hook_of, run_hook
from meshwright_local.nodeagent.prober import Prober
from meshwright_local.nodeagent.restarts import RESTART_ALL, RESTARTING_ALL, RestartPolicy
from meshwright_local.nodeagent.runtime import environment, probes
from meshwright_local.nodeagent.runtime.handlers import LONGEST_ANSWER, Target
from meshwright_local.nodeagent.runtime.images import find_image
from meshwright_local.nodeagent.runtime.mount_namespace import FileSystemView, Mount
from meshwright_local.nodeagent.runtime.process import Process, ProcessSpec, StartError
from meshwright_local.nodeagent.sandbox import API_ERRORS, PodSpecError, Sandbox

_RETRY_SECONDS = 1.0
_MAX_BACKOFF_SECONDS = 300.0
_START_ERROR_CODE = 128
_LONGEST_MESSAGE = 4096
_LEAST_GRACE_SECONDS = 2.0
"""Seconds between SIGTERM and SIGKILL even if the grace period is shorter, or hooks have used it up."""
_REMOVED = "The container is removed because RestartAllContainers in place"


class Container:
    """Runs one container of a pod, by its restart policy, until it ends or is stopped.

    `status` is its containerStatus in the API's format; `logs` has one file for each run: `0.log`, `1.log`, ...
    """

    def __init__(self, sandbox: Sandbox, spec: KubeObject, policy: RestartPolicy, waiting: str) -> None:
        self.spec, self.name = spec, str(spec["name"])
        self.logs = sandbox.directory / "logs" / self.name
        self.status: KubeObject = {
            **{"name": self.name, "image": spec.get("image", ""), "imageID": ""},
            # Unique per container and stable, as with a real runtime.
            "containerID": f"process://{sandbox.uid}/{self.name}",
            **{"restartCount": 0, "ready": False, "started": False},
            **{"state": {"waiting": {"reason": waiting}}, "lastState": {}},
        }
        self._sandbox, self.policy = sandbox, policy
        self._message = sandbox.directory / "messages" / self.name
        self.begun = asyncio.Event()
        """Whether it has started, by its startup probe if it has one: what comes after a sidecar waits for that."""
        self.attempted = asyncio.Event()
        """Whether a start has succeeded, with its `postStart` hook, or failed: the next container waits for that."""
        self._stopping, self._killed = asyncio.Event(), asyncio.Event()
        self._process: Process | None = None
        self.console: Console | None = None
        """Its streams, if it has `stdin` or `tty`."""
        self._template = ProcessSpec([], {}, sandbox.home)
        self._mounts: list[Mount] = []
        self._exec_processes: set[Process] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._halting: asyncio.Task[None] | None = None
        self._out_of_memory = ""

    @property
    def log(self) -> Path:
        """Path of the current run's log."""
        return self.logs / f"{self.status['restartCount']}.log"

    @property
    def terminated(self) -> KubeObject | None:
        """Its terminated state, unless it runs or waits."""
        ended: KubeObject | None = self.status["state"].get("terminated")
        return ended

    @property
    def over(self) -> bool:
        """Whether the current run has ended, or none will ever start."""
        if self._process is None:
            return self._stopping.is_set() or self.terminated is not None
        return not self._process.running

    async def run(self) -> None:
        """Run until no restart is due. Afterwards `terminated` has the result, if it ever started."""
        try:
            await self._run()
        finally:
            self.attempted.set()

    async def _run(self) -> None:
        pause = 0.0
        while not self._stopping.is_set():
            ended = await self._run_once()
            if ended is None:
                self.attempted.set()
                await self._sleep(_RETRY_SECONDS)
                continue
            self._set("terminated", ended)
            action = "" if self._stopping.is_set() else self.policy.action(ended["exitCode"])
            if action == RESTART_ALL:
                self._sandbox.restart_all()
            if not action or action == RESTART_ALL:
                return
            if pause:
                self.status["lastState"] = {"terminated": ended}
                message = f"back-off {pause:g}s restarting failed container={self.name}"
                self._set("waiting", {"reason": "CrashLoopBackOff", "message": message})
                self._sandbox.event("Warning", "BackOff", f"Back-off restarting failed container {self.name}")
                await self._sleep(pause)
            if self._stopping.is_set():
                self._set("terminated", ended)
                return
            pause = min(pause * 2 or self._sandbox.host.restart_backoff_seconds, _MAX_BACKOFF_SECONDS)
            self.status.update(lastState={"terminated": ended}, restartCount=self.status["restartCount"] + 1)

    def signal(self, number: Signals) -> None:
        """Send a signal to the main process; the restart policy applies."""
        if self._process is not None:
            self._process.signal(number)

    def hold(self) -> None:
        """Do not start it again."""
        self._stopping.set()

    async def stop(self, grace: float, message: str = "", turn: Callable[[], Awaitable[object]] | None = None) -> None:
        """Stop it for good within a grace period. If this is cancelled, it can be stopped again with a shorter one."""
        self._stopping.set()
        if self._halting is not None:
            self._halting.cancel()
        if self._process is not None and self._process.running:
            await self._halt(self._process, grace, message or f"Stopping container {self.name}", turn)

    def begin_again(self) -> None:
        """Prepare for another first start, because a rule restarts all containers of the pod."""
        for flag in (self._stopping, self.begun, self.attempted):
            flag.clear()
        if "waiting" in self.status["state"]:
            return
        lost = {"exitCode": 137, "reason": RESTARTING_ALL, "message": _REMOVED}
        self.status.update(lastState={"terminated": lost}, restartCount=self.status["restartCount"] + 1)
        self._set("waiting", {"reason": RESTARTING_ALL, "message": _REMOVED})

    def kill(self) -> None:
        """Kill it at once, including commands started by exec. It is not restarted."""
        self._stopping.set()
        self._killed.set()
        for process in (self._process, *self._exec_processes):
            if process is not None:
                process.kill()

    async def gone(self) -> None:
        """Wait until none of its processes is left."""
        for process in (self._process, *self._exec_processes):
            if process is not None:
                await process.wait()

    async def start_exec(
        self, command_line: Sequence[str], streams: Sequence[int] = (DEVNULL,) * 3, *, tty: bool = False
    ) -> Process:
        """Run another command in the container; it is killed when the container ends.

        Raises:
            StartError: The container does not run, or the command does not exist.
        """
        if self._process is None or self.over:
            raise StartError(f"container {self.name} is not running")
        join = self._process.pid if self._sandbox.host.isolated else None
        process = await Process.start(self._spec(command_line, tty=tty, join=join), streams)
        self._exec_processes.add(process)
        process.ended.add_done_callback(lambda _: self._exec_processes.discard(process))
        return process

    async def _run_once(self) -> KubeObject | None:
        """Run it once, from start to end. Return None if it cannot be started yet."""
        event = self._sandbox.event
        try:
            command = await self._command()
        except (PodSpecError, *API_ERRORS) as error:
            reason = error.reason if isinstance(error, PodSpecError) else "CreateContainerConfigError"
            self._set("waiting", {"reason": reason, "message": str(error)})
            event("Warning", "Failed", f"Error: {error}")
            return None
        if self._stopping.is_set():
            return None
        begun = timestamps.now()
        event("Normal", "Created", f"Container created: {self.name}")
        try:
            process = self._process = await self._start(command)
        except StartError as error:
            event("Warning", "Failed", f"Error: {error}")
            return self._end(_START_ERROR_CODE, "StartError", begun, str(error))
        event("Normal", "Started", f"Container started: {self.name}")
        self._out_of_memory = ""
        if self._killed.is_set():
            process.kill()
        elif self._stopping.is_set():
            self._background(self._halt(process, 0, f"Stopping container {self.name}"))
        elif hook_of(self.spec, "postStart"):
            self._background(self._post_start(process, begun))
        else:
            self._started(process, begun)
        limit = ((self.spec.get("resources") or {}).get("limits") or {}).get("memory")
        if limit is not None:
            self._background(self._watch_memory(process, integer_value(limit)))
        code = await process.wait()
        await self._finish()
        if self._out_of_memory:
            return self._end(code, "OOMKilled", begun, self._out_of_memory)
        message = await asyncio.to_thread(self._termination_message, code)
        return self._end(code, "Completed" if code == 0 else "Error", begun, message)

    async def _finish(self) -> None:
        """End everything that belonged to a run, now that its main process is gone."""
        if self.console is not None:
            await self.console.close()
        for task in self._tasks:
            task.cancel()
        for other in list(self._exec_processes):
            other.kill()
            await other.wait()
        if self._halting is not None:
            # A hook that sleeps is slept to its end, also if the process has ended before.
            await asyncio.wait({self._halting})

    async def _start(self, command: ProcessSpec) -> Process:
        self.console = None
        if not self.spec.get("stdin") and not self.spec.get("tty"):
            return await Process.start(command)
        console = Console(self.log, tty=bool(self.spec.get("tty")))
        try:
            process = await Process.start(replace(command, log=None, tty=console.tty), console.child)
        finally:
            console.begin()
        if not self.spec.get("stdin") and not console.tty:
            console.close_input()
        self.console = console
        return process

    async def _command(self) -> ProcessSpec:
        """Return the process to run. Everything that the spec refers to is read again for each run."""
        sandbox, spec, isolated = self._sandbox, self.spec, self._sandbox.host.isolated
        image = find_image(sandbox.host.images, self.status["image"])
        if image is not None and not isolated:
            raise PodSpecError(
                f"image {self.status['image']!r} has its own root directory, which needs a node agent with the "
                "capability SYS_ADMIN: run the cluster as root",
                "CreateContainerError",
            )
        values = await environment.declared_environment(sandbox, spec)
        command_line = environment.command(spec, values, image)
        root = sandbox.directory / "root" / self.name
        for directory in (self.logs, self._message.parent, root):
            directory.mkdir(parents=True, exist_ok=True)
        self._message.write_bytes(b"")
        message = Mount(str(self._message), spec.get("terminationMessagePath") or "/dev/termination-log")
        self._mounts = [*volumes.mounts(sandbox, spec, values), message]
        env = environment.base_environment(sandbox, image) | {name: self._path(value) for name, value in values.items()}
        default = str(sandbox.home) if image is None else image.working_directory
        cwd = Path(self._path(spec.get("workingDir") or default))
        if not isolated and not cwd.is_dir():  # noqa: ASYNC240
            # A container runtime creates a missing working directory in the container's own file system.
            cwd = sandbox.home / str(cwd).lstrip("/")
            cwd.mkdir(parents=True, exist_ok=True)
        self._template = ProcessSpec([], env, cwd)
        own = {sandbox.hosts: "/etc/hosts"}
        if image is None:
            own |= {path: str(path) for path in (sandbox.home, sandbox.temporary)}
        mounts = [*self._mounts, *(Mount(str(path), target) for path, target in own.items())]
        root_of = str(image.root) if image is not None else ""
        view = FileSystemView(str(root), sandbox.hostname, mounts, root_of) if isolated else None
        return self._spec(command_line, log=self.log, view=view)

    def _spec(self, command_line: Sequence[str], **more: Any) -> ProcessSpec:
        return replace(self._template, argv=[self._path(word) for word in command_line], **more)

    def _path(self, text: str) -> str:
        """Return a text of the container with paths as its processes see them."""
        return text if self._sandbox.host.isolated else volumes.rewrite(text, self._mounts)

    def _set(self, kind: str, state: KubeObject) -> None:
        started = kind == "running" and "startupProbe" not in self.spec
        self.status.update(state={kind: state}, started=started, ready=started and "readinessProbe" not in self.spec)
        if started:
            self.begun.set()
        self._sandbox.changed()

    def _end(self, code: int, reason: str, begun: str, message: str) -> KubeObject:
        state = {"exitCode": code, "reason": reason, "startedAt": begun, "finishedAt": timestamps.now()}
        return {**state, "message": message, "containerID": self.status["containerID"]}

    def _termination_message(self, code: int) -> str:
        """Return its termination message: `terminationMessagePath`, or the end of its log (FallbackToLogsOnError)."""
        content = b""
        with contextlib.suppress(OSError):
            content = self._message.read_bytes()[:_LONGEST_MESSAGE]
        if not content and code and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            records = self.log.read_bytes()[-_LONGEST_MESSAGE:].splitlines()[-80:]
            content = b"\n".join(record.split(b" ", 3)[-1] for record in records)[-2048:]
        return content.decode(errors="replace")

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    def _started(self, process: Process, begun: str) -> None:
        self._set("running", {"startedAt": begun})
        self.attempted.set()
        self._background(self._probe(process).run())

    async def _post_start(self, process: Process, begun: str) -> None:
        """Run the `postStart` hook. Until it ends, the container does not count as running."""
        if await run_hook(hook_of(self.spec, "postStart") or {}, self._target()):
            self._started(process, begun)
            return
        self._sandbox.event("Warning", "FailedPostStartHook", "PostStartHook failed")
        self._end_run(process, self._sandbox.grace, "FailedPostStartHook")

    def _end_run(self, process: Process, grace: float, message: str) -> None:
        """Stop this run; the restart policy applies. It goes on if what decided this is cancelled."""
        if not self._stopping.is_set() and self._halting is None:
            self._halting = asyncio.create_task(self._halt(process, grace, message))
            self._halting.add_done_callback(self._halted)

    def _halted(self, _: asyncio.Task[None]) -> None:
        self._halting = None

    async def _halt(
        self, process: Process, grace: float, message: str, turn: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """Run the `preStop` hook, await the container's turn, ask the process to end, and kill it in the end.

        The grace period begins now: the hook and the turn are part of it.
        """
        self._sandbox.event("Normal", "Killing", message)
        loop = asyncio.get_running_loop()
        until = loop.time() + grace
        if grace > 0:
            await self._pre_stop(until)
            if turn is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(until):
                        await turn()
        process.signal(SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(max(until, loop.time() + _LEAST_GRACE_SECONDS)):
                await process.wait()
        process.kill()
        await process.wait()

    async def _pre_stop(self, until: float) -> None:
        hook = hook_of(self.spec, "preStop")
        if hook is None:
            return
        try:
            async with asyncio.timeout_at(until):
                succeeded = await self._unless_killed(run_hook(hook, self._target()))
        except TimeoutError:
            succeeded = "exec" not in hook  # the command ends with the container, and not by itself
        if not succeeded:
            self._sandbox.event("Warning", "FailedPreStopHook", "PreStopHook failed")

    async def _unless_killed(self, work: Coroutine[Any, Any, bool]) -> bool:
        """Await a hook, but not on a node that stops."""
        killed = asyncio.create_task(self._killed.wait())
        hook = asyncio.create_task(work)
        try:
            await asyncio.wait({hook, killed}, return_when=asyncio.FIRST_COMPLETED)
            return not hook.done() or hook.result()
        finally:
            hook.cancel()
            killed.cancel()

    def _target(self) -> Target:
        return Target(self._sandbox.ip, self.spec, self._run_command, self._sandbox.host.probe_session)

    def _probe(self, process: Process) -> Prober:
        return Prober(
            self._sandbox,
            self.spec,
            self._target(),
            stopping=self._stopping.is_set,
            started=self._startup_succeeded,
            ready=self._set_ready,
            unhealthy=lambda kind: self._unhealthy(kind, process),
        )

    def _startup_succeeded(self) -> None:
        self.status.update(started=True, ready="readinessProbe" not in self.spec)
        self.begun.set()
        self._sandbox.changed()

    def _set_ready(self, ready: bool) -> None:
        if self.status["ready"] != ready:
            self.status["ready"] = ready
            self._sandbox.changed()

    def _unhealthy(self, kind: str, process: Process) -> None:
        """End a run that failed a probe; the restart policy applies, but not rules for exit codes."""
        grace = self.spec[f"{kind}Probe"].get("terminationGracePeriodSeconds") or self._sandbox.grace
        restarted = ", will be restarted" if self.policy.policy != "Never" else ""
        self._end_run(process, grace, f"Container {self.name} failed {kind} probe{restarted}")

    async def _watch_memory(self, process: Process, limit: int) -> None:
        used = await probes.memory_exceeded(process.shim_pid, limit)
        self._out_of_memory = f"memory: {used} bytes in use, the limit is {limit}"
        process.kill()

    async def _run_command(self, command_line: list[str]) -> tuple[int, str]:
        """Run a command of a probe or a hook. Return its exit code and the beginning of its output."""
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            try:
                process = await self.start_exec(command_line, (DEVNULL, writer, writer))
            finally:
                os.close(writer)
            try:
                output = await _read(pipe)
                return await process.wait(), output
            finally:
                process.kill()

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _read(pipe: FileIO) -> str:
    """Return the beginning of what is written to a pipe, once it is closed."""
    stream, text = asyncio.StreamReader(), b""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
    try:
        while part := await stream.read(LONGEST_ANSWER):
            text = (text + part)[:LONGEST_ANSWER]
    finally:
        transport.close()
    return text.decode(errors="replace")
