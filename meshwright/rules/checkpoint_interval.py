"""How often to save a checkpoint: the interval that wastes the least time, for a save time and a failure rate.

All times are in seconds. The model is that of Daly (Future Generation Computer Systems 22(3), 2006, section 3) and of
Aupy, Robert, Vivien and Zaidouni (Parallel Computing 39(2), 2013): failures are independent and arrive at a constant
rate while the job runs, loads or saves, but not while it is down. Training alternates between an interval and a save. A
failure repeats what was trained and saved since the last complete save.

Young's first-order interval is `sqrt(2 * save * mtbf)`. Daly's higher-order series corrects it for saves that are long
against the time between failures. `best_interval_seconds` solves the equation that both approximate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshwright.figures import format_number

DEFAULT_NODE_FAILURE_RATE = 3.8
"""Failures that stop a job for each 1,000 node-days: 419 stops of 2,048 nodes in 54 days (arXiv 2407.21783, 3.3.4)."""

LONGEST_SECONDS = 86400.0
"""The longest interval of `Auto`."""

_SECONDS_OF_1000_NODE_DAYS = 1000 * 86400.0
_LARGEST_EXPONENT = 700.0
"""`exp` of more overflows."""
_SERIES_BELOW = 1e-9
"""Save time over time between failures below which Young's interval is exact to 1 in 10,000."""


def mtbf_of_nodes(nodes: int, failures_per_1000_node_days: float = DEFAULT_NODE_FAILURE_RATE) -> float:
    """Mean seconds between failures of a job on this number of nodes. Infinite if the rate is 0."""
    rate = nodes * failures_per_1000_node_days
    return _SECONDS_OF_1000_NODE_DAYS / rate if rate > 0 else math.inf


def estimated_mtbf(failures: int, trained_seconds: float, expected: float) -> float:
    """Mean seconds between failures of a job that has trained for a while and failed this often.

    One failure after `expected` seconds is added to those observed: the mean of a Gamma posterior. So a job that has
    not failed yet has an estimate, and a job that has failed often has its own.

    Args:
        failures: Failures so far, of all causes that repeat steps.
        trained_seconds: Time in which they could occur: that of the ledger without `Queued` and `Suspended`.
        expected: What to expect of a job about which nothing is known, from `mtbf_of_nodes`.
    """
    if math.isinf(expected):
        return trained_seconds / failures if failures else math.inf
    return (expected + max(0.0, trained_seconds)) / (1 + max(0, failures))


def best_interval_seconds(save_seconds: float, mtbf_seconds: float, durable_seconds: float = 0.0) -> float:
    """Seconds of training between the end of a save and the begin of the next one that waste the least time.

    The time of a restart does not change it: a restart costs the same after any interval. With `x = interval / mtbf`
    it solves `1 - x = exp(-x - save / mtbf)`, where the derivative of `useful_share` is 0.

    Args:
        save_seconds: Time for which training stops for a save. For an asynchronous save it is the stall.
        mtbf_seconds: Mean time between failures, without the time in which the job is down.
        durable_seconds: Time from the end of the stall until an asynchronous save is complete: the interval is at least
            as long, so that saves do not overlap.

    Returns:
        The interval. Infinite if there are no failures. If a save costs nothing, `durable_seconds`.
    """
    if save_seconds < 0 or mtbf_seconds <= 0 or durable_seconds < 0:
        raise ValueError("times of saves must be at least 0, and the time between failures must be above 0")
    if math.isinf(mtbf_seconds):
        return math.inf
    ratio = save_seconds / mtbf_seconds
    share = math.sqrt(2.0 * ratio) if ratio < _SERIES_BELOW else _root(ratio)
    return max(durable_seconds, share * mtbf_seconds)


def _root(ratio: float) -> float:
    """The solution of `1 - x = exp(-x - ratio)` between 0 and 1, by Newton's method from Young's interval."""
    x = min(math.sqrt(2.0 * ratio), 1.0)
    for _ in range(60):
        power = math.exp(-x - ratio)
        step = (1.0 - x - power) / (power - 1.0)
        x = min(max(x - step, 0.0), 1.0)
        if abs(step) < 1e-14:
            break
    return x


@dataclass(frozen=True, slots=True)
class AutoInterval:
    """The interval of `checkpoint.every: Auto`, and what it follows from."""

    seconds: float
    reason: str


def auto_interval(
    *,
    stall_seconds: float,
    durable_seconds: float,
    step_seconds: float,
    nodes: int,
    failures: int,
    trained_seconds: float,
) -> AutoInterval:
    """The interval that `best_interval_seconds` gives for measured saves and `estimated_mtbf`.

    It is at least the time of a save until it is complete, and of a step, and at most a day.

    Args:
        stall_seconds: Time for which training stops for a save.
        durable_seconds: Time until it is complete.
        step_seconds: Time of a step.
        nodes: Nodes of the job.
        failures: Failures of the job so far.
        trained_seconds: Time in which they could occur.
    """
    mtbf = estimated_mtbf(failures, trained_seconds, mtbf_of_nodes(max(1, nodes)))
    best = best_interval_seconds(max(0.0, stall_seconds), mtbf, max(0.0, durable_seconds))
    seconds = min(LONGEST_SECONDS, max(best, step_seconds))
    seen = f"{failures or 'none yet'} in {trained_seconds / 3600:.1f} h"
    reason = (
        f"Auto: a save stops steps for {format_number(stall_seconds, 2)} s and is complete after "
        f"{format_number(durable_seconds, 2)} s; a failure is expected every {format_number(mtbf / 3600, 2)} h ({seen})"
    )
    return AutoInterval(seconds, reason)


def interval_in_steps(interval_seconds: float, step_seconds: float, most: int = 1_000_000_000) -> int:
    """Steps between two saves for an interval in seconds: at least 1, at most `most`."""
    if step_seconds <= 0 or math.isinf(interval_seconds):
        return most
    return min(most, max(1, round(interval_seconds / step_seconds)))


def useful_share(
    interval_seconds: float,
    save_seconds: float,
    mtbf_seconds: float,
    down_seconds: float = 0.0,
    load_seconds: float = 0.0,
) -> float:
    """Share of the time in which training advances: `T / ((mtbf + down) * exp(load/mtbf) * (exp((T+save)/mtbf) - 1))`.

    Args:
        interval_seconds: T, seconds of training between two saves.
        save_seconds: Time for which training stops for a save.
        mtbf_seconds: Mean time between failures, without the time in which the job is down.
        down_seconds: Time after a failure in which no other failure can occur.
        load_seconds: Time after it in which one can: the load of the checkpoint.
    """
    if math.isinf(mtbf_seconds):
        period = interval_seconds + save_seconds
        return 1.0 if math.isinf(interval_seconds) or period <= 0 else interval_seconds / period
    load, period = load_seconds / mtbf_seconds, (interval_seconds + save_seconds) / mtbf_seconds
    if period <= 0 or load + period > _LARGEST_EXPONENT:
        return 0.0
    return interval_seconds / ((mtbf_seconds + down_seconds) * math.exp(load) * math.expm1(period))
