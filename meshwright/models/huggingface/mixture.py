"""The mixtures of published configurations: Mixtral, Qwen3 and DeepSeek-V2 and V3, in both directions.

DeepSeek-V2 scores by softmax and weighs by the scores themselves; V3 by a sigmoid each, chooses by scores plus biases,
and divides by the sum. Both are read as their own code computes, which names some of it by other fields than it does.
"""

from __future__ import annotations

from typing import Any

from meshwright.api.mixture import Balancing, MixtureSpec, Router
from meshwright.models.architecture import Architecture
from meshwright.models.huggingface.planner_config import ConfigError, ConfigFields

OF_TRAINING = {"balancing", "auxiliary_weight", "z_loss_weight", "bias_rate"}
"""Fields of a mixture that change no logit, but for the biases of `balancing: Bias`."""


def read_mixture(fields: ConfigFields, kind: str) -> MixtureSpec | None:
    """The mixture of a configuration of type `kind`; None for dense layers alone.

    Raises:
        ConfigError: a field is missing or of a wrong type, or the runtime does not build such a mixture.
    """
    if kind == "mixtral":
        return _mixtral(fields)
    if kind == "qwen3_moe":
        return _qwen(fields)
    if kind in ("deepseek_v2", "deepseek_v3") and fields.number("n_routed_experts", 0):
        return _second(fields) if kind == "deepseek_v2" else _third(fields)
    return None


def _mixtral(fields: ConfigFields) -> MixtureSpec:
    return MixtureSpec(
        experts=fields.number("num_local_experts", 8),
        per_token=fields.number("num_experts_per_tok", 2),
        intermediate_size=fields.number("intermediate_size"),
        auxiliary_weight=fields.real("router_aux_loss_coef", 0.001),
    )


def _qwen(fields: ConfigFields) -> MixtureSpec:
    if fields.listed("mlp_only_layers"):
        raise ConfigError("`mlp_only_layers` is not built by this runtime: dense layers stand before all mixtures")
    return MixtureSpec(
        experts=fields.number("num_experts"),
        per_token=fields.number("num_experts_per_tok"),
        intermediate_size=fields.number("moe_intermediate_size"),
        every=fields.number("decoder_sparse_step", 1),
        renormalize=fields.flag("norm_topk_prob", False),
        auxiliary_weight=fields.real("router_aux_loss_coef", 0.001),
    )


def _second(fields: ConfigFields) -> MixtureSpec:
    method = _one_of(fields, "topk_method", "greedy", "group_limited_greedy")
    _one_of(fields, "scoring_func", "softmax")
    if fields.flag("norm_topk_prob", False):
        raise ConfigError("`norm_topk_prob: true` of deepseek_v2 is not built by this runtime: its scaling is left out")
    limited = method == "group_limited_greedy"
    return MixtureSpec(
        **_common(fields, scaling=1.0),
        renormalize=False,
        groups=fields.number("n_group", 1) if limited else 1,
        groups_per_token=fields.number("topk_group", 1) if limited else 1,
        auxiliary_weight=fields.real("aux_loss_alpha", 0.001),
    )


def _third(fields: ConfigFields) -> MixtureSpec:
    _one_of(fields, "topk_method", "noaux_tc")
    _one_of(fields, "scoring_func", "sigmoid")
    return MixtureSpec(
        **_common(fields, scaling=2.5),
        renormalize=fields.flag("norm_topk_prob", True),
        router=Router.SIGMOID,
        groups=fields.number("n_group", 8),
        groups_per_token=fields.number("topk_group", 4),
        balancing=Balancing.BIAS,
        auxiliary_weight=fields.real("aux_loss_alpha", 0.0001),
    )


def _common(fields: ConfigFields, *, scaling: float) -> dict[str, Any]:
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


def _one_of(fields: ConfigFields, name: str, *known: str) -> str:
    value = fields.text(name) or known[0]
    if value not in known:
        raise ConfigError(f"`{name}` {value!r} is not built by this runtime here: known are {', '.join(known)}")
    return value


def write_mixture(model: Architecture, mixture: MixtureSpec) -> dict[str, Any]:
    """The fields of a configuration that describe a model's mixture, with its `model_type` and `architectures`.

    Raises:
        ConfigError: no model type has this mixture.
    """
    if model.latent is None:
        return _qwen_fields(mixture) if model.query_key_norms else _mixtral_fields(model, mixture)
    return _deepseek_fields(mixture)


def _mixtral_fields(model: Architecture, mixture: MixtureSpec) -> dict[str, Any]:
    _only(mixture, "Mixtral", {"experts", "per_token", "intermediate_size"})
    if model.attention_biases or mixture.intermediate_size != model.intermediate_size:
        raise ConfigError("no Hugging Face model type that is written has this mixture; Mixtral is the nearest")
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": mixture.experts,
        "num_experts_per_tok": mixture.per_token,
        "router_aux_loss_coef": mixture.balance_weight,
        "sliding_window": None,
    }


def _qwen_fields(mixture: MixtureSpec) -> dict[str, Any]:
    _only(mixture, "Qwen3", {"experts", "per_token", "intermediate_size", "every", "renormalize"})
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": mixture.experts,
        "num_experts_per_tok": mixture.per_token,
        "moe_intermediate_size": mixture.intermediate_size,
        "decoder_sparse_step": mixture.every,
        "norm_topk_prob": mixture.renormalize,
        "router_aux_loss_coef": mixture.balance_weight,
    }


def _deepseek_fields(mixture: MixtureSpec) -> dict[str, Any]:
    third = mixture.router is Router.SIGMOID
    shared, rest = divmod(mixture.shared_intermediate_size, mixture.intermediate_size)
    biased = mixture.balancing is Balancing.BIAS
    if rest or mixture.every != 1 or mixture.capacity_factor is not None or biased != third:
        raise ConfigError(
            "no Hugging Face model type has `latent` and this mixture; the nearest are DeepSeek-V2 (`router: Softmax`) "
            "and V3 (`router: Sigmoid`, `balancing: Bias`), both with `every: 1`, no `capacityFactor` and a "
            "`sharedIntermediateSize` of whole experts"
        )
    if not third and mixture.renormalize:
        raise ConfigError("no Hugging Face model type has `latent`, `router: Softmax` and `renormalize: true`")
    method = "noaux_tc" if third else "group_limited_greedy" if mixture.groups > 1 else "greedy"
    return {
        "model_type": "deepseek_v3" if third else "deepseek_v2",
        "architectures": ["DeepseekV3ForCausalLM" if third else "DeepseekV2ForCausalLM"],
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


def _only(mixture: MixtureSpec, name: str, fields: set[str]) -> None:
    plain = MixtureSpec(**mixture.model_dump(include=fields))
    unlike = plain.model_dump(exclude=OF_TRAINING) != mixture.model_dump(exclude=OF_TRAINING)
    if unlike or mixture.balancing is Balancing.BIAS:
        raise ConfigError(f"no Hugging Face model type that is written has this mixture; {name} is the nearest")
