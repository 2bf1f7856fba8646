"""Between a Hugging Face `config.json` and the architecture that the runtime builds, in both directions.

What the runtime cannot build exactly is refused: logits would differ from the published model's without any sign.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.api.model_parts import Activation, LatentSpec, Norm, RopeScaling
from meshwright.models.architecture import Architecture
from meshwright.models.huggingface.defaults import with_defaults
from meshwright.models.huggingface.mixture import read_mixture, write_mixture
from meshwright.models.huggingface.planner_config import DEEPSEEK, ConfigError, ConfigFields, model_type_of
from meshwright.models.huggingface.rope_scaling import read_scaling, write_scaling

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}
_NAMES = {
    Activation.SILU: "silu",
    Activation.GELU: "gelu",
    Activation.GELU_TANH: "gelu_new",
    Activation.RELU: "relu",
}
_LLAMA_LIKE = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


def read_architecture(path: Path) -> Architecture:
    """The architecture that a `config.json` describes.

    Raises:
        ConfigError: it is no JSON object, or describes a model that the runtime does not build.
        OSError: the file cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path.name} must hold a JSON object, not {type(found).__name__}")
    return architecture_from_config(found)


def architecture_from_config(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a configuration describes.

    Raises:
        ConfigError: a field is missing or of a wrong type, or the runtime does not build such a model.
    """
    kind, config = model_type_of(config), with_defaults(config)
    fields = ConfigFields(config)
    if config.get("quantization_config"):
        raise ConfigError("`quantization_config` is not read by this runtime: name weights in fp32, bf16 or fp16")
    if kind == "gpt2":
        return _gpt2(fields)
    if kind in _LLAMA_LIKE:
        return _llama(fields, str(kind), config)
    if kind in DEEPSEEK:
        return _deepseek(fields, str(kind), config)
    if kind == "qwen2_moe":
        raise ConfigError("`model_type` 'qwen2_moe' is not built by this runtime: its shared expert has a gate")
    known = ", ".join(["gpt2", *_LLAMA_LIKE, *sorted(DEEPSEEK)])
    raise ConfigError(f"`model_type` {kind!r} is not built by this runtime: known are {known}")


def config_from_architecture(model: Architecture, length: int = 0) -> dict[str, Any]:
    """The `config.json` of an architecture, as transformers reads it.

    Args:
        model: the architecture.
        length: of the longest sequences that it is known to bear, in tokens: programs that serve it take no longer
            ones, and transformers computes YaRN's frequencies from it. At least what its rotary scaling is for; 0 to
            say nothing where there is none.

    Raises:
        ConfigError: no model type there has this shape.
    """
    scaling = model.rope_scaling
    if scaling is not None:
        scaled_length = round(scaling.factor * scaling.original_length)
        # transformers 4 takes its quotient with the original length for YaRN's factor, whatever the factor there is.
        length = scaled_length if scaling.kind is RopeScaling.YARN else max(length, scaled_length)
    # GPT-2's is its table of positions.
    length_field = {"max_position_embeddings": length} if length and not model.positions else {}
    return {**_config_of(model), **length_field}


def _config_of(model: Architecture) -> dict[str, Any]:
    if model.norm is Norm.LAYER_NORM and model.mixture is None:
        return _config_of_gpt2(model)
    if model.latent is not None:
        return _config_of_deepseek(model)
    if model.value_size != model.head_size or not model.gated or model.positions:
        raise ConfigError("no Hugging Face model type has this shape: `valueSize`, `gated` or `positions` differ")
    if model.query_key_norms and model.attention_biases:
        raise ConfigError("no Hugging Face model type has both `queryKeyNorms` and `attentionBiases`")
    if model.mixture is not None:
        return {**_numbers(model), **write_mixture(model, model.mixture), "head_dim": model.head_size}
    kind = "qwen3" if model.query_key_norms else "qwen2" if model.attention_biases else "llama"
    if kind == "qwen2" and model.head_size * model.heads != model.hidden_size:
        raise ConfigError("no Hugging Face model type has `attentionBiases` and another `headSize` than its share")
    classes = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    return {"model_type": kind, "architectures": [classes[kind]], **_numbers(model), "head_dim": model.head_size}


def _gpt2(fields: ConfigFields) -> Architecture:
    hidden, heads = fields.number("n_embd"), fields.number("n_head")
    if fields.flag("scale_attn_by_inverse_layer_idx", False) or not fields.flag("scale_attn_weights", True):
        raise ConfigError("`scale_attn_by_inverse_layer_idx` and unscaled attention are not built by this runtime")
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
        activation=_activation(fields.text("activation_function") or "gelu_new"),
        norm=Norm.LAYER_NORM,
        biases=True,
        positions=fields.number("n_positions", 1024),
    )


def _llama(fields: ConfigFields, kind: str, config: Mapping[str, Any]) -> Architecture:
    heads, hidden = fields.number("num_attention_heads"), fields.number("hidden_size")
    has_window = kind in ("mistral", "mixtral") or fields.flag("use_sliding_window", False)
    if has_window and fields.number("sliding_window", 0):
        raise ConfigError(
            "`sliding_window` is not built by this runtime: set it to null if no sequence is longer than the window"
        )
    if fields.flag("attention_bias", False) or fields.flag("mlp_bias", False):
        raise ConfigError("`attention_bias` and `mlp_bias` are not built by this runtime for these model types")
    size = fields.number("head_dim", 0) or hidden // max(1, heads)
    return Architecture(
        layers=fields.number("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=fields.number("intermediate_size"),
        heads=heads,
        kv_heads=fields.number("num_key_value_heads", heads),
        vocab_size=fields.number("vocab_size"),
        rope_theta=_theta(fields, config),
        norm_epsilon=fields.real("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        head_size=size,
        activation=_activation(fields.text("hidden_act") or "silu"),
        attention_biases=kind == "qwen2",
        query_key_norms=kind in ("qwen3", "qwen3_moe"),
        rope_scaling=read_scaling(config, latent=False),
        mixture=read_mixture(fields, kind),
    )


def _deepseek(fields: ConfigFields, kind: str, config: Mapping[str, Any]) -> Architecture:
    heads = fields.number("num_attention_heads")
    if fields.flag("attention_bias", False):
        raise ConfigError("`attention_bias` is not built by this runtime for this model type")
    if not fields.flag("rope_interleave", True):
        raise ConfigError("`rope_interleave: false` is not read by this runtime: DeepSeek's weights turn neighbours")
    return Architecture(
        layers=fields.number("num_hidden_layers"),
        hidden_size=fields.number("hidden_size"),
        intermediate_size=fields.number("intermediate_size"),
        heads=heads,
        kv_heads=heads,
        vocab_size=fields.number("vocab_size"),
        rope_theta=_theta(fields, config),
        norm_epsilon=fields.real("rms_norm_eps", 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        head_size=fields.number("qk_nope_head_dim"),
        value_size=fields.number("v_head_dim"),
        activation=_activation(fields.text("hidden_act") or "silu"),
        latent=LatentSpec(
            kv_rank=fields.number("kv_lora_rank"),
            rope_size=fields.number("qk_rope_head_dim"),
            query_rank=fields.number("q_lora_rank", 0),
        ),
        rope_scaling=read_scaling(config, latent=True),
        mixture=read_mixture(fields, kind),
    )


def _activation(name: str) -> Activation:
    if name not in _ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not built by this runtime: known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _theta(fields: ConfigFields, config: Mapping[str, Any]) -> float:
    # transformers 5 moved the base in with the scaling, and still reads files that have it outside.
    top_level_theta = fields.real("rope_theta", 10000.0)
    rope_fields = config.get("rope_scaling") or config.get("rope_parameters")
    return (
        ConfigFields(rope_fields).real("rope_theta", top_level_theta)
        if isinstance(rope_fields, dict)
        else top_level_theta
    )


def _numbers(model: Architecture) -> dict[str, Any]:
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "vocab_size": model.vocab_size,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_act": _NAMES[model.activation],
        "rope_scaling": write_scaling(model.rope_scaling, latent=model.latent is not None),
    }


def _config_of_gpt2(model: Architecture) -> dict[str, Any]:
    full_heads = model.kv_heads == model.heads and model.head_size * model.heads == model.hidden_size
    if model.gated or not model.biases or not model.positions or not full_heads or model.value_size != model.head_size:
        raise ConfigError("no Hugging Face model type has `LayerNorm` and this shape; GPT-2 is the nearest")
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": model.layers,
        "n_embd": model.hidden_size,
        "n_head": model.heads,
        "n_inner": model.intermediate_size,
        "n_positions": model.positions,
        "vocab_size": model.vocab_size,
        "layer_norm_epsilon": model.norm_epsilon,
        "activation_function": _NAMES[model.activation],
        "tie_word_embeddings": model.tie_embeddings,
    }


def _config_of_deepseek(model: Architecture) -> dict[str, Any]:
    latent = model.latent
    if latent is None or not model.gated or model.norm is not Norm.RMS_NORM:
        raise ConfigError("no Hugging Face model type has `latent` and this shape; DeepSeek-V2 is the nearest")
    dense = {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "first_k_dense_replace": model.layers,
    }
    return {
        **_numbers(model),
        **(dense if model.mixture is None else write_mixture(model, model.mixture)),
        "qk_nope_head_dim": model.head_size,
        "qk_rope_head_dim": latent.rope_size,
        "v_head_dim": model.value_size,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.query_rank or None,
    }
