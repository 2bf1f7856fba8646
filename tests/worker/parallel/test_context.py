"""How rows are cut for a context group, and which scores are left: decisions that need no rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.api.parallelism import ContextMethod
from meshwright.sequence_sharding import SequenceSharding, TokenSlice, size
from meshwright_worker.data.batch import Batch, TokenMetadata
from meshwright_worker.models.attention import AttentionCore
from meshwright_worker.parallel.context.attention_blocks import AttentionBlock, Shape, blocks_of
from meshwright_worker.parallel.context.attention_kernels import attend, attend_backward
from meshwright_worker.parallel.context.context_parallel import AllGatherAttentionCore, context_slice

DEALS = st.builds(
    SequenceSharding,
    method=st.sampled_from([m for m in ContextMethod if m is not ContextMethod.RING_ULYSSES]),
    ranks=st.integers(1, 6),
    unit=st.integers(1, 3),
) | st.builds(
    lambda rings, inner, unit: SequenceSharding(ContextMethod.RING_ULYSSES, rings * inner, unit, inner),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
)


def positions_of(part: TokenSlice) -> list[int]:
    return [position for positions in part for position in positions]


@given(DEALS, st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_every_token_is_dealt_once_in_parts_of_the_unit(deal: SequenceSharding, more: int) -> None:
    length = deal.min_length + more * deal.unit
    slices = deal.slices(length)
    dealt = [position for part in slices for position in positions_of(part)]
    assert len(slices) == deal.ranks
    assert sorted(dealt) == list(range(length))
    assert all(positions_of(part) == sorted(positions_of(part)) for part in slices)
    assert all(size(part) % deal.unit == 0 and size(part) > 0 for part in slices)


@given(DEALS)
@settings(max_examples=50, deadline=None)
def test_a_row_that_is_too_short_is_rejected(deal: SequenceSharding) -> None:
    with pytest.raises(ValueError, match="does not split"):
        deal.slices(deal.min_length - deal.unit)


def test_zig_zag_gives_every_rank_the_same_number_of_scores() -> None:
    def scores(method: ContextMethod) -> list[int]:
        slices = SequenceSharding(method, 4).slices(64)
        return [sum(b.scores for part in slices for b in blocks_of(own, part, causal=True)) for own in slices]

    zig_zag, consecutive = scores(ContextMethod.RING_ZIG_ZAG), scores(ContextMethod.RING)
    assert len(set(zig_zag)) == 1
    assert sum(zig_zag) == sum(consecutive) == 64 * 65 // 2
    assert max(consecutive) > 1.7 * max(zig_zag)


def covered(blocks: list[AttentionBlock], rows: int, queries: int, keys: int) -> np.ndarray:
    """How often each score is computed, [rows, queries, keys]."""
    seen = np.zeros((rows, queries, keys), dtype=int)
    for block in blocks:
        full = np.ones((block.queries.stop - block.queries.start, block.keys.stop - block.keys.start), int)
        part = full if block.shape is Shape.FULL else (np.tril if block.shape is Shape.LOWER else np.triu)(full)
        assert part.sum() == block.scores
        seen[block.rows, block.queries, block.keys] += part
    return seen


@given(DEALS, st.booleans(), st.booleans(), st.integers(0, 20), st.integers(0, 40), st.integers(0, 1000))
@settings(max_examples=200, deadline=None)
def test_blocks_are_the_scores_that_count_each_once(
    deal: SequenceSharding, causal: bool, packed: bool, more: int, window: int, seed: int
) -> None:
    length = deal.min_length + more * deal.unit
    draw = np.random.default_rng(seed)
    documents = np.cumsum(draw.random((2, length)) < 0.2, axis=1) if packed else np.zeros((2, length), int)
    index = np.arange(length)
    want = documents[:, :, None] == documents[:, None, :]
    if causal:
        want = want & (index[:, None] >= index[None, :])
        want = want & (index[:, None] - index[None, :] < (window or length))
    for own in deal.slices(length):
        for other in (*deal.slices(length), (range(length),)):
            blocks = blocks_of(
                own, other, causal=causal, documents=documents if packed else None, window=window if causal else 0
            )
            at, of = positions_of(own), positions_of(other)
            assert (covered(blocks, 2, len(at), len(of)) == want[:, at][:, :, of]).all()


def test_a_ring_turn_that_no_document_crosses_has_no_block() -> None:
    slices = SequenceSharding(ContextMethod.RING, 2).slices(16)
    documents = np.repeat([[0, 1]], 8, axis=1)
    assert blocks_of(slices[1], slices[0], causal=True, documents=documents) == []
    assert len(blocks_of(slices[1], slices[0], causal=True)) == 1


@pytest.mark.parametrize("value_size", [8, 4, 12])
@pytest.mark.parametrize("shape", Shape)
def test_a_block_and_its_gradient(shape: Shape, value_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, 8), (2, 8), (2, value_size))
    query, key, value = (
        torch.randn(2, heads, 5, width, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads, width in sizes
    )
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) * 0.3
    ones = torch.ones(5, 5, dtype=torch.bool)
    hidden = {Shape.LOWER: ones.triu(1), Shape.UPPER: ones.tril(-1), Shape.FULL: ~ones}[shape]
    scores = scores.masked_fill(hidden, float("-inf"))
    want = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    gradient = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    mixed, denominator = attend(query, key, value, shape=shape, scale=0.3)
    parts = attend_backward(gradient, query, key, value, mixed, denominator, shape=shape, scale=0.3)
    torch.testing.assert_close(mixed, want)
    torch.testing.assert_close(denominator, scores.logsumexp(-1))
    for got, expected in zip(parts, torch.autograd.grad(want, (query, key, value), gradient), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("window", [1, 3, 7, 19])
@pytest.mark.parametrize("packing", ["none", "blocks", "varlen"])
def test_a_sliding_window_of_one_rank_equals_a_mask(packing: str, window: int) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(3, 20, heads, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    documents = (torch.rand(3, 20, generator=generator) < 0.1).cumsum(1) if packing != "none" else None
    core = AttentionCore(window=window)
    masked = core(query, key, value, TokenMetadata(documents=documents))
    index = torch.arange(20)
    seen = (index.unsqueeze(1) >= index) & (index.unsqueeze(1) - index < window)
    if documents is not None:
        seen = seen & (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1)
    scores = query.transpose(1, 2) @ key.transpose(1, 2).repeat_interleave(2, 1).mT * 8**-0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    want = (weights @ value.transpose(1, 2).repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(masked, want)
    blocks = AllGatherAttentionCore(SequenceSharding(), None, core, varlen=packing == "varlen")(
        query, key, value, TokenMetadata(documents=documents, row_documents=documents)
    )
    torch.testing.assert_close(blocks, want)
    for got, expected in zip(
        torch.autograd.grad(blocks.square().sum(), (query, key, value)),
        torch.autograd.grad(want.square().sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(got, expected)


def test_packed_attention_of_one_rank_equals_a_mask() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(3, 20, heads, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    documents = (torch.rand(3, 20, generator=generator) < 0.25).cumsum(1)
    for causal in (True, False):
        core = AttentionCore(causal=causal)
        masked = core(query, key, value, TokenMetadata(documents=documents))
        apart = AllGatherAttentionCore(SequenceSharding(), None, core)(
            query, key, value, TokenMetadata(documents=documents, row_documents=documents)
        )
        torch.testing.assert_close(apart, masked)
        for got, want in zip(
            torch.autograd.grad(apart.square().sum(), (query, key, value)),
            torch.autograd.grad(masked.square().sum(), (query, key, value)),
            strict=True,
        ):
            torch.testing.assert_close(got, want)


def test_a_slice_has_positions_targets_and_the_documents_of_the_full_row() -> None:
    tokens = torch.arange(24).view(2, 12)
    batch = Batch(tokens, tokens + 1, documents=tokens // 6)
    own = context_slice(batch, SequenceSharding(ContextMethod.RING_ZIG_ZAG, 3), 1)
    assert own.tokens.tolist() == [[2, 3, 8, 9], [14, 15, 20, 21]]
    assert (own.targets == own.tokens + 1).all()
    assert own.positions is not None
    assert own.positions.tolist() == [[2, 3, 8, 9]] * 2
    assert own.row_length == 12
    assert own.row_documents is batch.documents
    (first, second) = own.chunk(2)
    assert second.token_metadata.row_documents is not None
    assert second.token_metadata.row_documents.tolist() == (tokens[1:] // 6).tolist()
    assert first.token_metadata.row_length == 12
