"""Rotary positions, and methods to extend them to a longer context (position interpolation, Llama 3.1, YaRN)."""

from __future__ import annotations

import math

import torch
from torch import nn

from meshwright.api.model_parts import RopeScaling, RopeScalingSpec
from meshwright.models.architecture import Architecture


def rotary_embeddings(model: Architecture) -> tuple[RotaryEmbedding | None, RotaryEmbedding | None]:
    """Return the rotary embeddings of layers that attend to all keys and of those with a sliding window; None without
    rotary positions.
    """
    if not model.rope_size:
        return None, None
    full = RotaryEmbedding(model.rope_size, model.rope_theta, model.rope_scaling)
    return full, RotaryEmbedding(model.rope_size, model.window_rope_theta) if model.window_rope_theta else full


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (arXiv 2104.09864), which rotates the two halves of a head as in Llama.

    The table is not a buffer: it is neither trained nor saved, and is computed when the first batch shows its length.
    """

    def __init__(self, head_size: int, theta: float, scaling: RopeScalingSpec | None = None) -> None:
        super().__init__()
        self.head_size = head_size
        self.theta = theta
        self.scaling = scaling
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Rotate x, [batch, length, heads, head_size], by `positions`, int64 [batch, length]; None for 0, 1, ..."""
        cosine, sine = self.table(x.shape[1], x) if positions is None else self._at(positions, x)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)

    def table(self, length: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of positions 0 to `length - 1`, in the format of `x` and on its device."""
        table = self._table
        if table is None or table[0].shape[0] != length or table[0].dtype != x.dtype or table[0].device != x.device:
            table = self._table = self._at(torch.arange(length, device=x.device), x)
        return table

    def _at(self, positions: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, each [*positions.shape, 1, head_size / 2]."""
        exponents = torch.arange(0, self.head_size, 2, device=x.device, dtype=torch.float32) / self.head_size
        frequencies = rescale_frequencies(self.theta**-exponents, self.scaling, self.theta)
        angles = (positions.unsqueeze(-1) * frequencies).unsqueeze(-2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rescale_frequencies(
    frequencies: torch.Tensor, scaling: RopeScalingSpec | None, theta: float = 10000.0
) -> torch.Tensor:
    """Return radians per position, with low frequencies reduced (arXiv 2407.21783, section 3.4.2; Llama 3.1's reference
    code), or all of them (`Linear`, arXiv 2306.15595).

    Frequencies with at least `high_frequency_factor` turns within the original length stay. Those with at most
    `low_frequency_factor` turns are divided by the factor. In between, the two are interpolated linearly: in the number
    of turns, with YaRN in the index of the frequency.
    """
    if scaling is None:
        return frequencies
    if scaling.kind is RopeScaling.LINEAR:
        return frequencies / scaling.factor
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    if scaling.kind is RopeScaling.YARN:
        unscaled_share = _yarn_unscaled_share(frequencies, scaling, theta)
    else:
        turns = scaling.original_length * frequencies / (2 * math.pi)
        unscaled_share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (unscaled_share + (1.0 - unscaled_share) / scaling.factor)


def _yarn_unscaled_share(frequencies: torch.Tensor, scaling: RopeScalingSpec, theta: float) -> torch.Tensor:
    """Return the part of each frequency that stays (arXiv 2309.00071, section 3.2; integers as in its
    reference code).
    """
    count = len(frequencies)

    def place(turns: float) -> float:
        return count * math.log(scaling.original_length / (turns * 2 * math.pi)) / math.log(theta)

    first = max(math.floor(place(scaling.high_frequency_factor)), 0)
    last = min(math.ceil(place(scaling.low_frequency_factor)), 2 * count - 1)
    numbers = torch.arange(count, device=frequencies.device, dtype=frequencies.dtype)
    return 1.0 - ((numbers - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
