"""The layers of a decoder: those of Llama (arXiv 2302.13971), and their counterparts in GPT, Qwen and DeepSeek.

Every layer computes in the format of its input and casts its fp32 parameters to it. Layers work on any part of their
parameters: head counts are read from the tensors, so the same code runs on all heads and on one rank's share of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwright.api.model_parts import Activation, Norm
from meshwright.models.architecture import Architecture
from meshwright_worker.data.batch import IGNORED, TokenMetadata
from meshwright_worker.models.rotary import RotaryEmbedding
from meshwright_worker.models.split_backward import linear
from meshwright_worker.precision.dtypes import WIDE_DTYPES, upcast


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter; its gradient flows to the parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Linear(nn.Linear):
    """A matrix product in the format of its input."""

    adds_bias = True
    """False if ranks compute parts of a sum: the bias is then added once, to the sum."""
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """Replaces the product of input and weight (`fp8`)."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        product = linear(x, self.weight) if self.product is None else self.product(x, self.weight)
        if self.bias is None or not self.adds_bias:
            return product
        return product + local(self.bias).to(x.dtype)


Products = Callable[[torch.Tensor, Sequence[Linear]], list[torch.Tensor]]
"""A function that multiplies one input with several linear layers: `multiply_separately`, or one that gathers the input
meanwhile.
"""


def multiply_separately(x: torch.Tensor, linears: Sequence[Linear]) -> list[torch.Tensor]:
    """[..., inputs] -> [..., outputs] of each layer."""
    return [linear(x) for linear in linears]


class TokenEmbedding(nn.Embedding):
    """One row per token. A rank whose rows start at `first_row` returns 0 for tokens of other ranks; ranks sum the
    results.
    """

    first_row = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, positions] -> [batch, positions, width]."""
        rows = local(self.weight)
        if rows.shape[0] == self.num_embeddings:
            return F.embedding(tokens, rows)
        local_tokens = tokens - self.first_row
        outside = (local_tokens < 0) | (local_tokens >= rows.shape[0])
        return F.embedding(local_tokens.masked_fill(outside, 0), rows).masked_fill(outside.unsqueeze(-1), 0.0)


class RMSNorm(nn.Module):
    """Division by the root mean square, computed in at least fp32 (arXiv 1910.07467)."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., width]."""
        weight = local(self.weight).to(x.dtype)
        if x.dtype in WIDE_DTYPES:
            return F.rms_norm(x, x.shape[-1:], weight, self.epsilon)
        return F.rms_norm(upcast(x), x.shape[-1:], eps=self.epsilon).to(x.dtype) * weight


