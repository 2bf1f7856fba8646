"""`spec.model`: the model to train."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel
from meshwright.api.mixture import MixtureSpec
from meshwright.api.model_parts import Activation, LatentSpec, Norm, RopeScalingSpec


class ModelSpec(ApiModel):
    """The model to train: a preset, a published configuration, or a decoder's numbers, left out where as in Llama."""

    preset: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """A known architecture, such as `llama-3-8b`. Excludes every other field of `model`."""
    hugging_face: Annotated[str, Field(min_length=2, max_length=32768)] | None = None
    """The text of a Hugging Face `config.json`, of a `model_type` that the runtime builds: nothing is downloaded. What
    would be built inexactly is refused by name. Excludes every other field of `model`."""
    layers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of decoder layers."""
    hidden_size: Annotated[int, Field(ge=1, le=131072)] | None = None
    """Width of the residual stream. Must be divisible by twice `heads` unless `headSize` is given."""
    intermediate_size: Annotated[int, Field(ge=1, le=1048576)] | None = None
    """Width of the feed-forward layer. Must be divisible by `parallelism.tensor`."""
    heads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of query heads. Must be divisible by `parallelism.tensor`."""
    kv_heads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of key and value heads (grouped-query attention); `heads` when left out."""
    vocab_size: Annotated[int, Field(ge=2, le=1048576)] | None = None
    """Size of the vocabulary. Must hold every token of the tokenizer and be divisible by `parallelism.tensor`."""
    rope_theta: Annotated[int, Field(ge=1, le=1000000000)] | None = None
    """Base of the rotary position embedding; 10000 when left out."""
    tie_embeddings: bool | None = None
    """Whether the output projection is the token embedding; false when left out."""
    mixture: MixtureSpec | None = None
    """Mixtures of experts in place of feed-forward layers; none when left out."""
    head_size: Annotated[int, Field(ge=2, le=65536)] | None = None
    """Width of a query's and key's head; `hiddenSize / heads` when left out. With `latent`: without the rotary part."""
    value_size: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Width of a value's head; `headSize` when left out."""
    gated: bool | None = None
    """Whether the feed-forward layer has a gate (SwiGLU, arXiv 2002.05202); true when left out."""
    activation: Activation | None = None
    """Non-linearity of the feed-forward layer, on the gate where there is one; `SiLU` when left out. `GELUTanh` is the
    approximation that GPT-2 uses."""
    norm: Norm | None = None
    """`RMSNorm` (arXiv 1910.07467), or `LayerNorm` (arXiv 1607.06450); `RMSNorm` when left out."""
    norm_epsilon: Annotated[float, Field(gt=0, le=1)] | None = None
    """Epsilon of the norms; 0.00001 when left out."""
    biases: bool | None = None
    """Whether every matrix but embedding and output, and every norm, has a bias (GPT); false when left out. Needs
    `norm: LayerNorm`."""
    attention_biases: bool | None = None
    """Whether queries, keys and values have a bias (Qwen2); false when left out."""
    query_key_norms: bool | None = None
    """Whether each head's queries and keys are normalised (Qwen3); false when left out."""
    positions: Annotated[int, Field(ge=0, le=16777216)] | None = None
    """Rows of a learned position embedding (GPT), at least `training.sequenceLength`; 0, for rotary positions, when
    left out."""
    latent: LatentSpec | None = None
    """Multi-head latent attention (DeepSeek); full keys and values when left out."""
    rope_scaling: RopeScalingSpec | None = None
    """Rescaling of rotary frequencies for long contexts (Llama 3.1); none when left out."""
