"""Dropout (Srivastava et al., 2014) whose mask depends only on the token, not on the rank or the order of computation.

A mask's bits are hashed from the run's seed, the layer, the token's index and the feature. A token gets the same mask
however its batch is split over replicas, micro-batches, stages or positions, and when a layer is recomputed; no mask is
saved for the backward pass. Nothing is dropped when no gradients are computed, as in an evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.api.training import TrainingSpec
from meshwright_worker.counter_rng import random_bits, stream_key, uniform
from meshwright_worker.data.batch import TokenMetadata
from meshwright_worker.models.attention import AttentionCore
from meshwright_worker.models.decoder import DecoderStage


class TokenDropout(nn.Module):
    """Dropout of the residual stream.

    Args:
        rate: probability that a number is set to 0; the others are scaled by 1 / (1 - rate).
        salt: a key of the run and of the place in the model.
        slices: number of ranks that split the positions of the stream (sequence parallelism); 1 if each has all.
        index: the index of this rank's slice.
    """

    def __init__(self, rate: float, salt: int, slices: int = 1, index: int = 0) -> None:
        super().__init__()
        self._rate = rate
        self._salt = salt
        self._slices = slices
        self._index = index

    def forward(self, x: torch.Tensor, token_metadata: TokenMetadata) -> torch.Tensor:
        """[batch, positions, width] -> the same shape."""
        if not (self.training and torch.is_grad_enabled()):
            return x
        tokens = _token_indices(token_metadata).chunk(self._slices, dim=1)[self._index]
        dropped: torch.Tensor = _Drop.apply(x, tokens, self._salt, self._rate)  # type: ignore[no-untyped-call]
        return dropped


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tokens: torch.Tensor, salt: int, rate: float) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.salt, ctx.rate = salt, rate
        return x * _mask(x, tokens, salt, rate)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (tokens,) = ctx.saved_tensors
        return gradients[0] * _mask(gradients[0], tokens, ctx.salt, ctx.rate), None, None, None


def _mask(x: torch.Tensor, tokens: torch.Tensor, salt: int, rate: float) -> torch.Tensor:
    features = torch.arange(x.shape[-1], device=x.device)
    bits = random_bits(features, random_bits(tokens, salt).unsqueeze(-1))
    return (uniform(bits) >= rate).to(x.dtype) / (1 - rate)


class DropoutAttention(AttentionCore):
    """Attention with dropout of its probabilities, which must be stored for that: [batch, heads, length, length].

    Args:
        rate: probability that a query does not attend to a key.
        salt: a key of the run and of the layer.
        first_head: index of this rank's first head in the layer.
        scale, window: see `AttentionCore`.
    """

    def __init__(self, rate: float, salt: int, first_head: int, *, scale: float | None = None, window: int = 0) -> None:
        super().__init__(scale=scale, window=window)
        self._rate = rate
        self._salt = salt
        self._first_head = first_head

    def forward(
        self, query: torch.Tensor, stream_key: torch.Tensor, value: torch.Tensor, token_metadata: TokenMetadata
    ) -> torch.Tensor:
        """See `AttentionCore.forward`."""
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(query, stream_key, value, token_metadata)
        groups = query.shape[2] // stream_key.shape[2]
        queries, keys, values = query.transpose(1, 2), stream_key.transpose(1, 2), value.transpose(1, 2)
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        visible = self._visible(query, token_metadata)
        if visible is None:
            visible = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool, device=query.device).tril()
        scores = queries @ keys.mT * (self.scale or query.shape[-1] ** -0.5)
        probabilities = F.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
        attended: torch.Tensor = (probabilities * self._keep_mask(scores, token_metadata)) @ values
        return attended.transpose(1, 2)

    def _keep_mask(self, scores: torch.Tensor, token_metadata: TokenMetadata) -> torch.Tensor:
        heads = torch.arange(self._first_head, self._first_head + scores.shape[1], device=scores.device)
        tokens = _token_indices(token_metadata).unsqueeze(1)
        rows = random_bits(tokens, random_bits(heads, self._salt).view(1, -1, 1))
        bits = random_bits(tokens.unsqueeze(2), rows.unsqueeze(-1))
        return (uniform(bits) >= self._rate).to(scores.dtype) / (1 - self._rate)


@dataclass(frozen=True)
class TensorSlice:
    """This rank's part in its tensor group."""

    rank: int = 0
    ranks: int = 1
    sequence: bool = False
    """Whether the positions of the residual stream are split."""


def apply_dropout(stage: DecoderStage, heads: int, training: TrainingSpec, part: TensorSlice) -> None:
    """Add a run's dropout to a stage in place; `heads` is the number of heads of a layer before splitting."""
    seed, rate = training.seed, training.dropout
    slices = (part.ranks, part.rank) if part.sequence else (1, 0)

    def residual(*place: str) -> TokenDropout:
        return TokenDropout(rate, stream_key(seed, "dropout", *place), *slices)

    if rate and stage.is_first:
        stage.embedding_dropout = residual("embedding")
    for number, block in stage.layers.items():
        if rate:
            block.attention_dropout = residual(number, "attention")
            block.feed_forward_dropout = residual(number, "feed-forward")
        if training.attention_dropout:
            salt, first = stream_key(seed, "dropout", number, "scores"), heads // part.ranks * part.rank
            attention = block.get_submodule("attention")
            core = attention.core
            assert isinstance(core, AttentionCore)
            attention.core = DropoutAttention(
                training.attention_dropout, salt, first, scale=core.scale, window=core.window
            )


def _token_indices(token_metadata: TokenMetadata) -> torch.Tensor:
    if token_metadata.token_indices is None:
        raise ValueError("dropout draws by the tokens' serial numbers: `Batch.token_indices` is required")
    return token_metadata.token_indices
