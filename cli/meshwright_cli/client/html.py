"""A job as an HTML table, for notebooks. Pure; everything that comes from the cluster is escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from meshwright_cli.text import duration

if TYPE_CHECKING:
    from meshwright_cli.client.objects import Job

COLORS = {"complete": "#1a7f37", "failed": "#cf222e", "active": "#0969da"}
"""Color of the state."""


def job_page(job: Job) -> str:
    """State, progress, plan and placement of a job."""
    rows = [(name, value) for name, value in _facts(job) if value]
    cells = "".join(
        f"<tr><th style='text-align:left;padding-right:1em'>{escape(name)}</th>"
        f"<td style='text-align:left'>{escape(value)}</td></tr>"
        for name, value in rows
    )
    color = COLORS["complete" if job.complete else "failed" if job.failed else "active"]
    title = f"{escape(job.namespace)}/{escape(job.name)}"
    return (
        f"<div><b>{title}</b> <span style='color:{color};font-weight:600'>{escape(job.state)}</span>"
        f"{_bar(job)}<table>{cells}</table></div>"
    )


def _facts(job: Job) -> list[tuple[str, str]]:
    status = job.status
    steps = f"{status.step or 0:,} of {status.total_steps:,}" if status.total_steps else ""
    nodes = {entry.node for entry in status.placement.workers} if status.placement else set()
    return [
        ("Message", job.message),
        ("Steps", steps),
        ("Loss", status.loss),
        ("Tokens/s", f"{status.tokens_per_second:,}" if status.tokens_per_second else ""),
        ("Time left", duration(status.eta_seconds) if status.eta_seconds is not None and not job.finished else ""),
        ("Layout", status.plan.summary if status.plan else ""),
        ("Ranks ready", status.ready_ranks),
        ("Nodes", str(len(nodes)) if nodes else ""),
        ("Checkpoint", f"step {status.checkpoint.step:,}" if status.checkpoint else ""),
        ("Restarts", str(status.restart_count) if status.restart_count else ""),
    ]


def _bar(job: Job) -> str:
    if not job.status.total_steps:
        return ""
    share = min(100.0, 100 * (job.status.step or 0) / job.status.total_steps)
    return (
        f"<div role='progressbar' aria-valuenow='{share:.0f}' style='background:#d0d7de;height:6px;width:24em'>"
        f"<div style='background:#0969da;height:6px;width:{share:.1f}%'></div></div>"
    )
