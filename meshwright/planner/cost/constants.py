"""The fitted constants: three factors per (accelerator, runtime), 1 meaning what physics and data sheets say.

Each multiplies one part of a step: computation, exposed communication, and the host's and the collectives' constant
costs. `calibrate` finds them from measured steps; a pair that was never seen takes its accelerator's, its runtime's,
or the shipped default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Constants:
    """Factors on the three parts of a step's time."""

    compute: float = 1.0
    communication: float = 1.0
    host: float = 1.0


HOST_PER_LAYER = 0.9e-3
"""Seconds that the host needs to launch one pass through a layer; hidden where its kernels run longer."""
SYNCHRONISE = 0.1e-3
"""Seconds that a blocking collective on the critical path loses to jitter between its ranks."""
PER_STEP = 15e-3
"""Seconds of a step that no part explains: data, logging, the loss's reduction, the optimizer's launches."""


FITTED: Mapping[tuple[str, str], Constants] = MappingProxyType(
    {
        ("A100-SXM4-80GB", "megatron-deepspeed"): Constants(0.999, 0.813, 1.168),
        ("A100-SXM4-80GB", "megatron-lm"): Constants(0.962, 0.979, 0.982),
        ("A100-SXM4-80GB", "vtrain-single"): Constants(0.849, 0.484, 0.793),
        ("A100-SXM4-80GB", "zero-bubble"): Constants(0.964, 1.003, 1.021),
        ("GH200-96GB", "megatron-deepspeed"): Constants(1.646, 1.811, 0.738),
        ("H100-SXM5-80GB", "nanotron"): Constants(1.006, 1.605, 1.086),
        ("H100-SXM5-96GB-HBM2E", "torchtitan"): Constants(1.115, 1.100, 1.024),
    }
)
"""(accelerator, runtime) -> constants, as `benchmarks/planner_accuracy.py --fit` finds them on published runs."""

DEFAULT = Constants()


def constants_for(accelerator: str, runtime: str) -> Constants:
    """Constants of a pair.

    For one that was never seen: the geometric mean over the same accelerator's pairs, else over the same runtime's,
    else the default.
    """
    fitted = FITTED.get((accelerator, runtime))
    if fitted is not None:
        return fitted
    for position, name in ((0, accelerator), (1, runtime)):
        similar = [constants for pair, constants in FITTED.items() if pair[position] == name]
        if similar:
            return _mean(similar)
    return DEFAULT


def _mean(all_constants: list[Constants]) -> Constants:
    count = len(all_constants)
    return Constants(
        prod(one.compute for one in all_constants) ** (1 / count),
        prod(one.communication for one in all_constants) ** (1 / count),
        prod(one.host for one in all_constants) ** (1 / count),
    )
