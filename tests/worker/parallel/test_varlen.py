"""Attention of packed documents by a varlen kernel: which scores it computes, and that they are those of a mask."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.sequence_sharding import SequenceSharding, size
from meshwright_worker.data.batch import TokenMetadata
from meshwright_worker.memory.activation_checkpointing import selective_checkpoint
from meshwright_worker.models.attention import AttentionCore
from meshwright_worker.parallel.context import online_softmax, varlen_attention, varlen_kernels
from meshwright_worker.parallel.context.attention_blocks import Shape, blocks_of
from meshwright_worker.parallel.context.context_parallel import AllGatherAttentionCore
from meshwright_worker.parallel.context.varlen_kernels import KernelFacts, VarlenCall, has_varlen_kernel
from meshwright_worker.parallel.context.varlen_segments import VarlenBlocks, varlen_blocks
from tests.worker.parallel.test_context import DEALS, positions_of

HEADS = {"equal heads": (4, 4, 8, 8), "grouped heads": (6, 2, 8, 8), "latent attention": (4, 4, 12, 8)}
"""(query heads, key and value heads, key size, value size)."""
LENGTH = 16
DOCUMENTS = {
    "several": [[0] * 5 + [1] * 1 + [2] * 10, [0] * 3 + [1] * 7 + [2] * 6],
    "one": [[0] * LENGTH] * 2,
    "of one token": [list(range(LENGTH))] * 2,
    "some empty": [[2] * 5 + [3] * 4 + [9] * 7, [0] * 8 + [5] * 8],
}
"""By row, the document of each token."""
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
FACTS = KernelFacts("cuda", (9, 0), torch.bfloat16, 128, (2, 13), flash_built=True)


def pairs(calls: list[VarlenBlocks], queries: int, keys: int) -> np.ndarray:
    """How often each score is computed, [queries of all rows, keys of all rows]."""
    seen = np.zeros((queries, keys), dtype=int)
    for call in calls:
        for segment in call.segments:
            count, other = len(segment.queries), len(segment.keys)
            shape = np.ones((count, other), int)
            part = np.ix_(segment.queries, segment.keys)
            seen[part] += np.tril(shape, other - count) if call.causal else shape
    return seen


@given(DEALS, st.booleans(), st.integers(0, 20), st.integers(0, 30), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_a_call_computes_the_scores_that_count_each_once(
    deal: SequenceSharding, causal: bool, more: int, window: int, seed: int
) -> None:
    length = deal.min_length + more * deal.unit
    draw = np.random.default_rng(seed)
    documents = np.cumsum(draw.random((2, length)) < draw.random(), axis=1)
    index = np.arange(length)
    want = documents[:, :, None] == documents[:, None, :]
    if causal:
        want = want & (index[:, None] >= index[None, :])
        want = want & (index[:, None] - index[None, :] < (window or length))
    for own in deal.slices(length):
        for other in (*deal.slices(length), (range(length),)):
            blocks = blocks_of(own, other, causal=causal, documents=documents, window=window if causal else 0)
            calls = varlen_blocks(blocks, size(own), size(other))
            assert len(calls) <= (5 if causal and window else 1), "a turn needs one launch"
            at, of = positions_of(own), positions_of(other)
            seen = pairs(calls, 2 * len(at), 2 * len(of))
            for row in range(2):
                part = seen[row * len(at) : (row + 1) * len(at), row * len(of) : (row + 1) * len(of)]
                assert (part == want[row][at][:, of]).all()
            assert seen.sum() == want[:, at][:, :, of].sum() == sum(call.scores for call in calls)
            for call in calls:
                queries = [query for segment in call.segments for query in sorted(segment.queries)]
                assert queries == sorted(set(queries))


def drawn(shape: str, dtype: torch.dtype, documents: torch.Tensor) -> list[torch.Tensor]:
    """Query, key, value and the output's gradient."""
    heads, kv_heads, width, value_width = HEADS[shape]
    generator = torch.Generator().manual_seed(3)
    sizes = [(heads, width), (kv_heads, width), (kv_heads, value_width), (heads, value_width)]
    return [torch.randn(*documents.shape, *part, generator=generator, dtype=torch.float64).to(dtype) for part in sizes]


