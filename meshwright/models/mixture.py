"""Sizes of mixtures of experts: which layers have one, their parameters, and the capacity of an expert."""

from __future__ import annotations

import math
from fractions import Fraction

from meshwright.api.mixture import Balancing, MixtureSpec


def is_mixture(mixture: MixtureSpec | None, layer: int) -> bool:
    """Whether layer number `layer` (from 0) has a mixture of experts."""
    if mixture is None or layer < mixture.dense_layers:
        return False
    return (layer - mixture.dense_layers) % mixture.every == mixture.every - 1


def mixture_layers(mixture: MixtureSpec | None, layers: int) -> list[int]:
    """The layers with a mixture of experts, in a model with `layers` layers."""
    return [layer for layer in range(layers) if is_mixture(mixture, layer)]


def router_parameters(mixture: MixtureSpec, hidden: int) -> int:
    """Parameters of one router, with its balancing bias."""
    return mixture.experts * (hidden + (mixture.balancing is Balancing.BIAS))


def feed_forward_parameters(mixture: MixtureSpec, hidden: int, *, active: bool = False) -> int:
    """Parameters of one mixture: router, its balancing bias, routed and shared experts.

    `active`: only those of one token.
    """
    routed = (mixture.per_token if active else mixture.experts) * mixture.intermediate_size
    return router_parameters(mixture, hidden) + 3 * hidden * (routed + mixture.shared_intermediate_size)


def capacity(mixture: MixtureSpec, length: int) -> int | None:
    """Number of tokens of a sequence of `length` that one expert accepts. None if there is no limit."""
    if mixture.capacity_factor is None:
        return None
    # Decimal, as written: 1.1 as a binary number is slightly larger, and would accept one token too many.
    factor = Fraction(str(mixture.capacity_factor))
    return math.ceil(factor * length * mixture.per_token / mixture.experts)
