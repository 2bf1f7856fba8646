"""Starts and signals the rank processes of one generation, of the built-in runtime or of the user's command."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshwright.api import labels
from meshwright.protocol.messages import ReplicaGroup
from meshwright.protocol.run_config import CommandRun, NativeRun
from meshwright.rules.launchers import launcher_of
from meshwright_worker.agent.command_stacks import ENABLE
from meshwright_worker.agent.events import EventQueue
from meshwright_worker.agent.fork_client import ForkServerClient, ForkServerError
from meshwright_worker.agent.home import temporary_directories
from meshwright_worker.agent.lighthouse import Lighthouse, LighthouseError
from meshwright_worker.agent.ports import ReservedPort
from meshwright_worker.agent.rank_environment import (
    communication_variables,
    own_group,
    rank_environment,
    rank_task,
    resolve_script_paths,
)
from meshwright_worker.agent.rank_process import RankHandle, RankOutput, start_command, supervise
from meshwright_worker.agent.server_process import ServerProcess, process_environment, runtime_installed
from meshwright_worker.agent.settings import Settings
from meshwright_worker.agent.state_machine import StartRanks
from meshwright_worker.command import error_file
from meshwright_worker.command.log_patterns import LogPatterns
from meshwright_worker.command.saved_checkpoints import SavedCheckpoints
from meshwright_worker.preflight.host import Host
from meshwright_worker.preflight.numa import cpus_of_rank
from meshwright_worker.rank.commands import encode_leave, encode_resume

log = logging.getLogger(__name__)

TORCHRUN = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""What torchrun sets unless the environment does."""
VOLUME_SECONDS = 10.0
"""Longest wait for a volume before ranks start. The command then waits for it itself, if it uses it."""
CLEAN_UP_SECONDS = 3.0
SETTLE_SECONDS = 0.2
"""Ranks that write nothing more for this long have written their stacks."""


class LaunchError(Exception):
    """A rank cannot be started; the message says why."""


