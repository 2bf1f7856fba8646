"""Replicas' running statistics put together are those of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright_worker.custom_module.batch_norm import _weights


@pytest.mark.parametrize("momentum", [None, 0.3, 1.0])
@pytest.mark.parametrize("tracked", [0, 3])
@pytest.mark.parametrize("counts", [[2, 1], [0, 2], [1, 0, 3], [0, 0]])
def test_shares_add_up_to_one_process(momentum: float | None, tracked: int, counts: list[int]) -> None:
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(4, momentum=momentum).double() for _ in range(len(counts) + 1)]
    before = torch.randn(4, dtype=torch.float64)
    for norm in norms:
        norm.running_mean = before.clone()
        norm.num_batches_tracked = torch.tensor(tracked)
    together, *apart = norms
    whole = torch.zeros(4, dtype=torch.float64)
    for rank, (norm, count) in enumerate(zip(apart, counts, strict=True)):
        for _ in range(count):
            batch = torch.randn(5, 4, dtype=torch.float64)
            norm(batch)
            together(batch)
        mine, taken = _weights(momentum, tracked, counts, rank)
        assert norm.running_mean is not None
        whole += mine * norm.running_mean - taken * before
    # A mean over no batch at all is none.
    if momentum is not None or tracked or sum(counts):
        torch.testing.assert_close(whole, together.running_mean, rtol=1e-12, atol=1e-14)
