"""A function on every rank of a run, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from meshwright.protocol.run_config import NativeRun
from meshwright_worker.rank.task import RankTask
from tests.distributed.rank_pool import free_port, tasks_of


class RankError(RuntimeError):
    """A rank raised, or its process ended without an answer."""


def on_ranks(function: Callable[..., Any], run: NativeRun, *arguments: Any) -> list[Any]:
    """`function(task, *arguments)` on every rank; the answers by rank.

    Raises:
        RankError: a rank failed.
    """
    # A device's context does not outlive a fork, and what a run left on the device goes with its process.
    context = multiprocessing.get_context("spawn")
    ranks = []
    for task in tasks_of(run, port=free_port()):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(theirs, function, task, arguments), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        return [_answer(rank, connection) for rank, (_, connection) in enumerate(ranks)]
    finally:
        for process, connection in ranks:
            connection.close()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _answer(rank: int, connection: Connection) -> Any:
    try:
        good, answer = connection.recv()
    except EOFError:
        raise RankError(f"rank {rank} ended without an answer") from None
    if not good:
        raise RankError(f"rank {rank}:\n{answer}")
    return answer


def _rank(connection: Connection, function: Callable[..., Any], task: RankTask, arguments: tuple[Any, ...]) -> None:
    try:
        answer = (True, function(task, *arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    connection.send(answer)
