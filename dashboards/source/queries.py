"""What the boards' PromQL expressions have in common: selectors of the variables, and idioms.

Every board has the variable `cluster`. Its value for all clusters also matches series without this label, which is what
a Prometheus of one cluster has.
"""

from __future__ import annotations

CLUSTER = 'cluster=~"$cluster"'
JOB = f'{CLUSTER},namespace="$namespace",job_name="$job_name"'
"""Selects the job of the Job board."""
JOBS = f'{CLUSTER},namespace=~"$namespace"'
"""Selects the jobs of the Fleet board."""
OPERATOR = f'{CLUSTER},instance=~"$instance"'
"""Selects the operator's processes of the Operator board."""

SAME_JOB = "on (cluster, namespace, job_name)"
"""Matches series of the same job."""
BY_JOB = "by (cluster, namespace, job_name)"

RATE = "$__rate_interval"
"""The shortest window with enough samples for `rate`."""

HOLDS_NO_GPU = "Queued|Suspended"
"""Causes of time in which a job has no pods."""

PLANNED_RESTARTS = "SpecChanged|Rescaled|Rebalanced|JobPreempted|NodeDrained"
"""Causes of restarts that a person or the operator decides. All others are failures."""


def conditions(selector: str, *by: str) -> str:
    """Return the conditions of jobs: 1 for the series with their status. `selector` may name a `type` or `status`."""
    series = f"ptj_job_status_condition{{{selector}}}"
    return f"max by ({', '.join(by)}) ({series} == 1)" if by else series


def rate(metric: str, selector: str, *by: str) -> str:
    """Return the rate of a counter, summed by some labels."""
    inner = f"rate({metric}{{{selector}}}[{RATE}])"
    return f"sum by ({', '.join(by)}) ({inner})" if by else f"sum({inner})"


def quantile(share: float, histogram: str, selector: str, *by: str) -> str:
    """Return a quantile of a histogram over the rate interval."""
    labels = ", ".join((*by, "le"))
    return f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket{{{selector}}}[{RATE}])))"


def mean(histogram: str, selector: str, *by: str) -> str:
    """Return the mean of a histogram over the rate interval."""
    return f"{rate(f'{histogram}_sum', selector, *by)} / {rate(f'{histogram}_count', selector, *by)}"


def or_zero(expression: str, label: str, present: str) -> str:
    """Return an expression, or a series `none` of zeros while it has none: counters appear with the first event.

    The zeros come from the gauge `present`: a panel has no data if nothing is scraped.
    """
    zeros = f'label_replace(0 * max({present}), "{label}", "none", "", "")'
    return f"{expression} or on () {zeros}"


def new_events(counter: str, label: str, window: str, present: str) -> str:
    """Return the increase of a job's counter over a window, by a label, where it is positive.

    A series of such a counter appears with the first event, which `increase` does not count. `present` is a series that
    exists while the operator knows the job. If it had no value one window ago, nothing is counted.
    """
    now = f"max by (cluster, namespace, job_name, {label}) ({counter})"
    before = f"max by (cluster, namespace, job_name, {label}) ({counter} offset {window})"
    return f"({now} - ({before} or 0 * {now})) > 0 and {SAME_JOB} ({present} offset {window})"


def padded_rank(expression: str) -> str:
    """Return an expression with four digits in the label `rank`, so that ranks are sorted as numbers."""
    for pattern, zeros in (("([0-9])", "000"), ("([0-9]{2})", "00"), ("([0-9]{3})", "0")):
        expression = f'label_replace({expression}, "rank", "{zeros}$1", "rank", "{pattern}")'
    return expression
