"""Reads and writes the configurations of DeepSeek-V2 and V3.

DeepSeek-V2 scores by softmax and weights by the scores. V3 scores by sigmoid, chooses by scores plus biases, and
divides the weights by their sum. Both are read as their published code computes, which ignores some of the
configuration's fields.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from meshwright.api.mixture import Balancing, MixtureSpec, Router
from meshwright.api.model_parts import LatentSpec, Norm
from meshwright.models.architecture import Architecture
from meshwright.models.huggingface.config_fields import ConfigError, ConfigFields
from meshwright.models.huggingface.model_type import ModelType, read_numbers, write_numbers


def _read(fields: ConfigFields, *, mixture: Callable[[ConfigFields], MixtureSpec]) -> Architecture:
    if fields.flag("attention_bias", False):
        raise ConfigError("`attention_bias` is not supported for this model type")
    if not fields.flag("rope_interleave", True):
        raise ConfigError("`rope_interleave: false` is not supported: DeepSeek's weights rotate neighboring elements")
    numbers = read_numbers(fields, latent=True)
    return Architecture(
        **numbers,
        kv_heads=numbers["heads"],
        head_size=fields.number("qk_nope_head_dim"),
        value_size=fields.number("v_head_dim"),
        latent=LatentSpec(
            kv_rank=fields.number("kv_lora_rank"),
            rope_size=fields.number("qk_rope_head_dim"),
            query_rank=fields.number("q_lora_rank", 0),
        ),
        mixture=mixture(fields) if fields.number("n_routed_experts", 0) else None,
        prediction_layers=fields.number("num_nextn_predict_layers", 0),
    )


def _second(fields: ConfigFields) -> MixtureSpec:
    method = fields.choice("topk_method", "greedy", "group_limited_greedy")
    fields.choice("scoring_func", "softmax")
    if fields.flag("norm_topk_prob", False):
        raise ConfigError("`norm_topk_prob: true` of deepseek_v2 is not supported: leave it out, or set it to false")
    limited = method == "group_limited_greedy"
    return MixtureSpec(
        **_experts(fields, scaling=1.0),
        renormalize=False,
        groups=fields.number("n_group", 1) if limited else 1,
        groups_per_token=fields.number("topk_group", 1) if limited else 1,
        auxiliary_weight=fields.real("aux_loss_alpha", 0.001),
    )


def _third(fields: ConfigFields) -> MixtureSpec:
    fields.choice("topk_method", "noaux_tc")
    fields.choice("scoring_func", "sigmoid")
    return MixtureSpec(
        **_experts(fields, scaling=2.5),
        renormalize=fields.flag("norm_topk_prob", True),
        router=Router.SIGMOID,
        groups=fields.number("n_group", 8),
        groups_per_token=fields.number("topk_group", 4),
        balancing=Balancing.BIAS,
        auxiliary_weight=fields.real("aux_loss_alpha", 0.0001),
    )


def _experts(fields: ConfigFields, *, scaling: float) -> dict[str, Any]:
    if fields.number("moe_layer_freq", 1) != 1:
        raise ConfigError("`moe_layer_freq` must be 1: dense layers between mixtures are counted from another layer")
    width = fields.number("moe_intermediate_size")
    return {
        "experts": fields.number("n_routed_experts"),
        "per_token": fields.number("num_experts_per_tok"),
        "intermediate_size": width,
        "shared_intermediate_size": width * fields.number("n_shared_experts", 0),
        "dense_layers": fields.number("first_k_dense_replace", 0),
        "scaling": fields.real("routed_scaling_factor", scaling),
    }


def _write(model: Architecture) -> dict[str, Any]:
    latent = model.latent
    if latent is None or not model.gated or model.norm is not Norm.RMS_NORM:
        raise ConfigError("no Hugging Face model type has `latent` and this shape; the most similar is DeepSeek-V2")
    dense = {"first_k_dense_replace": model.layers}
    return {
        **write_numbers(model),
        **(dense if model.mixture is None else _write_mixture(model.mixture)),
        "qk_nope_head_dim": model.head_size,
        "qk_rope_head_dim": latent.rope_size,
        "v_head_dim": model.value_size,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.query_rank or None,
    }


def _write_mixture(mixture: MixtureSpec) -> dict[str, Any]:
    third = mixture.router is Router.SIGMOID
    shared, rest = divmod(mixture.shared_intermediate_size, mixture.intermediate_size)
    biased = mixture.balancing is Balancing.BIAS
    if rest or mixture.every != 1 or mixture.capacity_factor is not None or biased != third:
        raise ConfigError(
            "no Hugging Face model type has `latent` and this mixture; the most similar are DeepSeek-V2 (`router: "
            "Softmax`) and V3 (`router: Sigmoid`, `balancing: Bias`), both with `every: 1`, no `capacityFactor` and a "
            "`sharedIntermediateSize` of whole experts"
        )
    if not third and mixture.renormalize:
        raise ConfigError("no Hugging Face model type has `latent`, `router: Softmax` and `renormalize: true`")
    method = "noaux_tc" if third else "group_limited_greedy" if mixture.groups > 1 else "greedy"
    return {
        "n_routed_experts": mixture.experts,
        "num_experts_per_tok": mixture.per_token,
        "moe_intermediate_size": mixture.intermediate_size,
        "n_shared_experts": shared or None,
        "first_k_dense_replace": mixture.dense_layers,
        "moe_layer_freq": 1,
        "routed_scaling_factor": mixture.scaling,
        "norm_topk_prob": mixture.renormalize,
        "scoring_func": "sigmoid" if third else "softmax",
        "topk_method": method,
        "n_group": mixture.groups,
        "topk_group": mixture.groups_per_token,
        "aux_loss_alpha": mixture.balance_weight,
    }


DEEPSEEK_V2 = ModelType(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    partial(_read, mixture=_second),
    _write,
    defaults={"q_lora_rank": 1536, "n_shared_experts": 2},
)
DEEPSEEK_V3 = ModelType(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    partial(_read, mixture=_third),
    _write,
    defaults={"q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3},
)
