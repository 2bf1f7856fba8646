"""The fitted constants: three factors per (accelerator, runtime). 1 is the value from physics and data sheets.

Each multiplies one part of a step: computation, exposed communication, or the constant costs of the host and of
collectives. `calibrate` fits them to measured steps. A pair without measurements gets the constants of its accelerator,
else those of its runtime, else the default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log, prod
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Constants:
    """Factors on the three parts of a step's time."""

    compute: float = 1.0
    communication: float = 1.0
    host: float = 1.0


HOST_PER_LAYER = 0.8e-3
"""Seconds that the host needs to launch one pass through a layer. Hidden if its kernels run longer.

Runs of vTrain that are too small for anything else to matter (h = 1,024 and 2,048 on 2 and 4 GPUs) take 0.75 to 0.91 ms
per layer and pass.
"""
SYNCHRONIZE = 0.1e-3
"""Seconds that a blocking collective of `JITTER_RANKS` ranks, or a send to the next rank, loses to jitter."""
JITTER_RANKS = 8
PER_STEP = 1e-3
"""Seconds of a step outside all other parts: data, the loss's reduction, logging.

Steps that differ only in their number of micro-batches are on a line. Its intercept, without the time that the
optimizer's bytes take, is 0.0 ms in the median of vTrain's 40 lines without a pipeline (quartiles -0.2 and 0.2 ms), and
1.4 ms in Sailor's.
"""


@lru_cache(maxsize=256)
def jitter(ranks: int) -> float:
    """Seconds that a blocking collective of so many ranks waits for the slowest of them, on average over the ranks.

    If what delays a rank is exponentially distributed, the slowest of n is late by H_n times the mean, and the others
    wait H_n - 1 times the mean, where H_n is the n-th harmonic number.
    """
    return SYNCHRONIZE * (_harmonic(ranks) - 1.0) / (_harmonic(JITTER_RANKS) - 1.0)


def _harmonic(count: int) -> float:
    return sum(1.0 / k for k in range(1, count + 1))


FITTED: Mapping[tuple[str, str], Constants] = MappingProxyType(
    {
        ("A100-SXM4-80GB", "megatron-deepspeed"): Constants(1.008, 0.797, 1.057),
        ("A100-SXM4-80GB", "megatron-lm"): Constants(0.965, 0.981, 0.983),
        ("A100-SXM4-80GB", "vtrain-single"): Constants(0.864, 0.871, 1.056),
        ("A100-SXM4-80GB", "zero-bubble"): Constants(0.970, 1.003, 1.029),
        ("GH200-96GB", "megatron-deepspeed"): Constants(1.728, 1.706, 0.988),
        ("H100-SXM5-80GB", "nanotron"): Constants(1.018, 1.649, 1.253),
        ("H100-SXM5-96GB-HBM2E", "torchtitan"): Constants(1.066, 0.953, 1.015),
    }
)
"""(accelerator, runtime) -> constants, as `benchmarks/planner_accuracy.py --fit` fits them to published runs."""

DEFAULT = Constants()


def constants_for(accelerator: str, runtime: str, known: Mapping[tuple[str, str], Constants] = FITTED) -> Constants:
    """Constants of a pair, from those of the `known` pairs.

    If the pair has no measurements: the geometric mean over the pairs of the same accelerator, else of the same
    runtime, else the default.
    """
    fitted = known.get((accelerator, runtime))
    if fitted is not None:
        return fitted
    for position, name in ((0, accelerator), (1, runtime)):
        similar = [constants for pair, constants in known.items() if pair[position] == name]
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


PRIOR = 0.1
"""Weight of the prior of one constant, as a number of measurements."""
WIDEST = 10.0
"""Largest factor by which a fitted constant may differ from the value from physics and data sheets."""
_STEP = 1e-3
_ROUNDS = 12

Estimator = Callable[[Constants], float]
"""Seconds of one step as a function of the constants."""


