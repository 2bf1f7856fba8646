"""Reads and writes the configuration of Gemma 3's text models (arXiv 2503.19786).

Norms are published as the difference of their weights from 1. The embedding is multiplied by the root of its width.
"""

from __future__ import annotations

import math
from typing import Any

from meshwright.api.model_parts import Activation, Norm, RopeScaling, RopeScalingSpec
from meshwright.models.architecture import Architecture
from meshwright.models.huggingface.config_fields import ConfigError, ConfigFields
from meshwright.models.huggingface.model_type import (
    ModelType,
    read_activation,
    read_numbers,
    write_numbers,
)
from meshwright.models.huggingface.rope_scaling import read_scaling
from meshwright.models.huggingface.sliding_window import FULL, SLIDING, window_of_pattern

_TRAITS: dict[str, Any] = {
    "query_key_norms": True,
    "output_norms": True,
    "norm": Norm.RMS_NORM,
    "activation": Activation.GELU_TANH,
    "gated": True,
    "biases": False,
    "attention_biases": False,
    "positions": 0,
    "latent": None,
    "mixture": None,
}
"""Fields of an Architecture that all of these models have."""
_SHAPE = (
    "`queryKeyNorms`, `activation: GELUTanh` with a gate, the root of `hiddenSize` as `embeddingFactor`, and no "
    "biases, mixture, `latent`, `positions` or `valueSize`"
)


def _read(fields: ConfigFields) -> Architecture:
    if fields.flag("attention_bias", False) or fields.flag("use_bidirectional_attention", False):
        raise ConfigError("`attention_bias` and `use_bidirectional_attention` are not supported for this model type")
    if fields.real("attn_logit_softcapping", 0.0) or fields.real("final_logit_softcapping", 0.0):
        raise ConfigError("`attn_logit_softcapping` and `final_logit_softcapping` are not supported")
    numbers, heads = read_numbers(fields, latent=False), fields.number("num_attention_heads")
    rope, windows = fields.section("rope_parameters"), window_of_pattern(fields)
    local = None if rope is None else rope.section(SLIDING)
    if rope is not None and (full := rope.section(FULL)) is not None:
        numbers["rope_theta"] = full.real("rope_theta", numbers["rope_theta"])
        numbers["rope_scaling"] = read_scaling(full, latent=False)
    if local is not None and read_scaling(local, latent=False) is not None:
        raise ConfigError("rescaled rotary frequencies of layers with a sliding window are not supported")
    theta = fields.real("rope_local_base_freq", 10_000.0)
    theta = theta if local is None else local.real("rope_theta", theta)
    same = numbers["rope_scaling"] is None and theta == numbers["rope_theta"]
    head_size = fields.number("head_dim")
    return Architecture(
        **numbers
        | {
            "activation": read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
            "rope_scaling": _with_scores(numbers["rope_scaling"], fields, head_size),
        },
        kv_heads=fields.number("num_key_value_heads", heads),
        head_size=head_size,
        query_key_norms=True,
        output_norms=True,
        embedding_factor=math.sqrt(numbers["hidden_size"]),
        **windows,
        window_rope_theta=theta if windows and not same else 0.0,
    )


def _with_scores(scaling: RopeScalingSpec | None, fields: ConfigFields, head_size: int) -> RopeScalingSpec | None:
    """Add the factor of the scores, which are divided by the root of another number than the head's width."""
    divisor = fields.real("query_pre_attn_scalar", 256.0)
    if divisor == head_size:
        return scaling
    if scaling is None or divisor <= 0:
        raise ConfigError("`query_pre_attn_scalar` must be `head_dim` if there is no `rope_scaling`")
    return scaling.model_copy(update={"score_factor": math.sqrt(head_size / divisor)})


def _write(model: Architecture) -> dict[str, Any]:
    shape = {**_TRAITS, "value_size": model.head_size}
    scaled = math.isclose(model.embedding_factor, math.sqrt(model.hidden_size), rel_tol=1e-6)
    if not scaled or any(getattr(model, name) != value for name, value in shape.items()):
        raise ConfigError(f"no Hugging Face model type has `outputNorms` and this shape; Gemma 3 has {_SHAPE}")
    scaling = model.rope_scaling
    if scaling is not None and scaling.kind is not RopeScaling.LINEAR:
        raise ConfigError("no Hugging Face model type has `outputNorms` and another `ropeScaling.kind` than `Linear`")
    if scaling is not None and model.sliding_window and not model.window_rope_theta:
        raise ConfigError("no Hugging Face model type has `outputNorms`, `ropeScaling` and no `windowRopeTheta`")
    plain = model.model_copy(update={"rope_scaling": scaling and scaling.model_copy(update={"score_factor": 1.0})})
    numbers = write_numbers(plain)
    del numbers["hidden_act"]
    return {
        **numbers,
        "head_dim": model.head_size,
        # Inference servers accept no other name of the same function.
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(model.head_size / (scaling.score_factor if scaling else 1.0) ** 2),
        "rope_local_base_freq": model.window_rope_theta or model.rope_theta,
        # Without a window no layer has one, whatever its size.
        "sliding_window": model.sliding_window or 4096,
        "layer_types": [SLIDING if model.window_of(layer) else FULL for layer in range(model.layers)],
    }


GEMMA3 = ModelType(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _read,
    _write,
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "vocab_size": 262_208,
    },
    norms={
        "attention_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "feed_forward_norm": "pre_feedforward_layernorm",
        "feed_forward_output_norm": "post_feedforward_layernorm",
    },
    norm_offset=1.0,
)
