"""Mixtures of experts: routers, capacity and balancing, alone and spread over ranks."""

from __future__ import annotations

from typing import Any

from meshwright.api.mixture import Balancing, MixtureSpec, Router
from tests.parity.case import Case


def _mixture(**fields: Any) -> MixtureSpec:
    return MixtureSpec(**{"experts": 4, "per_token": 2, "intermediate_size": 16, "z_loss_weight": 0.01, **fields})


MIXTRAL = _mixture()

CASES = [Case("experts", {"data": 2, "expert": 2}, {"mixture": MIXTRAL}, smoke=True)]