class LayerNorm(nn.Module):
    """Zero mean and unit variance, computed in at least fp32 (arXiv 1607.06450)."""

    def __init__(self, width: int, epsilon: float, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., width]."""
        weight = local(self.weight).to(x.dtype)
        bias = None if self.bias is None else local(self.bias).to(x.dtype)
        if x.dtype in WIDE_DTYPES:
            return F.layer_norm(x, x.shape[-1:], weight, bias, self.epsilon)
        normed = F.layer_norm(upcast(x), x.shape[-1:], eps=self.epsilon).to(x.dtype) * weight
        return normed if bias is None else normed + bias


def build_norm(model: Architecture) -> nn.Module:
    """A norm of the residual stream."""
    if model.norm is Norm.LAYER_NORM:
        return LayerNorm(model.hidden_size, model.norm_epsilon, bias=model.biases)
    return RMSNorm(model.hidden_size, model.norm_epsilon)


class PositionEmbedding(nn.Embedding):
    """A learned row per position (GPT)."""

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Tokens [batch, length] and their positions, None for 0, 1, ... -> [batch or 1, length, width]."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        return F.embedding(positions, local(self.weight))


class AttentionCore(nn.Module):
    """Attention inside each document of a row. A module, so that context parallelism can replace it.

    Args:
        causal: whether a token attends only to those up to itself.
        scale: factor of the scores; None for one over the root of the head size.
    """

    def __init__(self, *, causal: bool = True, scale: float | None = None) -> None:
        super().__init__()
        self.causal = causal
        self.scale = scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, token_metadata: TokenMetadata
    ) -> torch.Tensor:
        """Compute attention.

        Args:
            query: [batch, length, heads, head_size].
            key: [batch, length, key and value heads, head_size].
            value: like `key`, of any head size.
            token_metadata: positions and documents of the tokens.

        Returns:
            [batch, length, heads, value's head size].
        """
        mask = None
        if token_metadata.documents is not None:
            mask = (token_metadata.documents.unsqueeze(2) == token_metadata.documents.unsqueeze(1)).unsqueeze(1)
            mask = mask.tril() if self.causal else mask
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return attended.transpose(1, 2)


def _heads(x: torch.Tensor, size: int) -> torch.Tensor:
    heads: torch.Tensor = x.unflatten(-1, (-1, size))  # type: ignore[no-untyped-call]
    return heads


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv 2305.13245)."""

    products: Products

    def __init__(self, model: Architecture, rotary: RotaryEmbedding | None) -> None:
        super().__init__()
        biased = model.biases or model.attention_biases
        self.head_size = model.head_size
        self.value_size = model.value_size
        self.query = Linear(model.hidden_size, model.heads * model.head_size, bias=biased)
        self.key = Linear(model.hidden_size, model.kv_heads * model.head_size, bias=biased)
        self.value = Linear(model.hidden_size, model.kv_heads * model.value_size, bias=biased)
        self.output = Linear(model.heads * model.value_size, model.hidden_size, bias=model.biases)
        self.query_norm = RMSNorm(model.head_size, model.norm_epsilon) if model.query_key_norms else None
        self.key_norm = RMSNorm(model.head_size, model.norm_epsilon) if model.query_key_norms else None
        self.rotary = rotary
        self.core = AttentionCore(scale=model.score_scale)
        self.products = multiply_separately

    def forward(self, x: torch.Tensor, token_metadata: TokenMetadata) -> torch.Tensor:
        """[batch, positions, hidden] -> the same shape."""
        products = self.products(x, (self.query, self.key, self.value))
        sizes = (self.head_size, self.head_size, self.value_size)
        query, key, value = (_heads(y, size) for y, size in zip(products, sizes, strict=True))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary is not None:
            query, key = self.rotary(query, token_metadata.positions), self.rotary(key, token_metadata.positions)
        projected: torch.Tensor = self.output(self.core(query, key, value, token_metadata).flatten(2))
        return projected


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Keys and values are projected from one narrow latent. Positions are encoded in a separate part of queries and keys;
    all heads share the key's part. The projections into latents are replicated on every rank of a tensor group.
    """

    products: Products

    def __init__(self, model: Architecture, rotary: RotaryEmbedding | None) -> None:
        super().__init__()
        latent = model.latent
        if latent is None:
            raise ValueError("the architecture has no latent attention")
        self.kv_rank = latent.kv_rank
        self.sizes = (model.head_size, latent.rope_size)
        self.value_size = model.value_size
        compresses = latent.query_rank > 0
        self.query_down = Linear(model.hidden_size, latent.query_rank) if compresses else None
        self.query_norm = RMSNorm(latent.query_rank, model.norm_epsilon) if compresses else None
        self.query = Linear(latent.query_rank or model.hidden_size, model.heads * model.key_size)
        self.kv_down = Linear(model.hidden_size, latent.kv_rank + latent.rope_size)
        self.kv_norm = RMSNorm(latent.kv_rank, model.norm_epsilon)
        self.kv = Linear(latent.kv_rank, model.heads * (model.head_size + model.value_size))
        self.output = Linear(model.heads * model.value_size, model.hidden_size)
        self.rotary = rotary
        self.core = AttentionCore(scale=model.score_scale)
        self.products = multiply_separately

    def forward(self, x: torch.Tensor, token_metadata: TokenMetadata) -> torch.Tensor:
        """[batch, positions, hidden] -> the same shape."""
        query, narrow = self.products(x, (self.query_down or self.query, self.kv_down))
        if self.query_norm is not None:
            query = self.query(self.query_norm(query))
        query, turned = torch.split(_heads(query, sum(self.sizes)), list(self.sizes), dim=-1)
        latent, shared = torch.split(narrow, [self.kv_rank, self.sizes[1]], dim=-1)
        widths = (self.sizes[0], self.value_size)
        key, value = self.kv(self.kv_norm(latent)).unflatten(-1, (-1, sum(widths))).split(widths, dim=-1)
        shared = shared.unsqueeze(2)
        if self.rotary is not None:
            turned, shared = (
                self.rotary(turned, token_metadata.positions),
                self.rotary(shared, token_metadata.positions),
            )
        query = torch.cat((query, turned), dim=-1)
        key = torch.cat((key, shared.expand(*key.shape[:-1], -1)), dim=-1)
        projected: torch.Tensor = self.output(self.core(query, key, value, token_metadata).flatten(2))
        return projected


class FeedForward(nn.Module):
    """Two matrices and a non-linearity between them, or SwiGLU's three (arXiv 2002.05202)."""

    products: Products

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        hidden, width = model.hidden_size, model.intermediate_size
        self.gate = Linear(hidden, width, bias=model.biases) if model.gated else None
        self.up = Linear(hidden, width, bias=model.biases)
        self.down = Linear(width, hidden, bias=model.biases)
        self.activation = model.activation
        self.products = multiply_separately

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, positions, hidden] -> the same shape."""
        first, *gated = self.products(x, (self.up,) if self.gate is None else (self.gate, self.up))
        widened = activate(first, self.activation)
        for up in gated:
            widened = widened * up
        projected: torch.Tensor = self.down(widened)
        return projected


class NoDropout(nn.Module):
    """Takes the place of dropout in a run without it; see `models/dropout.py`."""

    def forward(self, x: torch.Tensor, token_metadata: TokenMetadata) -> torch.Tensor:
        """Return `x` itself."""
        return x


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Apply the non-linearity of a feed-forward layer."""
    match activation:
        case Activation.SILU:
            return F.silu(x)
        case Activation.RELU:
            return F.relu(x)
        case Activation.GELU:
            return F.gelu(x)
        case Activation.GELU_TANH:
            return F.gelu(x, approximate="tanh")


class Block(nn.Module):
    """A pre-norm residual block."""

    def __init__(self, model: Architecture, rotary: RotaryEmbedding | None, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = build_norm(model)
        self.attention = Attention(model, rotary) if model.latent is None else LatentAttention(model, rotary)
        self.feed_forward_norm = build_norm(model)
        self.feed_forward = feed_forward
        self.attention_dropout: nn.Module = NoDropout()
        self.feed_forward_dropout: nn.Module = NoDropout()

    def forward(self, x: torch.Tensor, token_metadata: TokenMetadata) -> torch.Tensor:
        """[batch, positions, hidden] -> the same shape."""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), token_metadata), token_metadata)
        attended: torch.Tensor = x + self.feed_forward_dropout(
            self.feed_forward(self.feed_forward_norm(x)), token_metadata
        )
        return attended


class TokenLoss(nn.Module):
    """Cross-entropy in at least fp32, summed over the targets that are not ignored. A module, so that tensor
    parallelism can replace it.
    """

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Logits [batch, positions, vocabulary] and targets [batch, positions] -> []."""
        return F.cross_entropy(upcast(logits.flatten(0, 1)), targets.flatten(), reduction="sum", ignore_index=IGNORED)
