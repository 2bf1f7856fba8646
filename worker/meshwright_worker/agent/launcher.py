"""Starting and reaching the processes of one generation, whichever runtime they run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Mapping

from meshwright_worker.agent.commands import start_command
from meshwright_worker.agent.core import Start
from meshwright_worker.agent.environment import located, process_environment, rank_environment, rank_task
from meshwright_worker.agent.forks import RankServer, RankServerError
from meshwright_worker.agent.inbox import Inbox
from meshwright_worker.agent.port import HeldPort
from meshwright_worker.agent.ranks import LiveRank, supervise
from meshwright_worker.settings import Settings

CLEAN_UP_SECONDS = 3.0


class LaunchError(Exception):
    """A rank cannot be started; the message says why."""


class Launcher:
    """Holds every live rank process of this pod, and the port that rank 0's store would take next."""

    def __init__(self, settings: Settings, inbox: Inbox, environment: Mapping[str, str]) -> None:
        self._settings = settings
        self._inbox = inbox
        self._environment = process_environment(environment)
        self._server = RankServer(self._environment)
        self._port = HeldPort()
        self._live: dict[int, LiveRank] = {}
        self._supervisors: set[asyncio.Task[None]] = set()

    @property
    def store_port(self) -> int:
        """The port to announce."""
        return self._port.number

    async def warm_up(self) -> None:
        """Begin to import torch while the pod waits for its gang."""
        await self._server.start()

    async def prepare(self, start: Start) -> None:
        """Make ready to start the ranks of a generation, then free the port if rank 0's store is about to take it.

        Raises:
            LaunchError: the rank server cannot be brought up.
        """
        if start.document.run.command is None:
            try:
                await self._server.ready()
            except (RankServerError, OSError) as error:
                raise LaunchError(f"the rank server does not start: {error}") from error
        else:
            await self._server.stop()
        if start.member.first_rank == 0 and start.document.master_port == self._port.number:
            self._port.release()
            self._port = HeldPort()

    async def spawn(self, start: Start, rank: int) -> int:
        """Start the process of `rank` and watch over it; returns its process id.

        Raises:
            LaunchError: it cannot be started.
        """
        run = start.document.run
        try:
            environment = rank_environment(start.document, start.member, rank, self._settings)
            if run.command is None:
                task = rank_task(start.document, start.member, rank, self._settings)
                live = await self._server.fork(task, environment)
            else:
                everything = {**self._environment, **environment}
                live = await start_command(rank, located(run.command, everything), everything)
        except (RankServerError, OSError, ValueError) as error:
            raise LaunchError(f"rank {rank} cannot be started: {error}") from error
        self._live[rank] = live
        supervisor = asyncio.create_task(supervise(live, start.document.generation, self._inbox, write_line))
        self._supervisors.add(supervisor)
        supervisor.add_done_callback(self._supervisors.discard)
        return live.pid

    def gone(self, rank: int) -> None:
        """The process of `rank` ended."""
        self._live.pop(rank, None)

    def terminate(self, ranks: Iterable[int]) -> None:
        """Ask these ranks to stop."""
        for rank in ranks:
            if rank in self._live:
                self._live[rank].terminate()

    def kill(self, ranks: Iterable[int]) -> None:
        """End these ranks at once."""
        for rank in ranks:
            if rank in self._live:
                self._live[rank].kill()

    async def close(self) -> None:
        """Leave no process behind."""
        self.kill(list(self._live))
        if self._supervisors:
            await asyncio.wait(self._supervisors, timeout=CLEAN_UP_SECONDS)
        await self._server.stop()
        self._port.release()


def write_line(line: str) -> None:
    """One line into the pod's log."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
