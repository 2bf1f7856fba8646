"""The supported model types of transformers: one table for readers, writers and the names of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from meshwright.api.mixture import Router
from meshwright.api.model_parts import Norm, RopeScaling
from meshwright.models.architecture import Architecture
from meshwright.models.huggingface.config_fields import ConfigError
from meshwright.models.huggingface.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from meshwright.models.huggingface.gemma import GEMMA3
from meshwright.models.huggingface.gpt2 import GPT2
from meshwright.models.huggingface.llama import (
    LLAMA,
    MINISTRAL,
    MISTRAL,
    MIXTRAL,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
)
from meshwright.models.huggingface.model_type import ModelType

MODEL_TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        each.name: each
        for each in (
            GPT2, LLAMA, MISTRAL, MINISTRAL, MIXTRAL, PHI3, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE,
            DEEPSEEK_V2, DEEPSEEK_V3, GEMMA3,
        )
    }
)  # fmt: skip


def model_type_of(model: Architecture) -> ModelType:
    """Return the model type that an architecture is written as, or the most similar one if none has its shape."""
    mixture = model.mixture
    if model.output_norms:
        return GEMMA3
    if model.norm is Norm.LAYER_NORM and mixture is None:
        return GPT2
    if model.latent is not None:
        return DEEPSEEK_V3 if mixture is not None and mixture.router is Router.SIGMOID else DEEPSEEK_V2
    if mixture is not None:
        return QWEN3_MOE if model.query_key_norms else MIXTRAL
    if model.query_key_norms or model.attention_biases:
        return QWEN3 if model.query_key_norms else QWEN2
    if not model.sliding_window:
        return LLAMA
    return MINISTRAL if model.full_attention_every else MISTRAL


def config_from_architecture(
    model: Architecture, length: int = 0, model_type: ModelType | None = None
) -> dict[str, Any]:
    """Return the `config.json` of an architecture, for transformers to read.

    Args:
        model: the architecture.
        length: tokens of the longest sequence that the model supports. Inference servers limit sequences to it, and
            transformers computes YaRN's frequencies from it. It is at least the length of the rotary scaling. 0 to omit
            the field if there is no scaling.
        model_type: what to write it as; None for `model_type_of`.

    Raises:
        ConfigError: no model type of transformers has this shape.
    """
    model_type = model_type or model_type_of(model)
    if model_type.write is None:
        raise ConfigError(f"`model_type` {model_type.name!r} is not written")
    if model_type is not GEMMA3 and (model.output_norms or model.embedding_factor != 1 or model.window_rope_theta):
        raise ConfigError(
            f"`model_type` {model_type.name!r} has no `outputNorms`, `embeddingFactor` and `windowRopeTheta`; only "
            "Gemma 3 has, all of them"
        )
    scaling = model.rope_scaling
    if scaling is not None and scaling.kind is not RopeScaling.LINEAR:
        scaled_length = round(scaling.factor * scaling.original_length)
        # transformers 4 divides it by the original length to get YaRN's factor, and ignores the factor in the file.
        length = scaled_length if scaling.kind is RopeScaling.YARN else max(length, scaled_length)
    # For GPT-2 the length is the size of its position table.
    length_field = {"max_position_embeddings": length} if length and not model.positions else {}
    names, written = {"model_type": model_type.name, "architectures": [model_type.model_class]}, model_type.write(model)
    if model.sliding_window and not written.get("sliding_window"):
        raise ConfigError(f"`model_type` {model_type.name!r}, which has this shape otherwise, has no `slidingWindow`")
    if model.sliding_window and model.full_attention_every and "layer_types" not in written:
        raise ConfigError(f"`model_type` {model_type.name!r}, the most similar, has no `fullAttentionEvery`")
    return {**names, **written, **length_field}