def with_gradients(core: AttentionCore, inputs: list[torch.Tensor], metadata: TokenMetadata) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    attended = core(*leaves, metadata)
    return [attended.detach(), *torch.autograd.grad(attended, leaves, inputs[3])]


def varlen(core: AttentionCore) -> AttentionCore:
    return AllGatherAttentionCore(SequenceSharding(), None, core, varlen=True)


def packed(name: str) -> tuple[torch.Tensor, TokenMetadata]:
    documents = torch.tensor(DOCUMENTS[name])
    return documents, TokenMetadata(documents=documents, row_documents=documents)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_rank_computes_what_a_mask_does(dtype: torch.dtype, name: str, shape: str, causal: bool) -> None:
    documents, metadata = packed(name)
    inputs = drawn(shape, dtype, documents)
    core = AttentionCore(causal=causal)
    for got, want in zip(
        with_gradients(varlen(core), inputs, metadata), with_gradients(core, inputs, metadata), strict=True
    ):
        assert got.dtype is dtype
        assert got.shape == want.shape
        assert float((got - want).abs().max()) <= TOLERANCE[dtype] * max(1.0, float(want.abs().max()))


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of scores of each call of a kernel, of one head."""
    counted: list[int] = []
    attend = online_softmax.attend

    def counting(query: torch.Tensor, key: torch.Tensor, *rest: Any, shape: Shape, scale: float) -> Any:
        rows, queries, keys = query.shape[0], query.shape[2], key.shape[2]
        counted.append(rows * (queries * keys if shape is Shape.FULL else queries * (queries + 1) // 2))
        return attend(query, key, *rest, shape=shape, scale=scale)

    monkeypatch.setattr(online_softmax, "attend", counting)
    return counted


def test_work_is_the_squares_of_the_documents_lengths_and_no_mask_is_stored(scores: list[int]) -> None:
    lengths = (300, 4, 160, 48)
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).unsqueeze(0)
    metadata = TokenMetadata(documents=documents, row_documents=documents)
    inputs = drawn("grouped heads", torch.float32, documents)
    total = sum(lengths)
    for causal in (True, False):
        del scores[:]
        core = AttentionCore(causal=causal)
        with LargestTensor() as tensors:
            with_gradients(varlen(core), inputs, metadata)
        assert sum(scores) == sum(n * (n + 1) // 2 if causal else n * n for n in lengths)
        assert sum(scores) < 0.5 * (total * (total + 1) // 2 if causal else total * total)
        assert tensors.largest < total * total
        with LargestTensor() as tensors:
            with_gradients(core, inputs, metadata)
        assert tensors.largest >= total * total


@pytest.mark.parametrize(
    ("changes", "there"),
    [
        ({}, True),
        ({"dtype": torch.float16, "head_size": 256, "capability": (8, 0)}, True),
        ({"capability": (8, 9), "head_size": 192}, True),
        ({"capability": (8, 9), "head_size": 200}, False),
        ({"capability": (12, 0), "head_size": 256}, False),
        ({"head_size": 257}, False),
        ({"dtype": torch.float32}, False),
        ({"capability": (7, 5)}, False),
        ({"device": "cpu", "capability": (0, 0)}, False),
        ({"flash_built": False}, False),
        ({"version": (2, 10)}, False),
        ({"version": (2, 11)}, True),
        ({"segments": 65_535}, True),
        ({"segments": 65_536}, False),
    ],
)
def test_which_kernel_depends_on_the_device_and_the_numbers(changes: dict[str, Any], there: bool) -> None:
    assert has_varlen_kernel(FACTS._replace(**changes)) is there


def flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_ends: torch.Tensor, key_ends: torch.Tensor,
    longest_query: int, longest_key: int, dropout: float, causal: bool, debug: bool, *, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The operator's contract in plain torch: what CUDA's kernel takes and returns."""
    assert dropout == 0.0
    assert not debug
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    assert query_ends.dtype == key_ends.dtype == torch.int32
    assert (query_ends[-1], key_ends[-1]) == (len(query), len(key))
    assert longest_query >= max(2, query_ends.diff().max())
    assert longest_key == key_ends.diff().max()
    for x in (query, key, value):
        assert x.stride(-1) == 1
        assert all(step * x.element_size() % 16 == 0 for step in (*x.stride()[:-1], x.storage_offset()))
    outputs, sums = [], []
    groups = query.shape[1] // key.shape[1]
    borders = zip(pairwise(query_ends.tolist()), pairwise(key_ends.tolist()), strict=True)
    for (first, last), (first_key, last_key) in borders:
        one, other, values = (
            x.transpose(0, 1)
            for x in (
                query[first:last],
                key[first_key:last_key].repeat_interleave(groups, 1),
                value[first_key:last_key].repeat_interleave(groups, 1),
            )
        )
        products = one @ other.mT * scale
        if causal:
            hidden = torch.ones(products.shape[-2:], dtype=torch.bool).triu(last_key - first_key - last + first + 1)
            products = products.masked_fill(hidden, float("-inf"))
        outputs.append((products.softmax(-1) @ values).transpose(0, 1))
        sums.append(products.logsumexp(-1))
    return torch.cat(outputs), torch.cat(sums, dim=1)


