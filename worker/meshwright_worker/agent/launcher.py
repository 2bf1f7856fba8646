"""Starting and reaching the processes of one generation, whichever runtime they run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Mapping

from meshwright_worker.agent.command_rank import start_command
from meshwright_worker.agent.events import EventQueue
from meshwright_worker.agent.fork_client import ForkServerClient, ForkServerError
from meshwright_worker.agent.rank_environment import (
    process_environment,
    rank_environment,
    rank_task,
    resolve_script_paths,
)
from meshwright_worker.agent.rank_process import RankHandle, supervise
from meshwright_worker.agent.settings import Settings
from meshwright_worker.agent.state_machine import StartRanks
from meshwright_worker.agent.store_port import ReservedPort

CLEAN_UP_SECONDS = 3.0


class LaunchError(Exception):
    """A rank cannot be started; the message says why."""


class Launcher:
    """Holds every live rank process of this pod, and the port that rank 0's store would take next."""

    def __init__(self, settings: Settings, event_queue: EventQueue, environment: Mapping[str, str]) -> None:
        self._settings = settings
        self._event_queue = event_queue
        self._environment = process_environment(environment)
        self._server = ForkServerClient(self._environment)
        self._port = ReservedPort()
        self._handles: dict[int, RankHandle] = {}
        self._supervisors: set[asyncio.Task[None]] = set()

    @property
    def store_port(self) -> int:
        """The port to announce."""
        return self._port.number

    async def warm_up(self) -> None:
        """Begin to import torch while the pod waits for its gang."""
        await self._server.start()

    async def prepare(self, start: StartRanks) -> None:
        """Make ready to start the ranks of a generation, then free the port if rank 0's store is about to take it.

        Raises:
            LaunchError: the rank server cannot be brought up.
        """
        if start.document.run.command is None:
            try:
                await self._server.ready()
            except (ForkServerError, OSError) as error:
                raise LaunchError(f"the rank server does not start: {error}") from error
        else:
            await self._server.stop()
        if start.member.first_rank == 0 and start.document.master_port == self._port.number:
            self._port.release()
            self._port = ReservedPort()

    async def spawn(self, start: StartRanks, rank: int) -> int:
        """Start the process of `rank` and watch over it; returns its process id.

        Raises:
            LaunchError: it cannot be started.
        """
        run = start.document.run
        try:
            environment = rank_environment(start.document, start.member, rank, self._settings)
            if run.command is None:
                task = rank_task(start.document, start.member, rank, self._settings)
                handle = await self._server.fork(task, environment)
            else:
                full_environment = {**self._environment, **environment}
                handle = await start_command(
                    rank, resolve_script_paths(run.command, full_environment), full_environment
                )
        except (ForkServerError, OSError, ValueError) as error:
            raise LaunchError(f"rank {rank} cannot be started: {error}") from error
        self._handles[rank] = handle
        supervisor = asyncio.create_task(supervise(handle, start.document.generation, self._event_queue, write_line))
        self._supervisors.add(supervisor)
        supervisor.add_done_callback(self._supervisors.discard)
        return handle.pid

    def remove(self, rank: int) -> None:
        """The process of `rank` ended."""
        self._handles.pop(rank, None)

    def terminate(self, ranks: Iterable[int]) -> None:
        """Ask these ranks to stop."""
        for rank in ranks:
            if rank in self._handles:
                self._handles[rank].terminate()

    def kill(self, ranks: Iterable[int]) -> None:
        """End these ranks at once."""
        for rank in ranks:
            if rank in self._handles:
                self._handles[rank].kill()

    async def close(self) -> None:
        """Leave no process behind."""
        self.kill(list(self._handles))
        if self._supervisors:
            await asyncio.wait(self._supervisors, timeout=CLEAN_UP_SECONDS)
        await self._server.stop()
        self._port.release()


def write_line(line: str) -> None:
    """One line into the pod's log."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
