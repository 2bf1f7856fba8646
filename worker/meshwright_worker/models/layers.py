"""The layers of a Llama-style decoder (arXiv 2302.13971): RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Every layer computes in the format of its input and casts its fp32 parameters to it, on whatever part of them this rank
holds: head counts are read from the tensors, so the same code runs on all heads and on one rank's share of them.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwright.models.architecture import Architecture
from meshwright_worker.data.batch import IGNORED, Places
from meshwright_worker.precision import wide


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, through which its gradient flows."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Linear(nn.Linear):
    """A matrix product in the format of its input; no bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        return F.linear(x, local(self.weight).to(x.dtype))


class TokenEmbedding(nn.Embedding):
    """A row a token. A rank that holds the rows from `first_row` on gives 0 for others: ranks add up."""

    first_row = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, positions] -> [batch, positions, width]."""
        rows = local(self.weight)
        if rows.shape[0] == self.num_embeddings:
            return F.embedding(tokens, rows)
        own = tokens - self.first_row
        elsewhere = (own < 0) | (own >= rows.shape[0])
        return F.embedding(own.masked_fill(elsewhere, 0), rows).masked_fill(elsewhere.unsqueeze(-1), 0.0)


class RMSNorm(nn.Module):
    """Division by the root mean square, computed in at least fp32 (arXiv 1910.07467)."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., width]."""
        normed = F.rms_norm(wide(x), x.shape[-1:], eps=self.epsilon)
        return normed.to(x.dtype) * local(self.weight).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (arXiv 2104.09864), halves rotated against each other as in Llama.

    The table is no buffer: it is neither trained nor saved, and is computed when the first batch shows its length.
    """

    def __init__(self, head_size: int, theta: float) -> None:
        super().__init__()
        self.head_size = head_size
        self.theta = theta
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Rotate x, [batch, length, heads, head_size], by `positions`, int64 [batch, length]; None for 0, 1, ..."""
        cosine, sine = self._for(x) if positions is None else self._at(positions, x)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)

    def _for(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = x.shape[1]
        table = self._table
        if table is None or table[0].shape[0] != positions or table[0].dtype != x.dtype or table[0].device != x.device:
            table = self._table = self._at(torch.arange(positions, device=x.device), x)
        return table

    def _at(self, positions: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, each [*positions.shape, 1, head_size / 2]."""
        exponents = torch.arange(0, self.head_size, 2, device=x.device, dtype=torch.float32) / self.head_size
        angles = (positions.unsqueeze(-1) * self.theta**-exponents).unsqueeze(-2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class AttentionCore(nn.Module):
    """Causal attention, each document of a row on its own. A module, so that context parallelism can replace it."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: Places) -> torch.Tensor:
        """Mix values.

        Args:
            query: [batch, length, heads, head_size].
            key: [batch, length, key and value heads, head_size].
            value: like `key`, of any head size.
            places: where the tokens stand.

        Returns:
            [batch, length, heads, value's head size].
        """
        mask = None
        if places.documents is not None:
            mask = (places.documents.unsqueeze(2) == places.documents.unsqueeze(1)).tril().unsqueeze(1)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return mixed.transpose(1, 2)


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv 2305.13245)."""

    def __init__(self, model: Architecture, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.head_size = model.head_size
        self.query = Linear(model.hidden_size, model.heads * model.head_size)
        self.key = Linear(model.hidden_size, model.kv_heads * model.head_size)
        self.value = Linear(model.hidden_size, model.kv_heads * model.head_size)
        self.output = Linear(model.heads * model.head_size, model.hidden_size)
        self.rotary = rotary
        self.core = AttentionCore()

    def forward(self, x: torch.Tensor, places: Places) -> torch.Tensor:
        """[batch, positions, hidden] -> the same shape."""
        query, key, value = (
            projected.unflatten(-1, (-1, self.head_size)) for projected in (self.query(x), self.key(x), self.value(x))
        )
        query, key = self.rotary(query, places.positions), self.rotary(key, places.positions)
        projected: torch.Tensor = self.output(self.core(query, key, value, places).flatten(2))
        return projected


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        self.gate = Linear(model.hidden_size, model.intermediate_size)
        self.up = Linear(model.hidden_size, model.intermediate_size)
        self.down = Linear(model.intermediate_size, model.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, positions, hidden] -> the same shape."""
        projected: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return projected


class NoDropout(nn.Module):
    """The place of dropout in a run without; see `models/dropout.py`."""

    def forward(self, x: torch.Tensor, places: Places) -> torch.Tensor:
        """`x` itself."""
        return x


class Block(nn.Module):
    """A pre-norm residual block."""

    def __init__(self, model: Architecture, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model.hidden_size, model.norm_epsilon)
        self.attention = Attention(model, rotary)
        self.feed_forward_norm = RMSNorm(model.hidden_size, model.norm_epsilon)
        self.feed_forward = FeedForward(model)
        self.attention_dropout: nn.Module = NoDropout()
        self.feed_forward_dropout: nn.Module = NoDropout()

    def forward(self, x: torch.Tensor, places: Places) -> torch.Tensor:
        """[batch, positions, hidden] -> the same shape."""
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), places), places)
        mixed: torch.Tensor = x + self.feed_forward_dropout(self.feed_forward(self.feed_forward_norm(x)), places)
        return mixed


class TokenLoss(nn.Module):
    """Cross-entropy in at least fp32, summed over the targets that count. A module: tensor parallelism replaces it."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Logits [batch, positions, vocabulary] and targets [batch, positions] -> []."""
        return F.cross_entropy(wide(logits.flatten(0, 1)), targets.flatten(), reduction="sum", ignore_index=IGNORED)
