"""Mixtures of experts as papers have them, small, by the names that cases use."""

from __future__ import annotations

from typing import Any

from meshwright.api.mixture import Balancing, MixtureSpec, Router


def _mixture(**fields: Any) -> MixtureSpec:
    return MixtureSpec(**{"experts": 4, "per_token": 2, "intermediate_size": 24, **fields})


MIXTURES = {
    "Switch": _mixture(per_token=1, renormalize=False, capacity_factor=1.0, every=2),
    "Mixtral": _mixture(),
    "ST-MoE": _mixture(capacity_factor=1.25, auxiliary_weight=0.05, z_loss_weight=0.05),
    "DeepSeek-V2": _mixture(
        experts=8, per_token=3, intermediate_size=12, shared_intermediate_size=24, dense_layers=1, renormalize=False,
        scaling=2.0, groups=4, groups_per_token=2,
    ),
    "DeepSeek-V3": _mixture(
        experts=16, per_token=8, intermediate_size=12, shared_intermediate_size=12, dense_layers=1, scaling=2.5,
        router=Router.SIGMOID, groups=4, groups_per_token=3, balancing=Balancing.BIAS, bias_rate=0.05,
        auxiliary_weight=0.001,
    ),
    "32 experts": _mixture(experts=32, per_token=6, intermediate_size=8),
    "32 experts in groups": _mixture(
        experts=32, per_token=6, intermediate_size=8, router=Router.SIGMOID, groups=4, groups_per_token=2
    ),
    "odd widths": _mixture(intermediate_size=10, shared_intermediate_size=24),
    "too many": _mixture(per_token=5),
    "unbalanced": _mixture(balancing=Balancing.NONE),
}  # fmt: skip
