"""Attention and its gradients on the device, against the same in fp64."""

from __future__ import annotations

import pytest
import torch

from meshwright.api.parallelism import ContextMethod
from meshwright.sequence_sharding import SequenceSharding
from meshwright_worker.data.batch import TokenMetadata
from meshwright_worker.models.attention import AttentionCore, needs_equal_head_sizes
from meshwright_worker.parallel.context import varlen_kernels
from meshwright_worker.parallel.context.attention_blocks import Shape, blocks_of
from meshwright_worker.parallel.context.attention_kernels import attend, attend_backward
from meshwright_worker.parallel.context.context_parallel import AllGatherAttentionCore
from meshwright_worker.parallel.context.varlen_attention import VARLEN_KERNELS
from meshwright_worker.parallel.context.varlen_kernels import VarlenCall
from meshwright_worker.parallel.context.varlen_segments import varlen_blocks

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
    """The largest, relative to the largest element. That is 0 for scores' gradients of a softmax over one key: then the
    error is relative to 1, the size of the inputs.
    """
    return float((got.double() - want).abs().max()) / (float(want.abs().max()) or 1.0)


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


@pytest.mark.parametrize("used", Shape)
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_of_context_parallelism_equal_fp64(device: torch.device, shape: str, used: Shape) -> None:
    query, key, value, gradient = (tensor.transpose(1, 2) for tensor in tensors(device, *SHAPES[shape]))
    scale = query.shape[-1] ** -0.5

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        parts = [tensor.to(dtype) for tensor in (query, key, value)]
        attended, lse = attend(*parts, shape=used, scale=scale)
        gradients = attend_backward(gradient.to(dtype), *parts, attended.to(dtype), lse, shape=used, scale=scale)
        return [attended, lse, *gradients]

    for name, got, want in zip(
        ("output", "lse", "query", "key", "value"), run(torch.bfloat16), run(torch.float64), strict=True
    ):
        assert got.shape == want.shape
        assert error(got, want) <= BF16, name


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("window", [1, 50, 130])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sliding_window_equals_fp64(device: torch.device, shape: str, window: int, varlen: bool) -> None:
    inputs = tensors(device, *SHAPES[shape])
    rows = torch.repeat_interleave(torch.arange(2), torch.tensor([150, 43])).expand(2, -1)
    metadata = TokenMetadata(documents=rows.to(device), row_documents=rows) if varlen else TokenMetadata()
    core = AttentionCore(window=window)
    blocks = AllGatherAttentionCore(SequenceSharding(), None, core, varlen=varlen)
    want = outputs(core, inputs, torch.float64, metadata)
    got = outputs(blocks, inputs, torch.bfloat16, metadata)
    for name, one, two in zip(("output", "query", "key", "value"), got, want, strict=True):
        assert error(one, two) <= BF16, name


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("documents", [[70, 1, 122], [193], [1] * 193], ids=["several", "one", "of one token"])
@pytest.mark.parametrize("shape", SHAPES)
def test_varlen_attention_equals_fp64(
    device: torch.device,
    shape: str,
    documents: list[int],
    deterministic: bool,
    causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of packed documents in one call of the varlen kernel: the other way to compute them is taken away."""
    inputs = tensors(device, *SHAPES[shape])
    rows = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents)).expand(2, -1)
    metadata = TokenMetadata(documents=rows.to(device), row_documents=rows)
    core = AttentionCore(causal=causal)
    varlen = AllGatherAttentionCore(SequenceSharding(), None, core, varlen=True)
    want = outputs(core, inputs, torch.float64, metadata)
    monkeypatch.setattr(varlen_kernels, "OnlineSoftmax", None)
    monkeypatch.setattr(varlen_kernels, "AttentionGradients", None)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        got = outputs(varlen, inputs, torch.bfloat16, metadata)
        again = outputs(varlen, inputs, torch.bfloat16, metadata)
    finally:
        torch.use_deterministic_algorithms(before)
    for name, one, two in zip(("output", "query", "key", "value"), got, want, strict=True):
        assert one.dtype is torch.bfloat16
        assert error(one, two) <= BF16, name
    if deterministic:
        assert all(torch.equal(one, two) for one, two in zip(got, again, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", [ContextMethod.RING, ContextMethod.RING_ZIG_ZAG], ids=str)
def test_turns_of_varlen_attention_merge_to_fp64(device: torch.device, shape: str, method: ContextMethod) -> None:
    """Every rank's queries against every rank's keys, as in a ring: gathered tokens, log-sum-exps, part gradients."""
    inputs = tensors(device, *SHAPES[shape])
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor([70, 1, 122])).expand(2, -1)
    want = outputs(AttentionCore(), inputs, torch.float64, TokenMetadata(documents=documents.to(device)))
    query, key, value, gradient = (tensor.to(torch.bfloat16) for tensor in inputs)
    scale = query.shape[-1] ** -0.5
    slices = SequenceSharding(method, 4).slices(193)
    held = [torch.cat([torch.arange(part.start, part.stop) for part in of_rank]) for of_rank in slices]
    key_grad, value_grad = (torch.zeros(x.shape, device=device) for x in (key, value))
    for own, at in zip(slices, held, strict=True):
        turns = [
            (
                [VarlenCall.of(one, device) for one in varlen_blocks(blocks, len(at), len(of))],
                of,
            )
            for other, of in zip(slices, held, strict=True)
            for blocks in [blocks_of(own, other, causal=True, documents=documents.numpy())]
        ]
        turns.sort(key=lambda turn: turn[1] is not at)
        softmax = VARLEN_KERNELS.softmax(query[:, at], value.shape[-1], scale)
        for calls, of in turns:
            softmax.add(key[:, of], value[:, of], calls)
        attended, lse = softmax.result()
        assert error(attended, want[0][:, at]) <= BF16
        gradients = VARLEN_KERNELS.gradients(gradient[:, at], query[:, at], attended, lse, scale)
        for calls, of in turns:
            for whole, part in zip((key_grad, value_grad), gradients.add(key[:, of], value[:, of], calls), strict=True):
                whole[:, of] += part
        assert error(gradients.query_grad, want[1][:, at]) <= BF16
    assert error(key_grad, want[2]) <= BF16
    assert error(value_grad, want[3]) <= BF16


def outputs(
    core: AttentionCore, inputs: list[torch.Tensor], dtype: torch.dtype, metadata: TokenMetadata
) -> list[torch.Tensor]:
    leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in inputs[:3]]
    attended = core(*leaves, metadata)
    return [attended.detach(), *torch.autograd.grad(attended, leaves, inputs[3].to(dtype))]