def flash_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attended: torch.Tensor,
    lse: torch.Tensor, *rest: Any, scale: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The gradients of a softmax over these keys only, whose output and sums must therefore be those given."""
    *borders, dropout, causal, state, unused = rest
    assert state.dtype is torch.uint64
    assert unused.numel() == 0
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    with torch.enable_grad():
        again, sums = flash_forward(*leaves, *borders, dropout, causal, False, scale=scale)
    torch.testing.assert_close(again, attended)
    torch.testing.assert_close(sums, lse)
    return torch.autograd.grad(again, leaves, gradient)


def inside_of_wider(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as a part of a wider tensor, behind one number and a row of another width."""
    wider = x.new_empty((*x.shape[:-1], x.shape[-1] + 3))
    wider[..., 1:-2] = x
    return wider[..., 1:-2]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [*HEADS, "heads of 5", "parts of wider tensors"])
@pytest.mark.parametrize("name", ["several", "of one token"])
def test_what_the_kernel_of_gpus_is_given(name: str, shape: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a kernel in plain torch: sizes are padded and cut, and all documents are in one call."""
    monkeypatch.setitem(HEADS, "heads of 5", (4, 2, 5, 3))
    monkeypatch.setitem(HEADS, "parts of wider tensors", (4, 2, 8, 8))
    documents, metadata = packed(name)
    inputs = drawn(shape, torch.float64, documents)
    if shape == "parts of wider tensors":
        inputs = [inside_of_wider(x) for x in inputs]
    core = AttentionCore(causal=causal)
    want = with_gradients(core, inputs, metadata)
    calls = []

    def counted(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(args[0].shape)
        return flash_forward(*args, **kwargs)

    operators = SimpleNamespace(_flash_attention_forward=counted, _flash_attention_backward=flash_backward)
    monkeypatch.setattr(varlen_kernels, "_aten", operators)
    monkeypatch.setattr(varlen_kernels, "has_varlen_kernel", lambda facts: True)
    for got, expected in zip(with_gradients(varlen(core), inputs, metadata), want, strict=True):
        torch.testing.assert_close(got, expected)
    assert len(calls) == 1
    assert calls[0][0] == documents.numel()


def test_torchs_operators_take_these_arguments_and_return_these_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own shape functions, on tensors without memory."""
    monkeypatch.setattr(varlen_kernels, "has_varlen_kernel", lambda facts: True)
    device = torch.device("meta")
    documents = np.array(DOCUMENTS["several"])
    row = (range(LENGTH),)
    (blocks,) = varlen_blocks(blocks_of(row, row, causal=True, documents=documents), LENGTH, LENGTH)
    call = VarlenCall.of(blocks, device)
    shapes = ((4, 12), (2, 12), (2, 8), (4, 8))
    query, key, value, gradient = (
        torch.empty(documents.size, *shape, dtype=torch.bfloat16, device=device) for shape in shapes
    )
    attended, lse = varlen_kernels.attend_varlen(query, key, value, call, 0.3)
    assert (attended.shape, lse.shape, lse.dtype) == (gradient.shape, (4, documents.size), torch.float32)
    parts = varlen_kernels.attend_varlen_backward(gradient, query, key, value, attended, lse, call, 0.3)
    assert [part.shape for part in parts] == [query.shape, key.shape, value.shape]


class Operators(TorchDispatchMode):
    """Counts operators that compute or move something, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def without_memory(documents: torch.Tensor) -> tuple[list[torch.Tensor], TokenMetadata]:
    """Query, key, value and the output's gradient in bf16, of grouped heads, and the metadata."""
    inputs = [x.to("meta") for x in drawn("grouped heads", torch.bfloat16, documents)]
    return inputs, TokenMetadata(documents=documents, row_documents=documents)


def test_operators_do_not_grow_with_the_number_of_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_kernels, "has_varlen_kernel", lambda facts: True)

    def operators(count: int, *, one_call: bool) -> Counter[str]:
        inputs, metadata = without_memory(torch.arange(64).expand(2, -1) * count // 64)
        core = AllGatherAttentionCore(SequenceSharding(), None, AttentionCore(), varlen=one_call)
        with Operators() as watched:
            with_gradients(core, inputs, metadata)
        return watched.counts

    few, many = operators(2, one_call=True), operators(32, one_call=True)
    assert few == many
    assert many["_flash_attention_forward"] == many["_flash_attention_backward"] == 1
    assert operators(32, one_call=False).total() > 10 * many.total()


def test_selective_checkpointing_keeps_the_kernels_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_kernels, "has_varlen_kernel", lambda facts: True)
    inputs, metadata = without_memory(torch.tensor(DOCUMENTS["several"]))
    core = varlen(AttentionCore())
    run = selective_checkpoint(lambda query, places: core(query, *inputs[1:3], places))
    leaf = inputs[0].clone().requires_grad_()
    with Operators() as watched:
        run(leaf, metadata).backward(inputs[3])
    assert watched.counts["_flash_attention_forward"] == watched.counts["_flash_attention_backward"] == 1


def test_merging_leaves_the_kernels_results_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be kept by checkpointing for the backward pass, which merges them again."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keeping(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        results = varlen_kernels.attend_varlen(*args)
        kept.extend((x, x.clone()) for x in results)
        return results

    monkeypatch.setattr(varlen_attention, "attend_varlen", keeping)
    documents = torch.tensor(DOCUMENTS["one"])
    query, key, value, _ = drawn("grouped heads", torch.bfloat16, documents)
    own, other = (range(8, LENGTH),), (range(8),)
    softmax = varlen_attention.VARLEN_KERNELS.softmax(query[:, 8:], value.shape[-1], 0.3)
    for part, held in ((own, slice(8, LENGTH)), (other, slice(0, 8))):
        blocks = blocks_of(own, part, causal=True, documents=documents.numpy())
        calls = [VarlenCall.of(call, query.device) for call in varlen_blocks(blocks, 8, 8)]
        softmax.add(key[:, held], value[:, held], calls)
    assert len(kept) == 4
    assert all(torch.equal(now, before) for now, before in kept)
