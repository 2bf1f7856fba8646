"""Attention and its gradients on the device, against the same in fp64."""

from __future__ import annotations

import pytest
import torch

from meshwright_worker.data.batch import TokenMetadata
from meshwright_worker.models.attention import AttentionCore, needs_equal_head_sizes
from meshwright_worker.parallel.context.attention_kernels import attend, attend_backward

BF16 = 2e-2
"""Largest error of a result in bf16, relative to the largest element: 8 bits, and sums of a few hundred products."""
SHAPES = {
    "equal heads": (4, 4, 64, 64),
    "grouped heads": (8, 2, 128, 128),
    "latent attention": (4, 4, 192, 128),
    "heads of 40": (4, 2, 40, 40),
}
"""(query heads, key and value heads, key size, value size)."""


def tensors(device: torch.device, heads: int, kv_heads: int, size: int, value_size: int) -> list[torch.Tensor]:
    """Query, key, value and the output's gradient, [batch, length, heads, size], in fp64."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(heads, size), (kv_heads, size), (kv_heads, value_size), (heads, value_size)]
    drawn = [torch.randn(2, 193, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(torch.bfloat16).double().to(device) for tensor in drawn]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).abs().max() / want.abs().max())


def with_gradients(inputs: list[torch.Tensor], dtype: torch.dtype, metadata: TokenMetadata) -> list[torch.Tensor]:
    leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in inputs[:3]]
    core = AttentionCore()
    core.pads_values = needs_equal_head_sizes(
        inputs[0].device, deterministic=torch.are_deterministic_algorithms_enabled()
    )
    attended = core(*leaves, metadata)
    attended.backward(inputs[3].to(dtype))
    return [attended.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ragged", [False, True])
def test_attention_equals_fp64(device: torch.device, shape: str, ragged: bool, deterministic: bool) -> None:
    inputs = tensors(device, *SHAPES[shape])
    documents = torch.zeros(2, 193, dtype=torch.int64, device=device)
    documents[:, 70:] = 1
    documents[1, 71:] = 2
    metadata = TokenMetadata(documents=documents if ragged else None)
    want = with_gradients(inputs, torch.float64, metadata)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        got = with_gradients(inputs, torch.bfloat16, metadata)
        again = with_gradients(inputs, torch.bfloat16, metadata)
    finally:
        torch.use_deterministic_algorithms(before)
    for name, one, two in zip(("output", "query", "key", "value"), got, want, strict=True):
        assert error(one, two) <= BF16, name
    if deterministic:
        assert all(torch.equal(one, two) for one, two in zip(got, again, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_of_context_parallelism_equal_fp64(device: torch.device, shape: str, causal: bool) -> None:
    query, key, value, gradient = (tensor.transpose(1, 2) for tensor in tensors(device, *SHAPES[shape]))
    scale = query.shape[-1] ** -0.5

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        parts = [tensor.to(dtype) for tensor in (query, key, value)]
        attended, lse = attend(*parts, causal=causal, scale=scale)
        gradients = attend_backward(gradient.to(dtype), *parts, attended.to(dtype), lse, causal=causal, scale=scale)
        return [attended, lse, *gradients]

    for name, got, want in zip(
        ("output", "lse", "query", "key", "value"), run(torch.bfloat16), run(torch.float64), strict=True
    ):
        assert got.shape == want.shape
        assert error(got, want) <= BF16, name
