"""The table of `meshwright list`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from meshwright_cli.client.objects import Job, parse_time
from meshwright_cli.jobs.output import table
from meshwright_cli.text import age, duration

HEADER = ("NAME", "STATUS", "RANKS", "STEP", "LOSS", "LEFT", "RESTARTS", "CHECKPOINT", "AGE")
WIDE = ("PLAN", "TOKENS/S", "NODES", "PRIORITY", "MESSAGE")
CHANGING = ("LEFT", "CHECKPOINT", "AGE", "TOKENS/S")
"""Columns that change all the time by themselves: a watch prints no row because of them only."""


def list_header(*, wide: bool, namespaces: bool) -> tuple[str, ...]:
    """Names of the columns."""
    return (*(("NAMESPACE",) if namespaces else ()), *HEADER, *(WIDE if wide else ()))


def list_row(job: Job, now: datetime, *, wide: bool, namespaces: bool) -> tuple[str, ...]:
    """The cells of a job."""
    return (*((job.namespace,) if namespaces else ()), *_row(job, now), *(_more(job) if wide else ()))


def list_lines(jobs: Sequence[Job], now: datetime, *, wide: bool, namespaces: bool) -> list[str]:
    """A row for each job."""
    rows = [list_row(job, now, wide=wide, namespaces=namespaces) for job in jobs]
    return table(list_header(wide=wide, namespaces=namespaces), rows)


def _row(job: Job, now: datetime) -> tuple[str, ...]:
    status = job.status
    total = f"/{status.total_steps}" if status.total_steps else ""
    left = status.eta_seconds if job.state == "Running" else None
    saved = parse_time(status.checkpoint.time) if status.checkpoint else None
    return (
        job.name,
        "Terminating" if job.deleting else job.state,
        status.ready_ranks,
        f"{status.step}{total}" if status.step is not None else "",
        status.loss,
        duration(left) if left is not None else "",
        str(status.restart_count) if status.restart_count else "",
        f"{age(saved, now)} ago" if saved is not None else "",
        age(job.created, now),
    )


def _more(job: Job) -> tuple[str, ...]:
    status = job.status
    nodes = {entry.node for entry in status.placement.workers} if status.placement else set()
    priority = (job.raw.get("spec") or {}).get("priority")
    return (
        status.plan.summary if status.plan else "",
        str(status.tokens_per_second) if status.tokens_per_second else "",
        str(len(nodes)) if nodes else "",
        str(priority) if priority else "",
        job.message,
    )
