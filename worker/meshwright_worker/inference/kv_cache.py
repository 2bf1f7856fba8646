"""Caches keys and values of earlier tokens, so that only new tokens are computed."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from meshwright_worker.data.batch import TokenMetadata
from meshwright_worker.models.layers import AttentionCore


class KVCacheAttention(AttentionCore):
    """Attention of new tokens to themselves and to all earlier tokens.

    A rank of a tensor group caches its own heads, a stage of a pipeline its own layers.
    """

    def __init__(self, capacity: int, *, scale: float | None = None) -> None:
        super().__init__(scale=scale)
        self._capacity = capacity
        self._length = 0
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def clear(self) -> None:
        """Drop all tokens; keeps the memory."""
        self._length = 0

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, token_metadata: TokenMetadata
    ) -> torch.Tensor:
        """See `AttentionCore.forward`; the tokens follow those of the last call.

        Raises:
            ValueError: more tokens than the cache can store, or several documents in a row.
        """
        if token_metadata.documents is not None:
            raise ValueError("generation takes one document a row")
        cached_length, length = self._length, self._length + query.shape[1]
        if length > self._capacity:
            raise ValueError(f"{length} tokens do not fit a cache of {self._capacity}")
        keys, values = self._cache_tensors(key, value)
        keys[:, cached_length:length], values[:, cached_length:length] = key, value
        self._length = length
        mask = torch.ones(length - cached_length, length, dtype=torch.bool, device=query.device).tril(cached_length)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys[:, :length].transpose(1, 2),
            values[:, :length].transpose(1, 2),
            attn_mask=mask,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return attended.transpose(1, 2)

    def _cache_tensors(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = key.shape[0]
        if self._keys is None or self._values is None or self._keys.shape[0] != rows:
            self._keys = key.new_empty(rows, self._capacity, *key.shape[2:])
            self._values = value.new_empty(rows, self._capacity, *value.shape[2:])
        return self._keys, self._values


def install_kv_caches(stage: nn.Module, capacity: int) -> list[KVCacheAttention]:
    """Make every attention of a stage cache up to `capacity` tokens; return the empty caches."""
    caches = []
    for module in list(stage.modules()):
        core = getattr(module, "core", None)
        if isinstance(core, AttentionCore):
            cache = KVCacheAttention(capacity, scale=core.scale)
            module.core = cache
            caches.append(cache)
    return caches
