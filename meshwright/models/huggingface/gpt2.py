"""Reads and writes GPT-2's configuration."""

from __future__ import annotations

from typing import Any

from meshwright.api.model_parts import Norm
from meshwright.models.architecture import Architecture
from meshwright.models.huggingface.config_fields import ConfigError, ConfigFields
from meshwright.models.huggingface.model_type import ModelType, activation_name, read_activation


def _read(fields: ConfigFields) -> Architecture:
    hidden, heads = fields.number("n_embd"), fields.number("n_head")
    if fields.flag("scale_attn_by_inverse_layer_idx", False) or not fields.flag("scale_attn_weights", True):
        raise ConfigError("`scale_attn_by_inverse_layer_idx` and unscaled attention are not supported")
    return Architecture(
        layers=fields.number("n_layer"),
        hidden_size=hidden,
        intermediate_size=fields.number("n_inner", 4 * hidden),
        heads=heads,
        kv_heads=heads,
        vocab_size=fields.number("vocab_size"),
        norm_epsilon=fields.real("layer_norm_epsilon", 1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        gated=False,
        activation=read_activation(fields, "activation_function", "gelu_new"),
        norm=Norm.LAYER_NORM,
        biases=True,
        positions=fields.number("n_positions", 1024),
    )


def _write(model: Architecture) -> dict[str, Any]:
    full_heads = model.kv_heads == model.heads and model.head_size * model.heads == model.hidden_size
    if model.gated or not model.biases or not model.positions or not full_heads or model.value_size != model.head_size:
        raise ConfigError("no Hugging Face model type has `LayerNorm` and this shape; the most similar is GPT-2")
    return {
        "n_layer": model.layers,
        "n_embd": model.hidden_size,
        "n_head": model.heads,
        "n_inner": model.intermediate_size,
        "n_positions": model.positions,
        "vocab_size": model.vocab_size,
        "layer_norm_epsilon": model.norm_epsilon,
        "activation_function": activation_name(model.activation),
        "tie_word_embeddings": model.tie_embeddings,
    }


GPT2 = ModelType("gpt2", "GPT2LMHeadModel", _read, _write, prefix="transformer")
