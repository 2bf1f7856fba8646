"""What jobs have spent: GPU-hours by namespace, job and cause, from the ledger in their status. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from meshwright.api.goodput import GoodputStatus, TimeCause, gpu_milliseconds_by_cause
from meshwright_cli.client.objects import Job, parse_time

_MILLISECONDS_OF_AN_HOUR = 3_600_000
_ORDER = {cause.value: position for position, cause in enumerate(TimeCause)}


@dataclass(frozen=True, slots=True)
class Spent:
    """GPU-hours of one job for one cause."""

    namespace: str
    job: str
    cause: str
    gpu_hours: float


def spent_by(jobs: Iterable[Job], now: datetime) -> list[Spent]:
    """What the jobs have spent up to `now`, by namespace and job. The causes have the order of the API."""
    rows = []
    for job in jobs:
        ledger = job.status.goodput
        if ledger is None:
            continue
        passed = _since_change(ledger, now)
        for cause, milliseconds in gpu_milliseconds_by_cause(ledger, passed).items():
            if milliseconds:
                rows.append(Spent(job.namespace, job.name, cause, milliseconds / _MILLISECONDS_OF_AN_HOUR))
    return sorted(rows, key=lambda row: (row.namespace, row.job, _ORDER.get(row.cause, len(_ORDER)), row.cause))


def without_ledger(jobs: Iterable[Job]) -> list[Job]:
    """Jobs that have run, and whose GPU time is unknown: an operator before 0.2 wrote their status."""
    return [job for job in jobs if job.status.start_time and not (job.status.goodput and job.status.goodput.gpus_since)]


def as_csv(rows: Sequence[Spent], price: float | None) -> str:
    """One line for each row, with a header. The column `cost` is empty without a price of a GPU-hour."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["namespace", "job", "cause", "gpu_hours", "cost"])
    for row in rows:
        cost = "" if price is None else f"{row.gpu_hours * price:.2f}"
        writer.writerow([row.namespace, row.job, row.cause, f"{row.gpu_hours:.4f}", cost])
    return text.getvalue()


def as_table(rows: Sequence[Spent], price: float | None) -> list[str]:
    """Lines of a table: each job with its causes, the sum of each namespace with several jobs, and the sum of all."""
    if not rows:
        return ["No job has spent GPU time."]
    entries: list[tuple[str, str, str, float]] = []
    for namespace in dict.fromkeys(row.namespace for row in rows):
        own = [row for row in rows if row.namespace == namespace]
        names = list(dict.fromkeys(row.job for row in own))
        for name in names:
            of_job = [row for row in own if row.job == name]
            entries += [(namespace, name, row.cause, row.gpu_hours) for row in of_job]
            if len(of_job) > 1:
                entries.append((namespace, name, "all", _sum(of_job)))
        if len(names) > 1:
            entries.append((namespace, "all", "all", _sum(own)))
    if len({row.namespace for row in rows}) > 1:
        entries.append(("all", "all", "all", _sum(rows)))
    header = ["NAMESPACE", "JOB", "CAUSE", "GPU-HOURS", *(["COST"] if price is not None else [])]
    cells = [
        [*entry[:3], f"{entry[3]:,.2f}", *([f"{entry[3] * price:,.2f}"] if price is not None else [])]
        for entry in entries
    ]
    return _aligned([header, *cells], left=3)


def _sum(rows: Iterable[Spent]) -> float:
    return sum(row.gpu_hours for row in rows)


def _aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _since_change(ledger: GoodputStatus, now: datetime) -> int:
    """Milliseconds since the number of GPUs last changed."""
    since = parse_time(ledger.gpus_since)
    return 0 if since is None else max(0, round((now - since).total_seconds() * 1000))
