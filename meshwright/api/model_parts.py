"""Parts of a model's shape that the API and the architecture share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel


class Norm(StrEnum):
    """Normalization of the residual stream before each sub-layer."""

    RMS_NORM = "RMSNorm"
    LAYER_NORM = "LayerNorm"


class Activation(StrEnum):
    """The activation function of the feed-forward layer."""

    SILU = "SiLU"
    GELU = "GELU"
    GELU_TANH = "GELUTanh"
    RELU = "ReLU"


class LatentSpec(ApiModel):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values from a latent
    vector.
    """

    kv_rank: Annotated[int, Field(ge=1, le=65536)]
    """Width of the latent that keys and values are projected from."""
    rope_size: Annotated[int, Field(ge=2, le=4096)]
    """Width of the rotary part of queries and keys, one key for all heads. Must be even."""
    query_rank: Annotated[int, Field(ge=0, le=65536)] = 0
    """Width of the latent that queries are projected from; 0 projects them from the residual stream."""


class RopeScaling(StrEnum):
    """How rotary frequencies change between the scaled and the unscaled ones."""

    LLAMA3 = "Llama3"
    YARN = "YaRN"
    LINEAR = "Linear"


class RopeScalingSpec(ApiModel):
    """Rescaling of rotary frequencies for long contexts."""

    kind: RopeScaling = RopeScaling.LLAMA3
    """Interpolation between the two limits. `Llama3`: linear in the frequency (Llama 3.1, arXiv 2407.21783, section
    3.4.2). `YaRN`: linear in the frequency's index in the head (arXiv 2309.00071; Qwen, DeepSeek). `Linear`: none,
    `factor` divides every frequency (arXiv 2306.15595; Gemma 3)."""
    factor: Annotated[float, Field(ge=1, le=4096)]
    """Factor by which the lowest frequencies are divided."""
    low_frequency_factor: Annotated[float, Field(gt=0, le=4096)] = 1.0
    """Wavelengths above `originalLength` over this are scaled by the full factor. YaRN's beta slow."""
    high_frequency_factor: Annotated[float, Field(gt=0, le=4096)] = 4.0
    """Wavelengths below `originalLength` over this are not scaled. YaRN's beta fast, which its authors set to 32."""
    score_factor: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Factor of the attention scores: the square of YaRN's attention factor."""
    original_length: Annotated[int, Field(ge=1, le=16777216)] = 8192
    """Length that the model was first trained on, in tokens."""
