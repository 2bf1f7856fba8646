"""Sends of asynchronous tensor parallelism are under way while a rank multiplies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F

from meshwright_worker.distributed.collectives import RingTransfer
from meshwright_worker.distributed.mesh import TENSOR, join_mesh
from meshwright_worker.parallel.tensor import async_tensor_parallel
from meshwright_worker.parallel.tensor.async_tensor_parallel import Ring
from meshwright_worker.rank.task import RankTask
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool


def trace_both(task: RankTask) -> tuple[list[str], list[str], torch.Tensor]:
    """What a rank does in turn to gather, and to add up; and its own part of the sum."""
    trace: list[str] = []

    class Traced(RingTransfer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            trace.append("starts")

        def wait(self) -> Sequence[torch.Tensor]:
            trace.append("ends")
            return super().wait()

    def product(rank: int, part: torch.Tensor) -> torch.Tensor:
        trace.append(f"product {rank}")
        return F.linear(part, torch.ones(1, 3))

    with patch.object(async_tensor_parallel, "RingTransfer", Traced), join_mesh(task) as mesh:
        ring = Ring(mesh.group(TENSOR))
        gathered = [product(rank, part) for rank, part in ring.each(torch.ones(1, 2, 3))]
        first, trace[:] = trace.copy(), []
        own = ring.ring_reduce(lambda rank: product(rank, gathered[0].expand(1, 2, 3) * (rank + 1)))
        return first, trace.copy(), own


def test_products_run_between_the_beginning_and_the_end_of_a_send(pool: RankPool) -> None:
    for rank, (gathered, added, own) in enumerate(pool.run(trace_both, small_run(tensor=3))):
        turns = [(rank - turn) % 3 for turn in range(3)]
        assert gathered == [
            *("starts", f"product {turns[0]}", "ends"),
            *("starts", f"product {turns[1]}", "ends"),
            f"product {turns[2]}",
        ]
        turns = [(rank - 1 - turn) % 3 for turn in range(3)]
        assert added == [
            f"product {turns[0]}",
            *("starts", f"product {turns[1]}", "ends"),
            *("starts", f"product {turns[2]}", "ends"),
        ]
        # Of ones: 3 a product, 9 times the place of the rank in another one, on 3 ranks.
        assert torch.equal(own, torch.full((1, 2, 1), 27.0 * (rank + 1)))
