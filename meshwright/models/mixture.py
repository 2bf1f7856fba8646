"""Mixtures of experts in numbers: which layers are one, what they hold, how much an expert takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from meshwright.api.mixture import Balancing, MixtureSpec, Router


def is_mixture(mixture: MixtureSpec | None, layer: int) -> bool:
    """Whether layer number `layer` (from 0) is a mixture."""
    if mixture is None or layer < mixture.dense_layers:
        return False
    return (layer - mixture.dense_layers) % mixture.every == mixture.every - 1


def mixture_layers(mixture: MixtureSpec | None, layers: int) -> list[int]:
    """The layers of a model of `layers` that are mixtures."""
    return [layer for layer in range(layers) if is_mixture(mixture, layer)]


def router_parameters(mixture: MixtureSpec, hidden: int) -> int:
    """Parameters of one router, with its balancing bias."""
    return mixture.experts * (hidden + (mixture.balancing is Balancing.BIAS))


def feed_forward_parameters(mixture: MixtureSpec, hidden: int, *, active: bool = False) -> int:
    """Parameters of one mixture: router, its balancing bias, routed and shared experts; `active`: what a token uses."""
    routed = (mixture.per_token if active else mixture.experts) * mixture.intermediate_size
    return router_parameters(mixture, hidden) + 3 * hidden * (routed + mixture.shared_intermediate_size)


def capacity(mixture: MixtureSpec, length: int) -> int | None:
    """Tokens of a sequence of `length` that one expert takes; None where it takes all."""
    if mixture.capacity_factor is None:
        return None
    # As written: 1.1 as a binary number is a little more, and would take one token too many.
    factor = Fraction(str(mixture.capacity_factor))
    return math.ceil(factor * length * mixture.per_token / mixture.experts)


def mixture_problems(mixture: MixtureSpec, layers: int) -> Iterator[tuple[str, str]]:
    """Fields of `model.mixture` that contradict each other or the number of layers: the field, and what must hold."""
    experts, groups = mixture.experts, mixture.groups
    if mixture.per_token > experts:
        yield "perToken", f"must be at most `model.mixture.experts: {experts}`"
    if experts % groups:
        yield "groups", f"must divide `model.mixture.experts: {experts}`"
    elif mixture.groups_per_token > groups:
        yield "groupsPerToken", f"must be at most `model.mixture.groups: {groups}`"
    elif mixture.per_token > mixture.groups_per_token * experts // groups:
        experts_allowed = mixture.groups_per_token * experts // groups
        yield "perToken", f"must be at most {experts_allowed}, the experts of `model.mixture.groupsPerToken` groups"
    if mixture.per_token == 1 and mixture.renormalize and mixture.router is Router.SOFTMAX:
        yield "renormalize", "must be false with `perToken: 1`: a weight of always 1 gives the router no gradient"
    if mixture.auxiliary_weight is not None and mixture.balancing is Balancing.NONE:
        yield "auxiliaryWeight", "needs `balancing: Auxiliary` or `Bias`"
    if not mixture_layers(mixture, layers):
        yield "denseLayers", f"plus `every` must be at most `model.layers: {layers}`: some layer has to be a mixture"
