"""A pool of rank processes that run many cases: starting a rank costs seconds, a case costs tenths."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from meshwright.protocol import RunConfig
from meshwright_worker.task import RankTask


class RankFailedError(AssertionError):
    """A rank raised; the message holds every rank's traceback."""


@dataclass(frozen=True)
class Last:
    """The answer of a rank whose process then ends, as an agent's rank does after a failure."""

    value: Any


DEATH = Last("died")
"""The answer of a rank whose process ended without one."""

SILENCE = (False, "did not answer\n")


RUNS_OF_A_RANK = 25
"""Cases that a rank's process runs: torch's caches keep some of their process groups, whose threads add up."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tasks_of(run: RunConfig, checkpoint_dir: str | None = None, data_dir: str | None = None) -> list[RankTask]:
    world = run.layout.world_size
    port = free_port()
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
        # DTensor takes two meshes of the same ranks for one, and would use the groups of the one that is gone.
        _clear_sharding_prop_cache()


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
        self._context = multiprocessing.get_context("forkserver")
        # What torch imports at first use would be imported by every rank again.
        self._context.set_forkserver_preload(["tests.distributed.preloaded"])
        self._ranks: list[tuple[Any, Connection]] = []
        self._runs = 0

    def run(
        self,
        function: Callable[..., Any],
        run: RunConfig,
        *arguments: Any,
        checkpoint_dir: object = None,
        data_dir: object = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """`function(task, *arguments)` on every rank of the run; the answers by rank."""
        tasks = tasks_of(run, str(checkpoint_dir) if checkpoint_dir else None, str(data_dir) if data_dir else None)
        self._runs += 1
        if self._runs > RUNS_OF_A_RANK:
            self.close()
            self._runs = 1
        while len(self._ranks) < len(tasks):
            self._start()
        for task, (_, connection) in zip(tasks, self._ranks, strict=False):
            connection.send((function, (task, *arguments)))
        answers = []
        for _, (_, connection) in zip(tasks, self._ranks, strict=False):
            # A rank whose peers failed may wait for them: once one has failed, the others get a little longer.
            failed = any(not good for good, _ in answers)
            answers.append(_answer(connection, 2 if failed else timeout or self._timeout))
        self._forget([rank for (_, last), rank in zip(answers, self._ranks, strict=False) if isinstance(last, Last)])
        if SILENCE in answers:
            self.close()
        failures = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(answers) if not good]
        if failures:
            raise RankFailedError("\n".join(failures))
        return [answer for _, answer in answers]

    def _forget(self, ended: list[tuple[Any, Connection]]) -> None:
        for process, connection in ended:
            process.join()
            connection.close()
            self._ranks.remove((process, connection))

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._ranks.append((process, ours))

    def close(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            process.kill()
            process.join()
        self._ranks = []
