"""A case on ranks for what limits a step: ranks that compute slowly, a slow link, or data that is late."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from meshwright.protocol.messages import RankProcess
from meshwright_worker.agent.mesh_generation import MeshGeneration
from meshwright_worker.data.prefetch import Prefetcher
from meshwright_worker.models.layers import Linear
from meshwright_worker.rank import messages
from meshwright_worker.rank.task import RankTask, StepReport
from meshwright_worker.trainer.train import train
from tests.distributed.cases import Recorder

COMPUTE, LINK, DATA = "compute", "link", "data"


def _late(original: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        time.sleep(seconds)
        return original(*arguments, **more)

    return call


def reported_times(
    task: RankTask[Any], slow: str, ranks: Collection[int], seconds: float
) -> tuple[RankProcess, list[StepReport]]:
    """Trains, and returns what this rank's agent reports about it, and its steps after the first.

    `slow` takes so much longer on these ranks: each product, each all-reduce of a group of two, or each batch.
    """
    recorder = Recorder()
    with ExitStack() as stack:
        if task.rank in ranks:
            owner, name = {COMPUTE: (Linear, "forward"), LINK: (dist, "all_reduce"), DATA: (Prefetcher, "take")}[slow]
            stack.enter_context(patch.object(owner, name, _late(getattr(owner, name), seconds)))
        train(task, recorder)
    generation = MeshGeneration(1, task.rank, 1, True, 0.0)
    generation.record_spawn(task.rank, 1, 0.0)
    for report in recorder.reports[1:]:
        generation.record_message(task.rank, messages.StepDone(report), 0.0, "2026-01-02T03:04:05Z")
    (process,) = generation.processes(0.0, lambda _: "")
    return process, recorder.reports[1:]
