"""Reads and writes the rescaled rotary frequencies of published configurations: linear, Llama 3.1's and YaRN.

YaRN multiplies queries and keys by a factor, here their scores by its square. DeepSeek rotates a part of each head, and
multiplies the scores of entire heads by its `mscale_all_dim` instead.
"""

from __future__ import annotations

import math
from typing import Any

from meshwright.api.model_parts import RopeScaling, RopeScalingSpec
from meshwright.models.huggingface.config_fields import ConfigError, ConfigFields

_DIGITS = 9
"""Decimal places that factors are rounded to, so that a written factor is read as the same number."""


def read_scaling(fields: ConfigFields | None, *, latent: bool) -> RopeScalingSpec | None:
    """Return the scaling of a configuration, or None.

    Args:
        fields: the fields of the configuration's `rope_scaling`, if it has one.
        latent: whether it is for DeepSeek's attention.

    Raises:
        ConfigError: the runtime does not build this kind of scaling.
    """
    kind = "default" if fields is None else fields.text("rope_type") or fields.text("type") or "default"
    if fields is None or kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(f"`rope_scaling` of type {kind!r} is not supported: use one of default, linear, llama3, yarn")
    if kind == "linear":
        return RopeScalingSpec(kind=RopeScaling.LINEAR, factor=fields.real("factor", 1.0))
    if kind == "yarn":
        return _yarn(fields, latent=latent)
    return RopeScalingSpec(
        factor=fields.real("factor", 8.0),
        low_frequency_factor=fields.real("low_freq_factor", 1.0),
        high_frequency_factor=fields.real("high_freq_factor", 4.0),
        original_length=fields.number("original_max_position_embeddings", 8192),
    )


def _yarn(fields: ConfigFields, *, latent: bool) -> RopeScalingSpec:
    factor = fields.real("factor", 1.0)
    if not fields.flag("truncate", True):
        raise ConfigError("`rope_scaling.truncate: false` is not supported")
    whole, rotated = fields.real("mscale_all_dim", 0.0), fields.real("mscale", 1.0 if latent else 0.0)
    if latent and whole != rotated:
        raise ConfigError("`rope_scaling` with another `mscale` than `mscale_all_dim` is not supported")
    if not latent and (whole or rotated):
        raise ConfigError("`rope_scaling.mscale` is not supported for this model type")
    # The default is the paper's factor: 0.1 ln s + 1 (arXiv 2309.00071, equation 15).
    attention = _mscale(factor, whole) if latent else fields.real("attention_factor", _mscale(factor, 1.0))
    return RopeScalingSpec(
        kind=RopeScaling.YARN,
        factor=factor,
        low_frequency_factor=fields.real("beta_slow", 1.0),
        high_frequency_factor=fields.real("beta_fast", 32.0),
        original_length=fields.number("original_max_position_embeddings"),
        score_factor=round(attention**2, _DIGITS),
    )


def write_scaling(scaling: RopeScalingSpec | None, *, latent: bool) -> dict[str, Any] | None:
    """Return the `rope_scaling` of a configuration.

    Raises:
        ConfigError: transformers does not have this kind of scaling.
    """
    if scaling is None:
        return None
    common = {"factor": scaling.factor, "original_max_position_embeddings": scaling.original_length}
    if scaling.kind is RopeScaling.YARN:
        attention = math.sqrt(scaling.score_factor)
        if latent:
            mscale = (
                round((attention - 1) / (0.1 * math.log(scaling.factor)), _DIGITS - 2) if scaling.factor > 1 else 0.0
            )
            own = {"mscale": mscale, "mscale_all_dim": mscale}
        else:
            own = {"attention_factor": attention}
        slow, fast = scaling.low_frequency_factor, scaling.high_frequency_factor
        return {"rope_type": "yarn", **common, "beta_slow": slow, "beta_fast": fast, **own}
    if scaling.score_factor != 1:
        raise ConfigError("no Hugging Face model type has `ropeScaling.scoreFactor` without `kind: YaRN`")
    if scaling.kind is RopeScaling.LINEAR:
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        **common,
        "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor,
    }


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
