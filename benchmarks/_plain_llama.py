"""Llama as one would write it by hand in plain torch, with the weights that the worker's model begins with.

Nothing here knows of meshes, shards or stages. Parameters have the worker's names, so that both draw the same values.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from meshwright.models.architecture import Architecture
from meshwright_worker.models.init_weights import initial_parameter
from meshwright_worker.models.rotary import rescale_frequencies


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = model.heads, model.kv_heads, model.head_size
        self.query = nn.Linear(model.hidden_size, model.heads * model.head_size, bias=False)
        self.key = nn.Linear(model.hidden_size, model.kv_heads * model.head_size, bias=False)
        self.value = nn.Linear(model.hidden_size, model.kv_heads * model.head_size, bias=False)
        self.output = nn.Linear(model.heads * model.head_size, model.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """[batch, length, hidden] -> the same; the rotary table is [length, head size / 2] twice."""
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        key = self.key(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        value = self.value(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        query, key = rotated(query, cosine, sine), rotated(key, cosine, sine)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        projected: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return projected


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Halves of x, [batch, heads, length, head size], rotated against each other."""
    first, second = x.chunk(2, dim=-1)
    cosine, sine = cosine.to(x.dtype), sine.to(x.dtype)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.up = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.down = nn.Linear(model.intermediate_size, model.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, hidden] -> the same."""
        projected: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return projected


class Block(nn.Module):
    """A pre-norm residual block."""

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_epsilon)
        self.attention = Attention(model)
        self.feed_forward_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_epsilon)
        self.feed_forward = FeedForward(model)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """[batch, length, hidden] -> the same."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        mixed: torch.Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return mixed


class PlainLlama(nn.Module):
    """The layers `own`, with the embedding before the first and the output behind the last of all."""

    def __init__(self, model: Architecture, own: range | None = None) -> None:
        super().__init__()
        own = range(model.layers) if own is None else own
        self.model = model
        self.first, self.last = own.start == 0, own.stop == model.layers
        if self.first:
            self.embedding = nn.Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleDict({str(index): Block(model) for index in own})
        if self.last:
            self.norm = nn.RMSNorm(model.hidden_size, eps=model.norm_epsilon)
            self.output = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        if model.tie_embeddings and self.first and self.last:
            self.output.weight = self.embedding.weight
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [batch, length], or hidden states from the stage before -> logits, or hidden states."""
        cosine, sine = self.table(x.shape[1], x.device)
        if self.first:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, cosine, sine)
        return self.output(self.norm(x)) if self.last else x

    def table(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, each [length, head size / 2], computed once."""
        if self._table is None or self._table[0].shape[0] != length:
            exponents = torch.arange(0, self.model.head_size, 2, device=device) / self.model.head_size
            frequencies = rescale_frequencies(self.model.rope_theta**-exponents, self.model.rope_scaling)
            angles = torch.arange(length, device=device).unsqueeze(1) * frequencies
            self._table = angles.cos(), angles.sin()
        return self._table


@torch.no_grad()
def draw_weights(module: PlainLlama, seed: int) -> None:
    """Fill a module, sharded or not, with the weights that the worker begins with."""
    for name, parameter in module.named_parameters():
        whole = initial_parameter(name, parameter.shape, module.model, seed)
        if isinstance(parameter, DTensor):
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
        else:
            parameter.copy_(whole)
