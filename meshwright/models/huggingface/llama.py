"""Reads and writes the configurations of Llama and models of its shape: Mistral's, Mixtral, Phi-3, Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from meshwright.api.mixture import MixtureSpec
from meshwright.api.model_parts import Norm
from meshwright.models.architecture import Architecture
from meshwright.models.huggingface.config_fields import ConfigError, ConfigFields
from meshwright.models.huggingface.model_type import (
    ExpertTensors,
    ModelType,
    check_mixture_fields,
    other_mixture,
    read_numbers,
    write_numbers,
)
from meshwright.models.huggingface.sliding_window import (
    layer_types,
    no_window,
    switched_window,
    window_if_switched_on,
    window_of_all_layers,
    window_of_every_other_layer,
    window_of_later_layers,
    window_of_listed_layers,
)


def _read(
    fields: ConfigFields,
    *,
    window: Callable[[ConfigFields], dict[str, int]],
    mixture: Callable[[ConfigFields], MixtureSpec] | None = None,
    **traits: bool,
) -> Architecture:
    """Read a configuration.

    Args:
        fields: the configuration's fields.
        window: reads the sliding window, and which layers have none, as fields of an Architecture.
        mixture: reads the mixture of experts.
        traits: fields of the Architecture that only the model type determines.
    """
    if fields.flag("attention_bias", False) or fields.flag("mlp_bias", False):
        raise ConfigError("`attention_bias` and `mlp_bias` are not supported for these model types")
    numbers = read_numbers(fields, latent=False)
    heads = numbers["heads"]
    return Architecture(
        **numbers,
        **traits,
        kv_heads=fields.number("num_key_value_heads", heads),
        head_size=fields.number("head_dim", 0) or numbers["hidden_size"] // max(1, heads),
        **window(fields),
        mixture=None if mixture is None else mixture(fields),
    )


def _mixtral(fields: ConfigFields) -> MixtureSpec:
    return MixtureSpec(
        experts=fields.number("num_local_experts", 8),
        per_token=fields.number("num_experts_per_tok", 2),
        intermediate_size=fields.number("intermediate_size"),
        auxiliary_weight=fields.real("router_aux_loss_coef", 0.001),
    )


def _qwen(fields: ConfigFields, *, shared: bool = False) -> MixtureSpec:
    if fields.listed("mlp_only_layers"):
        raise ConfigError("`mlp_only_layers` is not supported: dense layers must be before all mixtures")
    return MixtureSpec(
        experts=fields.number("num_experts"),
        per_token=fields.number("num_experts_per_tok"),
        intermediate_size=fields.number("moe_intermediate_size"),
        shared_intermediate_size=fields.number("shared_expert_intermediate_size") if shared else 0,
        every=fields.number("decoder_sparse_step", 1),
        renormalize=fields.flag("norm_topk_prob", False),
        auxiliary_weight=fields.real("router_aux_loss_coef", 0.001),
    )


def _phi3(fields: ConfigFields) -> Architecture:
    rope = fields.section("rope_scaling", "rope_parameters")
    if rope is not None and (rope.text("rope_type") or rope.text("type") or "default") != "default":
        raise ConfigError("`rope_scaling` is not supported for this model type")
    if any(part is not None and part.real("partial_rotary_factor", 1.0) != 1 for part in (fields, rope)):
        raise ConfigError("`partial_rotary_factor` is not supported: all of a head must be rotated")
    return _read(fields, window=window_of_all_layers)


def _write(model: Architecture) -> dict[str, Any]:
    if model.value_size != model.head_size or not model.gated or model.positions or model.norm is not Norm.RMS_NORM:
        raise ConfigError(
            "no Hugging Face model type has this shape: `valueSize`, `gated`, `positions` or `norm` differ"
        )
    if model.query_key_norms and model.attention_biases:
        raise ConfigError("no Hugging Face model type has both `queryKeyNorms` and `attentionBiases`")
    if model.mixture is None and model.attention_biases and model.head_size * model.heads != model.hidden_size:
        raise ConfigError("no Hugging Face model type has `attentionBiases` and another `headSize` than its share")
    return {**write_numbers(model), "head_dim": model.head_size}


def _write_mistral(model: Architecture) -> dict[str, Any]:
    return {**_write(model), "sliding_window": model.sliding_window or None}


def _write_switched(model: Architecture) -> dict[str, Any]:
    return {**_write(model), **switched_window(model), **layer_types(model)}


def _write_ministral(model: Architecture) -> dict[str, Any]:
    return {**_write_mistral(model), **layer_types(model)}


def _write_mixtral(model: Architecture) -> dict[str, Any]:
    numbers, mixture = _write(model), _mixture_of(model)
    check_mixture_fields(mixture, "Mixtral", {"experts", "per_token", "intermediate_size"})
    if model.attention_biases:
        raise ConfigError(other_mixture("Mixtral", "`attentionBiases` false there, true here"))
    if mixture.intermediate_size != model.intermediate_size:
        sizes = f"{model.intermediate_size} as in `intermediateSize` there, {mixture.intermediate_size} here"
        raise ConfigError(other_mixture("Mixtral", f"`mixture.intermediateSize` {sizes}"))
    return {
        **numbers,
        "num_local_experts": mixture.experts,
        "num_experts_per_tok": mixture.per_token,
        "router_aux_loss_coef": mixture.balance_weight,
        "sliding_window": model.sliding_window or None,
    }


def _write_qwen(model: Architecture) -> dict[str, Any]:
    numbers, mixture = {**_write(model), **switched_window(model)}, _mixture_of(model)
    check_mixture_fields(mixture, "Qwen3", {"experts", "per_token", "intermediate_size", "every", "renormalize"})
    return {
        **numbers,
        "num_experts": mixture.experts,
        "num_experts_per_tok": mixture.per_token,
        "moe_intermediate_size": mixture.intermediate_size,
        "decoder_sparse_step": mixture.every,
        "norm_topk_prob": mixture.renormalize,
        "router_aux_loss_coef": mixture.balance_weight,
    }


def _mixture_of(model: Architecture) -> MixtureSpec:
    if model.mixture is None:
        raise ConfigError("this Hugging Face model type needs `mixture`")
    return model.mixture


LLAMA = ModelType("llama", "LlamaForCausalLM", partial(_read, window=no_window), _write)
MISTRAL = ModelType(
    "mistral",
    "MistralForCausalLM",
    partial(_read, window=window_of_all_layers),
    _write_mistral,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
MINISTRAL = ModelType(
    "ministral",
    "MinistralForCausalLM",
    partial(_read, window=window_of_listed_layers),
    _write_ministral,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
MIXTRAL = ModelType(
    "mixtral",
    "MixtralForCausalLM",
    partial(_read, window=window_of_all_layers, mixture=_mixtral),
    _write_mixtral,
    defaults={"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    experts=ExpertTensors(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
)
PHI3 = ModelType(
    "phi3",
    "Phi3ForCausalLM",
    _phi3,
    _write_mistral,
    defaults={"rms_norm_eps": 1e-5},
    fused=True,
)
QWEN2 = ModelType(
    "qwen2",
    "Qwen2ForCausalLM",
    partial(_read, window=window_of_later_layers, attention_biases=True),
    _write_switched,
    defaults={"num_key_value_heads": 32, "sliding_window": 4096},
)
QWEN2_MOE = ModelType(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    partial(
        _read,
        window=window_of_every_other_layer,
        attention_biases=True,
        shared_gate=True,
        mixture=partial(_qwen, shared=True),
    ),
    defaults={"num_key_value_heads": 16, "sliding_window": 4096, "shared_expert_intermediate_size": 5632},
    built=False,
)
QWEN3 = ModelType(
    "qwen3",
    "Qwen3ForCausalLM",
    partial(_read, window=window_of_later_layers, query_key_norms=True),
    _write_switched,
    defaults={"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
)
QWEN3_MOE = ModelType(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    partial(_read, window=window_if_switched_on, query_key_norms=True, mixture=_qwen),
    _write_qwen,
    defaults={"num_key_value_heads": 4, "sliding_window": 4096},
    renamed={"num_local_experts": "num_experts"},
)
