"""A job as an HTML table, for notebooks. Pure; everything that comes from the cluster is escaped."""

from __future__ import annotations

from html import escape

from meshwright.api import conditions
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_cli.text import duration

ACTIVE = "active"
COLORS = {conditions.COMPLETE: "#1a7f37", conditions.FAILED: "#cf222e", ACTIVE: "#0969da"}
"""Color of the state, by outcome."""


def job_page(title: str, message: str, status: ParallelTrainingJobStatus) -> str:
    """State, progress, plan and placement of a job.

    Args:
        title: its namespace and name.
        message: what its state means.
        status: its status.
    """
    rows = [(name, value) for name, value in _facts(message, status) if value]
    cells = "".join(
        f"<tr><th style='text-align:left;padding-right:1em'>{escape(name)}</th>"
        f"<td style='text-align:left'>{escape(value)}</td></tr>"
        for name, value in rows
    )
    color, state = COLORS[_outcome(status)], conditions.state(status.conditions)
    return (
        f"<div><b>{escape(title)}</b> <span style='color:{color};font-weight:600'>{escape(state)}</span>"
        f"{_bar(status)}<table>{cells}</table></div>"
    )


def _facts(message: str, status: ParallelTrainingJobStatus) -> list[tuple[str, str]]:
    steps = f"{status.step or 0:,} of {status.total_steps:,}" if status.total_steps else ""
    nodes = {entry.node for entry in status.placement.workers} if status.placement else set()
    return [
        ("Message", message),
        ("Steps", steps),
        ("Loss", status.loss),
        ("Tokens/s", f"{status.tokens_per_second:,}" if status.tokens_per_second else ""),
        ("Time left", _time_left(status)),
        ("Layout", status.plan.summary if status.plan else ""),
        ("Ranks ready", status.ready_ranks),
        ("Nodes", str(len(nodes)) if nodes else ""),
        ("Checkpoint", f"step {status.checkpoint.step:,}" if status.checkpoint else ""),
        ("Restarts", str(status.restart_count) if status.restart_count else ""),
    ]


def _outcome(status: ParallelTrainingJobStatus) -> str:
    """The condition that says how a job ended, or `ACTIVE`."""
    ends = (conditions.COMPLETE, conditions.FAILED)
    return next((end for end in ends if conditions.is_true(status.conditions, end)), ACTIVE)


def _time_left(status: ParallelTrainingJobStatus) -> str:
    if status.eta_seconds is None or _outcome(status) != ACTIVE:
        return ""
    return duration(status.eta_seconds)


def _bar(status: ParallelTrainingJobStatus) -> str:
    if not status.total_steps:
        return ""
    share = min(100.0, 100 * (status.step or 0) / status.total_steps)
    return (
        f"<div role='progressbar' aria-valuenow='{share:.0f}' style='background:#d0d7de;height:6px;width:24em'>"
        f"<div style='background:#0969da;height:6px;width:{share:.1f}%'></div></div>"
    )