def calibrate(
    estimates: Sequence[Estimator],
    measured: Sequence[float],
    prior: Constants | None = None,
    weights: Sequence[float] | None = None,
    prior_weight: float = PRIOR,
    reach: float | None = None,
) -> Constants:
    """Fit the constants to `measured` seconds.

    Args:
        estimates: Seconds of each measured step, as a function of the constants.
        measured: Its measured seconds.
        prior: Where the constants start.
        weights: Weight of each measurement.
        prior_weight: Weight of the prior.
        reach: Largest factor by which a constant may differ from the prior. By default only `WIDEST` limits it.

    Raises:
        ValueError: the sequences differ in length, or a measurement is not positive.
    """
    if len(estimates) != len(measured):
        raise ValueError(f"{len(estimates)} estimates for {len(measured)} measurements")
    if any(seconds <= 0 for seconds in measured):
        raise ValueError("a measured step must take more than 0 seconds")
    start = prior or Constants()
    center = [log(start.compute), log(start.communication), log(start.host)]
    lowest, highest = [-log(WIDEST)] * 3, [log(WIDEST)] * 3
    if reach is not None:
        lowest = [max(low, c - log(reach)) for low, c in zip(lowest, center, strict=True)]
        highest = [min(high, c + log(reach)) for high, c in zip(highest, center, strict=True)]
    point, point_weights = list(center), list(weights or [1.0] * len(measured))
    for _ in range(_ROUNDS):
        rows = [
            _residual_and_slope(estimate, seconds, point) for estimate, seconds in zip(estimates, measured, strict=True)
        ]
        update = _newton_step(rows, point_weights, prior_weight, [c - p for c, p in zip(center, point, strict=True)])
        longest = max(abs(step) for step in update)
        shrink = min(1.0, 0.5 / longest) if longest else 1.0
        moved = [p + shrink * m for p, m in zip(point, update, strict=True)]
        point = [min(high, max(low, p)) for p, low, high in zip(moved, lowest, highest, strict=True)]
        if longest < 1e-4:
            break
    return Constants(*(exp(p) for p in point))


def _newton_step(
    rows: Sequence[tuple[float, Sequence[float]]],
    weights: Sequence[float],
    prior_weight: float,
    to_prior: Sequence[float],
) -> list[float]:
    """The change of the logarithms of the constants that minimizes the weighted squares of linearized residuals.

    Args:
        rows: Residual and slopes of each measurement. Residuals beyond the outlier threshold weigh less (Huber).
        weights: Weight of each measurement.
        prior_weight: Weight of the distance from the prior.
        to_prior: From the current point to the prior.
    """
    outlier_threshold = _outlier_threshold(rows)
    matrix = [[prior_weight if i == j else 0.0 for j in range(3)] for i in range(3)]
    right_side = [prior_weight * distance for distance in to_prior]
    for (residual, slope), weight in zip(rows, weights, strict=True):
        effective_weight = weight / max(1.0, abs(residual) / outlier_threshold)
        for i in range(3):
            right_side[i] -= effective_weight * slope[i] * residual
            for j in range(3):
                matrix[i][j] += effective_weight * slope[i] * slope[j]
    return _solve(matrix, right_side)


def agreed(votes: Sequence[Constants], prior: Constants) -> Constants:
    """What most of the fits agree on: for each constant the median, in logarithms.

    Of the two middle ones it is the one closer to the prior, and the prior itself if they are on both sides of it. A
    constant therefore moves only as far as at least half of the fits move it.
    """
    return Constants(
        _agreed([one.compute for one in votes], prior.compute),
        _agreed([one.communication for one in votes], prior.communication),
        _agreed([one.host for one in votes], prior.host),
    )


def _agreed(values: list[float], prior: float) -> float:
    moves = sorted(log(value / prior) for value in values)
    low, high = moves[(len(moves) - 1) // 2], moves[len(moves) // 2]
    return prior * exp(min(low, high, key=abs) if low * high > 0 else 0.0)


def _residual_and_slope(estimate: Estimator, seconds: float, point: list[float]) -> tuple[float, list[float]]:
    """(log error, its slope along each logarithm of a constant)."""
    base = log(estimate(Constants(*(exp(p) for p in point))))
    slope = []
    for index in range(3):
        shifted = [p + (_STEP if index == i else 0.0) for i, p in enumerate(point)]
        slope.append((log(estimate(Constants(*(exp(p) for p in shifted)))) - base) / _STEP)
    return base - log(seconds), slope


def _outlier_threshold(rows: Sequence[tuple[float, Sequence[float]]]) -> float:
    """Residual above which a measurement counts as an outlier (Huber's, at 1.5 times the median)."""
    ordered = sorted(abs(residual) for residual, _ in rows)
    return max(0.02, 1.5 * ordered[len(ordered) // 2]) if ordered else 1.0


def _solve(matrix: list[list[float]], right_side: list[float]) -> list[float]:
    """Solution of a small positive definite system, by elimination."""
    size = len(right_side)
    rows = [[*matrix[i], right_side[i]] for i in range(size)]
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        solution[i] = (rows[i][size] - sum(rows[i][j] * solution[j] for j in range(i + 1, size))) / rows[i][i]
    return solution
