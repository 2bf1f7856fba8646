"""A pool of rank processes that run many cases: starting a rank costs seconds, a case costs tenths."""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from meshwright.protocol.run_config import NativeRun
from meshwright_local.nodeagent.network import ports
from meshwright_worker.rank.task import RankTask
from tests.distributed.mesh_cache import can_be_kept, forget_sharding, keeps_meshes, leave
from tests.distributed.staged_backend import ASKED, use_staged_backend
from tests.patience import patient


class RankFailedError(AssertionError):
    """A rank raised; the message holds every rank's traceback."""


@dataclass(frozen=True)
class Last:
    """The answer of a rank whose process then ends, as an agent's rank does after a failure."""

    value: Any


DEATH = Last("died")
"""The answer of a rank whose process ended without one."""

SILENCE = (False, "did not answer\n")


RUNS_OF_A_RANK = 50
"""Cases that a rank's process runs: torch's caches keep some of their process groups, whose threads add up."""

RUNS_OF_MESHES = 8
"""Cases for which ranks keep their meshes: pipelines form groups of their own for each, whose threads add up too."""


def free_port() -> int:
    """A port that is free on every address."""
    return ports.free_port("")


def tasks_of(
    run: NativeRun, checkpoint_dir: str | None = None, data_dir: str | None = None, *, port: int
) -> list[RankTask]:
    world = run.layout.world_size
    return [
        RankTask(
            run=run,
            generation=1,
            rank=rank,
            world_size=world,
            local_rank=rank,
            local_world_size=world,
            worker=0,
            master_address="127.0.0.1",
            master_port=port,
            pod_address="127.0.0.1",
            checkpoint_dir=checkpoint_dir,
            data_dir=data_dir,
        )
        for rank in range(world)
    ]


def _serve(connection: Connection) -> None:
    if ASKED:
        use_staged_backend(ASKED)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = (True, function(*arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)
        if isinstance(answer[1], Last):
            os._exit(0)
        # Modules and their hooks are cycles that keep process groups alive, whose threads spin once a peer is gone.
        del answer
        gc.collect()
        if not keeps_meshes(function):
            forget_sharding()


def _answer(connection: Connection, timeout: float) -> tuple[bool, Any]:
    if not connection.poll(timeout):
        return SILENCE
    try:
        answer: tuple[bool, Any] = connection.recv()
    except EOFError:
        return True, DEATH
    return answer


class RankPool:
    """Grows to the largest world asked for; each case uses the first ranks."""

    def __init__(self, timeout: float = 120) -> None:
        self._timeout = timeout
        self.context = multiprocessing.get_context("forkserver")
        # What torch imports at first use would be imported by every rank again.
        self.context.set_forkserver_preload(["tests.distributed.rank_preload"])
        self._ranks: list[tuple[Any, Connection]] = []
        self._runs = 0
        self._kept: tuple[int, int] | None = None
        """World size and port of the ranks that keep their meshes; a size of 0 when no other run may use them."""
        self._kept_for = 0

    def run(
        self,
        function: Callable[..., Any],
        run: NativeRun,
        *arguments: Any,
        checkpoint_dir: object = None,
        data_dir: object = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """`function(task, *arguments)` on every rank of the run; the answers by rank.

        A function that keeps meshes finds those of the last run, if that had as many ranks and kept them too.
        """
        self._runs += 1
        if self._runs > RUNS_OF_A_RANK:
            self.close()
            self._runs = 1
        keeps, directories = (
            keeps_meshes(function),
            [str(directory) if directory else None for directory in (checkpoint_dir, data_dir)],
        )
        self._start_up_to(run.layout.world_size)
        # After the ranks have started, which can take seconds: meanwhile another process could take the port.
        tasks = tasks_of(run, *directories, port=self._port(run, keeps=keeps))
        for task, (_, connection) in zip(tasks, self._ranks, strict=False):
            connection.send((function, (task, *arguments)))
        answers = []
        for _, (_, connection) in zip(tasks, self._ranks, strict=False):
            # A rank whose peers failed may wait for them: once one has failed, the others get a little longer.
            failed = any(not good for good, _ in answers)
            answers.append(_answer(connection, 2 if failed else patient(timeout or self._timeout)))
        self._forget([rank for (_, last), rank in zip(answers, self._ranks, strict=False) if isinstance(last, Last)])
        if SILENCE in answers or (keeps and any(not good or isinstance(answer, Last) for good, answer in answers)):
            self.close()
        failures = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(answers) if not good]
        if failures:
            raise RankFailedError("\n".join(failures))
        return [answer for _, answer in answers]

    def _port(self, run: NativeRun, *, keeps: bool) -> int:
        """Where the ranks of a run meet: where they are connected already, if that serves the run."""
        world = run.layout.world_size if can_be_kept(run) else 0
        self._kept_for += 1
        serves = self._kept is not None and self._kept[0] == world and self._kept_for < RUNS_OF_MESHES
        if self._kept is not None and not (keeps and world and serves):
            for _, connection in self._ranks:
                connection.send((leave, ()))
            for _, connection in self._ranks:
                _answer(connection, self._timeout)
            self._kept, self._kept_for = None, 0
        port = self._kept[1] if self._kept else free_port()
        if keeps:
            self._kept = (world, port)
        return port

    def _forget(self, ended: list[tuple[Any, Connection]]) -> None:
        for process, connection in ended:
            process.join()
            connection.close()
            self._ranks.remove((process, connection))

    def _start_up_to(self, count: int) -> None:
        """Start the ranks that are missing, and wait until they answer."""
        before = len(self._ranks)
        while len(self._ranks) < count:
            self._start()
        for _, connection in self._ranks[before:]:
            connection.send((leave, ()))
        for _, connection in self._ranks[before:]:
            _answer(connection, patient(self._timeout))

    def _start(self) -> None:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._ranks.append((process, ours))

    def close(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            process.kill()
            process.join()
        self._ranks, self._kept = [], None
