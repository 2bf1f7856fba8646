"""Attention of a decoder's layers: grouped heads (arXiv 2305.13245), and latent attention (DeepSeek, arXiv 2405.04434).

Head counts are read from the tensors, so the same code runs on all heads and on one rank's share of them.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.models.architecture import Architecture
from meshwright_worker.data.batch import TokenMetadata
from meshwright_worker.models.layers import Linear, Products, RMSNorm, multiply_separately
from meshwright_worker.models.rotary import RotaryEmbedding


class AttentionCore(nn.Module):
    """Attention inside each document of a row. A module, so that context parallelism can replace it.

    Args:
        causal: whether a token attends only to those up to itself.
        scale: factor of the scores; None for one over the root of the head size.
        window: the largest number of keys that a token attends to, its own among them; 0 for all.
    """

    def __init__(self, *, causal: bool = True, scale: float | None = None, window: int = 0) -> None:
        super().__init__()
        self.causal = causal
        self.scale = scale
        self.window = window
        self.pads_values = False
        """Whether values are padded to the size of keys, see `needs_equal_head_sizes`."""

    def prepare(self, token_metadata: TokenMetadata, device: torch.device) -> None:
        """Compute what all layers need of a micro-batch, if they need anything, before the first one runs."""

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
        mask = self._visible(query, token_metadata)
        size = value.shape[-1]
        if self.pads_values and size < key.shape[-1]:
            value = F.pad(value, (0, key.shape[-1] - size))
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return attended[..., :size].transpose(1, 2)

    def window_in(self, length: int) -> int:
        """Return the window if it hides keys of a row of `length` tokens, else 0."""
        return self.window if self.window < length else 0

    def _visible(self, query: torch.Tensor, token_metadata: TokenMetadata) -> torch.Tensor | None:
        """Return which keys a query attends to, as [batch or 1, 1, length, length]; None if causality alone decides."""
        mask = None
        if token_metadata.documents is not None:
            mask = (token_metadata.documents.unsqueeze(2) == token_metadata.documents.unsqueeze(1)).unsqueeze(1)
        if window := self.window_in(query.shape[1]):
            recent = query.new_ones(1, 1, query.shape[1], query.shape[1], dtype=torch.bool).triu(1 - window)
            mask = recent if mask is None else mask & recent
        return mask.tril() if mask is not None and self.causal else mask


def needs_equal_head_sizes(device: torch.device, *, deterministic: bool) -> bool:
    """Return whether fused attention on this device takes only values of the keys' size.

    cuDNN's takes others, but torch uses it from Hopper on, and not with deterministic algorithms. FlashAttention 2 does
    not, and without both the memory-efficient kernel takes three times as long as FlashAttention with padded values
    (latent attention on an H200: 37 ms, 12 ms, and 5 ms by cuDNN).
    """
    return device.type == "cuda" and (deterministic or torch.cuda.get_device_capability(device) < (9, 0))


def _heads(x: torch.Tensor, size: int) -> torch.Tensor:
    heads: torch.Tensor = x.unflatten(-1, (-1, size))  # type: ignore[no-untyped-call]
    return heads


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv 2305.13245)."""

    products: Products

    def __init__(self, model: Architecture, rotary: RotaryEmbedding | None, layer: int = 0) -> None:
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
        self.core = AttentionCore(scale=model.score_scale, window=model.window_of(layer))
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

    def __init__(self, model: Architecture, rotary: RotaryEmbedding | None, layer: int = 0) -> None:
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
        self.core = AttentionCore(scale=model.score_scale, window=model.window_of(layer))
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