class Launcher:
    """Owns every live rank process of this pod, and reserves the port for the next store of rank 0."""

    def __init__(
        self,
        settings: Settings,
        event_queue: EventQueue,
        environment: Mapping[str, str],
        server: ServerProcess | None = None,
    ) -> None:
        """`server` is a fork server that was started already, if any."""
        self._settings = settings
        self._event_queue = event_queue
        self._environment = process_environment(environment)
        self._server = ForkServerClient(self._environment, started=server)
        self._port = ReservedPort()
        self._lighthouse = Lighthouse()
        self._handles: dict[int, RankHandle] = {}
        self._directory: TemporaryDirectory[str] | None = None
        self._written: dict[int, RankOutput] = {}
        self._supervisors: set[asyncio.Task[None]] = set()
        self._saved: SavedCheckpoints | None = None
        self._end_store: Callable[[], None] = lambda: None

    @property
    def store_port(self) -> int:
        """The port to announce to the coordinator."""
        return self._port.number

    @property
    def lighthouse_port(self) -> int:
        """The port of the lighthouse of replica groups, if this pod runs it."""
        return self._lighthouse.port

    async def warm_up(self) -> None:
        """Start importing torch while the pod waits for its gang."""
        if runtime_installed():
            await self._server.start()

    @property
    def preparing(self) -> bool:
        """Whether torch is still being imported."""
        return self._server.importing

    async def prepared(self) -> None:
        """Wait until torch was imported, or could not be."""
        await self._server.imported()

    async def prepare(self, start: StartRanks) -> None:
        """Prepare to start the ranks of a generation; then release the port, if rank 0's store is about to use it.

        Raises:
            LaunchError: the fork server or the lighthouse of replica groups cannot be started.
        """
        if isinstance(start.document.run, NativeRun):
            try:
                await self._server.ready()
            except (ForkServerError, OSError) as error:
                raise LaunchError(f"the fork server did not start: {error}") from error
        else:
            await self._server.stop()
            await self._make_checkpoint_directory()
        # The store of an earlier generation: another pod may keep that of this one.
        self._end_store()
        self._end_store = lambda: None
        if (group := own_group(start.document, start.member.first_rank)) is not None:
            await self._prepare_group(start, group)
        elif start.member.first_rank == 0 and start.document.master_port == self._port.number:
            self._port.release()
            if start.document.in_memory and isinstance(start.document.run, NativeRun):
                await self._keep_store(start.document.master_port, start.document.world_size)
            self._port = ReservedPort()

    async def _make_checkpoint_directory(self) -> None:
        """Create the job's own directory on the volume, which the first save of a command expects to be there."""
        directory = self._settings.checkpoint_dir
        if directory is None:
            return
        try:
            async with asyncio.timeout(VOLUME_SECONDS):
                # Not its parents: without the volume there is nothing to create it on.
                await asyncio.to_thread(Path(directory).mkdir, exist_ok=True)
        except (OSError, TimeoutError) as error:
            log.warning("%s cannot be created for the checkpoints of the command: %r", directory, error)

    async def _prepare_group(self, start: StartRanks, group: ReplicaGroup) -> None:
        """Release the port for the store of a replica group, and start the lighthouse of all groups in rank 0's pod."""
        groups, run = start.document.replica_groups, start.document.run
        first_of_group = groups is not None and start.member.first_rank % groups.ranks == 0
        if first_of_group and group.master_port == self._port.number:
            self._port.release()
            self._port = ReservedPort()
        if groups is not None and groups.lighthouse and start.member.first_rank == 0 and isinstance(run, CommandRun):
            try:
                await self._lighthouse.start(run.command, self._environment)
            except LighthouseError as error:
                raise LaunchError(str(error)) from error

    async def _keep_store(self, port: int, ranks: int) -> None:
        """Keep the store of a generation in a process that is no rank, so that it is not lost with one."""
        try:
            self._end_store = await self._server.fork_store(port, ranks)
        except (ForkServerError, OSError) as error:
            raise LaunchError(f"the store of the generation did not start: {error}") from error

    def leave(self, ranks: Iterable[int], generation: int) -> None:
        """Tell these ranks to leave a generation and hold their state."""
        for rank in ranks:
            self._command(rank, encode_leave(generation))

    def take_over(self, start: StartRanks) -> None:
        """Count the processes that go on as those of the next generation, also before they are told to go on. After a
        resize they are other ranks: those of another worker, of which each has `shift` more.
        """
        self._handles = {rank + start.shift: handle for rank, handle in self._handles.items()}
        self._written = {rank + start.shift: output for rank, output in self._written.items()}
        for rank, handle in self._handles.items():
            handle.current.rank = rank
            if rank in start.resumed:
                handle.current.number = start.document.generation

    def resume(self, start: StartRanks, rank: int) -> int:
        """Let the process of `rank`, which holds its state, go on in another generation. Return its process id.

        Raises:
            LaunchError: it does not run any more, or the run is not of the built-in runtime.
        """
        document, handle = start.document, self._handles.get(rank)
        if handle is None or not isinstance(document.run, NativeRun):
            raise LaunchError(f"rank {rank} cannot continue: its process has ended")
        environment = rank_environment(document, start.member, rank, self._settings)
        self._command(
            rank, encode_resume(rank_task(document, document.run, start.member, rank, self._settings), environment)
        )
        return handle.pid

    def _command(self, rank: int, command: bytes) -> None:
        handle = self._handles.get(rank)
        if handle is not None and handle.commands is not None:
            handle.commands.write(command)

    async def spawn(self, start: StartRanks, rank: int) -> int:
        """Start and supervise the process of `rank`; return its process id.

        Raises:
            LaunchError: it cannot be started.
        """
        run = start.document.run
        try:
            environment = rank_environment(start.document, start.member, rank, self._settings)
            environment = {**communication_variables(start.document, self._environment), **environment}
            if isinstance(run, NativeRun):
                task = rank_task(start.document, run, start.member, rank, self._settings)
                handle = await self._server.fork(task, environment)
            else:
                files = {
                    labels.ENV_REPORT_FILE: self._file(f"report-{start.document.generation}-{rank}.jsonl"),
                    error_file.VARIABLE: self._file(f"error-{start.document.generation}-{rank}.json"),
                }
                full_environment = {**ENABLE, **TORCHRUN, **self._environment, **environment, **files}
                handle = await start_command(
                    rank, resolve_script_paths(run.command, full_environment), full_environment
                )
                if rank == 0:
                    warn_of_launcher(run.command)
                    self._saved = self._checkpoints(run, full_environment)
                    handle = replace(
                        handle,
                        patterns=_log_patterns(run),
                        checkpoints=self._saved,
                        checkpoint_directory=self._settings.checkpoint_dir,
                    )
        except (ForkServerError, OSError, ValueError) as error:
            raise LaunchError(f"rank {rank} cannot be started: {error}") from error
        self._handles[rank] = handle
        if start.document.numa_binding is not False:
            bind_to_numa_node(handle.pid, rank - start.member.first_rank, start.member.ranks)
        self._written[rank] = handle.written
        self._watch(supervise(handle, start.document.generation, self._event_queue, write_line))
        return handle.pid

    def _watch(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it in the background, until `close`."""
        supervisor = asyncio.create_task(coroutine)
        self._supervisors.add(supervisor)
        supervisor.add_done_callback(self._supervisors.discard)

    def checkpoint_delivered(self, path: str) -> None:
        """The operator knows a checkpoint that the user's command has reported, or that of the built-in runtime."""
        if self._saved is not None:
            self._watch(self._saved.delivered(path))

    def _checkpoints(self, run: CommandRun, environment: Mapping[str, str]) -> SavedCheckpoints | None:
        """What to do with the checkpoints that the command reports. None if they need no more than to be reported."""
        spec = run.checkpoint
        if spec is None or (spec.verify is None and spec.keep is None):
            return None
        directory = self._settings.checkpoint_dir
        return SavedCheckpoints(
            directory=Path(directory) if directory is not None else None,
            verify=resolve_script_paths(spec.verify, environment) if spec.verify is not None else None,
            keep=spec.keep,
            environment=environment,
        )

    def _file(self, name: str) -> str:
        """The path of a file in which a command reports its progress, or records its error."""
        if self._directory is None:
            places = temporary_directories(self._environment)
            self._directory = TemporaryDirectory(prefix="meshwright-", dir=places[0] if places else None)
        return str(Path(self._directory.name) / name)

    def remove(self, pid: int) -> None:
        """Forget a process that has exited."""
        self._handles = {rank: handle for rank, handle in self._handles.items() if handle.pid != pid}

    def written(self, rank: int) -> RankOutput:
        """The end of what the newest process of `rank` has written."""
        return self._written.get(rank) or RankOutput()

    def dump_stacks(self, ranks: Iterable[int]) -> None:
        """Make these ranks write the stacks of their threads. A rank that is stopped cannot."""
        for rank in ranks:
            if rank in self._handles:
                self._handles[rank].dump_stacks()

    async def stacks_written(self, ranks: Iterable[int], seconds: float) -> None:
        """Wait until these ranks have written their stacks, or `seconds` have passed."""
        outputs = [self._written[rank] for rank in ranks if rank in self._written]
        end = time.monotonic() + seconds
        first = before = sum(output.size for output in outputs)
        while time.monotonic() < end:
            await asyncio.sleep(SETTLE_SECONDS)
            now = sum(output.size for output in outputs)
            if now == before and now > first:
                return
            before = now

    def request_checkpoint(self) -> None:
        """Ask rank 0, which has begun to train, for a checkpoint after its current step."""
        if 0 in self._handles:
            self._handles[0].request_checkpoint()

    def terminate(self, ranks: Iterable[int]) -> None:
        """Send SIGTERM to these ranks."""
        for rank in ranks:
            if rank in self._handles:
                self._handles[rank].terminate()

    def kill(self, ranks: Iterable[int]) -> None:
        """Kill these ranks."""
        for rank in ranks:
            if rank in self._handles:
                self._handles[rank].kill()

    async def close(self) -> None:
        """Kill every remaining process."""
        self.kill(list(self._handles))
        if self._supervisors:
            await asyncio.wait(self._supervisors, timeout=CLEAN_UP_SECONDS)
        await self._server.stop()
        self._lighthouse.stop()
        if self._directory is not None:
            self._directory.cleanup()
        self._port.release()


def warn_of_launcher(command: Sequence[str]) -> None:
    """Log that a command starts ranks itself. Each rank's launcher would form a world of its own, without an error."""
    if (name := launcher_of(command)) is not None:
        log.warning(
            "`runtime.command` runs `%s` in each rank, which starts further processes that are not ranks of this job: "
            "run the script itself, which has the variables of torchrun",
            name,
        )


def _log_patterns(run: CommandRun) -> LogPatterns:
    return LogPatterns(run.progress.patterns if run.progress is not None else None)


def bind_to_numa_node(pid: int, local_rank: int, local_ranks: int, host: Host | None = None) -> None:
    """Let the process run only on the CPUs of its rank's NUMA node. Without one, it keeps the CPUs of the pod.

    The process has just started: threads that it starts later inherit the CPUs.
    """
    cpus = cpus_of_rank(host or Host(), local_rank, local_ranks)
    if cpus:
        with contextlib.suppress(OSError):  # it has exited already, or the CPUs were taken away meanwhile
            os.sched_setaffinity(pid, cpus)


def write_line(line: str) -> None:
    """Write one line to the pod's log. If it cannot be written, it is lost: a full disk must not stop the ranks.

    The log is UTF-8, whatever the image's variables say: a character that their encoding lacks would end the reader.
    """
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stdout.buffer.write(line.encode(errors="replace") + b"\n")
        sys.stdout.buffer.flush()
