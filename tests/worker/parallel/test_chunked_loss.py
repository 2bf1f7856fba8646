"""The chunked loss against the loss of full logits."""

from __future__ import annotations

import pytest
import torch

from meshwright_worker.models.layers import Linear, TokenLoss
from meshwright_worker.parallel.tensor.cross_entropy import ChunkedLoss

TOKENS = 4096


@pytest.mark.parametrize("chunk", [TOKENS // 2, TOKENS])
def test_many_tokens_of_one_target_do_not_overflow_fp16(chunk: int) -> None:
    """No loss scale helps there, because it multiplies the sum over tokens: the run would end as diverged."""
    hidden = torch.full((1, TOKENS, 8), 40.0, dtype=torch.float16)
    output = Linear(8, 16)
    output.weight.data.zero_()
    targets = torch.zeros(1, TOKENS, dtype=torch.int64)
    gradients = []
    for loss in (TokenLoss()(output(hidden), targets), ChunkedLoss(chunk)(hidden, output, targets)):
        (loss / TOKENS).backward()
        assert output.weight.grad is not None
        gradients.append(output.weight.grad)
        output.weight.grad = None
    assert gradients[0].isfinite().all()
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-3)
