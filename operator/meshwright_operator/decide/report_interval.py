"""How often agents report, and when a report is out of date. One source for the coordinator and for decisions.

The coordinator sets each agent's interval in its answer to a report. It also stores the interval with the report, so
that decisions use the interval that this agent follows.
"""

from __future__ import annotations

from meshwright.protocol.messages import DEFAULT_REPORT_SECONDS

MAX_REPORT_SECONDS = 20.0
REPORTS_PER_SECOND_OF_JOB = 64.0
"""A larger job reports less often."""
REPORTS_PER_SECOND = 500.0
"""Reports of all jobs. If there are more workers, all of them report less often."""
FRESH_REPORT_SECONDS = 15.0
"""Age above which a report is out of date, at the default interval."""
SILENT_SECONDS = 60.0
"""How long an agent may be silent, at the default interval. It reports about thirty times in this time."""
SMALL_JOB_WORKERS = 64
URGENT_SECONDS_PER_WORKER = 0.00025
MAX_URGENT_SPACING_SECONDS = 0.5
FRESH_INTERVALS = 2.5
SILENT_INTERVALS = 4.0
HEARD_SECONDS = 10.0
"""Time after a start of the operator in which each agent of a small job reports."""


def report_seconds(workers: int, all_workers: int) -> float:
    """The interval of the agents of a job with this many workers, of all jobs' workers."""
    wanted = max(workers / REPORTS_PER_SECOND_OF_JOB, all_workers / REPORTS_PER_SECOND)
    return round(min(max(DEFAULT_REPORT_SECONDS, wanted), MAX_REPORT_SECONDS), 1)


def urgent_spacing(workers: int) -> float:
    """Time between two urgent reconciles of a job. A reconcile costs as much as the job has workers.

    Without it, a gang whose agents arrive one after the other would cost the square of its size.
    """
    return 0.0 if workers <= SMALL_JOB_WORKERS else min(workers * URGENT_SECONDS_PER_WORKER, MAX_URGENT_SPACING_SECONDS)


def is_fresh(age: float, interval: float) -> bool:
    """Whether a report of this age is up to date, from an agent that follows this interval."""
    return age <= max(FRESH_REPORT_SECONDS, FRESH_INTERVALS * interval)


def silent_after(interval: float) -> float:
    """Seconds without a report after which an agent that follows this interval counts as silent."""
    return max(SILENT_SECONDS, SILENT_INTERVALS * interval)


def heard_after(workers: int) -> float:
    """Seconds after a start of the operator in which each agent of a job with this many workers has reported.

    Agents that could not reach it try again within their interval.
    """
    return max(HEARD_SECONDS, FRESH_INTERVALS * report_seconds(workers, 0))


def known_idle_seconds(idle: float, age: float, interval: float) -> float:
    """For how long a rank is known to be idle, if its last report of this age said `idle`.

    A rank that is reported rarely may have made progress since. Up to the interval, the age of the report says nothing.
    """
    return idle + max(0.0, age - (interval - DEFAULT_REPORT_SECONDS))
