"""Constants from measured steps: damped Gauss-Newton on the logarithm of time, held towards what is known already.

The residual of a measurement is log(estimate / measured), so a step twice too long weighs as much as one twice too
short. Every constant is drawn towards its prior with the weight of `PRIOR` measurements, so that a few measurements
move the constants they can tell apart and leave the others alone (the maximum a posteriori of log-normal errors). The
same function serves published tables and the steps of a running job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log

from meshwright.planner.cost.constants import Constants

PRIOR = 0.1
"""Weight of the prior of one constant, in measurements."""
_LOW, _HIGH = 0.1, 10.0
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
) -> Constants:
    """The constants that explain `measured` seconds best.

    Raises:
        ValueError: the sequences differ in length, or a measurement is not positive.
    """
    if len(estimates) != len(measured):
        raise ValueError(f"{len(estimates)} estimates for {len(measured)} measurements")
    if any(seconds <= 0 for seconds in measured):
        raise ValueError("a measured step must take more than 0 seconds")
    start = prior or Constants()
    centre = [log(start.compute), log(start.communication), log(start.host)]
    point, point_weights = list(centre), list(weights or [1.0] * len(measured))
    for _ in range(_ROUNDS):
        rows = [
            _residual_and_slope(estimate, seconds, point) for estimate, seconds in zip(estimates, measured, strict=True)
        ]
        outlier_threshold = _outlier_threshold(rows)
        matrix = [[prior_weight if i == j else 0.0 for j in range(3)] for i in range(3)]
        right_side = [prior_weight * (centre[i] - point[i]) for i in range(3)]
        for (residual, slope), weight in zip(rows, point_weights, strict=True):
            effective_weight = weight / max(1.0, abs(residual) / outlier_threshold)
            for i in range(3):
                right_side[i] -= effective_weight * slope[i] * residual
                for j in range(3):
                    matrix[i][j] += effective_weight * slope[i] * slope[j]
        update = _solve(matrix, right_side)
        longest = max(abs(step) for step in update)
        shrink = min(1.0, 0.5 / longest) if longest else 1.0
        point = [min(log(_HIGH), max(log(_LOW), p + shrink * m)) for p, m in zip(point, update, strict=True)]
        if longest < 1e-4:
            break
    return Constants(*(exp(p) for p in point))


def _residual_and_slope(estimate: Estimator, seconds: float, point: list[float]) -> tuple[float, list[float]]:
    """(log error, its slope along each logarithm of a constant)."""
    base = log(estimate(Constants(*(exp(p) for p in point))))
    slope = []
    for index in range(3):
        shifted = [p + (_STEP if index == i else 0.0) for i, p in enumerate(point)]
        slope.append((log(estimate(Constants(*(exp(p) for p in shifted)))) - base) / _STEP)
    return base - log(seconds), slope


def _outlier_threshold(rows: list[tuple[float, list[float]]]) -> float:
    """Residual from which a measurement counts as an outlier (Huber's, at 1.5 times the median)."""
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
