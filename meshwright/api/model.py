"""`spec.model`: the model to train."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from meshwright.api.base import ApiModel
from meshwright.api.mixture import MixtureSpec
from meshwright.api.model_parts import Activation, LatentSpec, Norm, RopeScalingSpec


class ModelSpec(ApiModel):
    """The model to train: a preset, a published configuration, or the numbers of a decoder, which default to Llama."""

    preset: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """A known architecture, such as `llama-3-8b`. Excludes every other field of `model`."""
    hugging_face: Annotated[str, Field(min_length=2, max_length=32768)] | None = None
    """A Hugging Face `config.json`, as a string, with a supported `model_type`. Nothing is downloaded. A model that the
    runtime cannot reproduce exactly is rejected. Excludes every other field of `model`."""
    layers: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of decoder layers."""
    hidden_size: Annotated[int, Field(ge=1, le=131072)] | None = None
    """Width of the residual stream. Must be divisible by twice `heads` unless `headSize` is given."""
    intermediate_size: Annotated[int, Field(ge=1, le=1048576)] | None = None
    """Width of the feed-forward layer. Must be divisible by `parallelism.tensor`."""
    heads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of query heads. Must be divisible by `parallelism.tensor`."""
    kv_heads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of key and value heads (grouped-query attention). Defaults to `heads`."""
    vocab_size: Annotated[int, Field(ge=2, le=1048576)] | None = None
    """Size of the vocabulary. Must be at least that of the tokenizer, and divisible by `parallelism.tensor`."""
    rope_theta: Annotated[int, Field(ge=1, le=1000000000)] | None = None
    """Base of the rotary position embedding. Defaults to 10000."""
    tie_embeddings: bool | None = None
    """Whether the output projection shares the weights of the token embedding. Defaults to false."""
    mixture: MixtureSpec | None = None
    """Mixtures of experts in place of feed-forward layers. None by default."""
    head_size: Annotated[int, Field(ge=2, le=65536)] | None = None
    """Width of a query's and key's head. Defaults to `hiddenSize / heads`. With `latent`: without the rotary part."""
    value_size: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Width of a value's head. Defaults to `headSize`."""
    gated: bool | None = None
    """Whether the feed-forward layer has a gate (SwiGLU, arXiv 2002.05202). Defaults to true."""
    activation: Activation | None = None
    """Activation function of the feed-forward layer, on the gate if there is one. Defaults to `SiLU`. `GELUTanh` is the
    approximation that GPT-2 uses."""
    norm: Norm | None = None
    """`RMSNorm` (arXiv 1910.07467), or `LayerNorm` (arXiv 1607.06450). Defaults to `RMSNorm`."""
    norm_epsilon: Annotated[float, Field(gt=0, le=1)] | None = None
    """Epsilon of the norms. Defaults to 0.00001."""
    biases: bool | None = None
    """Whether every norm and every matrix except embedding and output has a bias (GPT). Defaults to false. Needs
    `norm: LayerNorm`."""
    attention_biases: bool | None = None
    """Whether queries, keys and values have a bias (Qwen2). Defaults to false."""
    query_key_norms: bool | None = None
    """Whether each head's queries and keys are normalized (Qwen3). Defaults to false."""
    positions: Annotated[int, Field(ge=0, le=16777216)] | None = None
    """Rows of a learned position embedding (GPT). Must be at least `training.sequenceLength`. Defaults to 0, for rotary
    positions."""
    latent: LatentSpec | None = None
    """Multi-head latent attention (DeepSeek). Full keys and values by default."""
    rope_scaling: RopeScalingSpec | None = None
    """Rescaling of rotary frequencies for long contexts (Llama 3.1). None by default."""
    sliding_window: Annotated[int, Field(ge=0, le=16777216)] | None = None
    """Number of keys that a query attends to, its own among them (Mistral). Defaults to 0, for all."""
    full_attention_every: Annotated[int, Field(ge=0, le=1024)] | None = None
    """The last of every so many layers attends to all keys, with `slidingWindow`. Defaults to 0, for no layer."""
    window_rope_theta: Annotated[int, Field(ge=0, le=1000000000)] | None = None
    """`ropeTheta` of layers with a sliding window, without `ropeScaling` (Gemma 3). Defaults to 0, for the others'."""
    output_norms: bool | None = None
    """Whether outputs of attention and feed-forward layers are normalized, too (Gemma). Defaults to false."""
    embedding_factor: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Factor of the rows of the token embedding, as input (Gemma). Defaults to 1."""
