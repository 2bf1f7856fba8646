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
from meshwright_worker.dtypes import WIDE_DTYPES, upcast
from meshwright_worker.models.split_backward import linear


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

    def reset_parameters(self) -> None:
        """Draw weights, unless they have no memory yet: `init_weights` draws those."""
        if not self.weight.is_meta:
            super().reset_parameters()

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


class TokenLoss(nn.Module):
    """Cross-entropy in at least fp32, summed over the targets that are not ignored. A module, so that tensor
    parallelism can replace it.
    """

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Logits [batch, positions, vocabulary] and targets [batch, positions] -> []."""
        return F.cross_entropy(upcast(logits.flatten(0, 1)), targets.flatten(), reduction="sum", ignore_index=IGNORED)
