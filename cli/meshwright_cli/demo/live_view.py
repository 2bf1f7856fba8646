"""The job as a live view in a terminal. Pure: turns a snapshot into a rich renderable."""

from __future__ import annotations

from datetime import datetime

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from meshwright.api import conditions
from meshwright_cli.demo.loss_curve import LossCurve, sparkline
from meshwright_cli.demo.snapshot import Snapshot
from meshwright_cli.demo.text import clock, format_age

SHOWN_EVENTS = 7
"""Events that are shown if the terminal is high enough."""
OTHER_LINES = 15
"""Lines of the view apart from pods, events and the latest message."""
POD_STYLES = {"Running": "green", "Completed": "cyan", "Terminating": "yellow", "Error": "red"}


def render_live_view(
    now: Snapshot,
    curve: LossCurve,
    elapsed: float,
    moment: datetime,
    hint: str,
    latest: str = "",
    height: int = 40,
) -> RenderableType:
    """The complete view.

    Args:
        now: the job.
        curve: loss so far.
        elapsed: seconds since the demo began.
        moment: the present, for ages.
        hint: the line that says how to look from another terminal. Empty: none.
        latest: what the demo did last, which scrolls out of a small terminal.
        height: lines of the terminal. In a small one, only the latest events are shown.
    """
    title = f"[bold]{now.name}[/bold]  {now.state}"
    message = [Text(latest, style="bold", no_wrap=True, overflow="ellipsis")] if latest else []
    shown = min(SHOWN_EVENTS, max(1, height - OTHER_LINES - len(now.pods) - len(message)))
    parts: list[RenderableType] = [
        numbers(now, curve, moment),
        progress(now),
        Text(),
        workers(now),
        Text(),
        events(now, shown),
        *message,
    ]
    body = Panel(Group(*parts), title=title, subtitle=clock(elapsed), title_align="left", subtitle_align="right")
    return Group(body, Text(hint, style="dim", no_wrap=True, overflow="ellipsis")) if hint else Group(body)


def numbers(now: Snapshot, curve: LossCurve, moment: datetime) -> Table:
    """Plan, ranks, loss, throughput, checkpoint and conditions as name and value."""
    status = now.status
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(no_wrap=True)
    grid.add_row("plan", status.plan.summary if status.plan else "")
    grid.add_row("ranks ready", f"{status.ready_ranks}   {replicas(now)}generation {now.generation}")
    grid.add_row("restarts", restarts(now))
    loss = "" if now.loss is None else f"{now.loss:.4f}"
    grid.add_row("loss", Text.assemble(f"{loss}  ", (sparkline(curve.values(), 48), "cyan")))
    grid.add_row("tokens/s", f"{status.tokens_per_second:,}" if status.tokens_per_second else "")
    grid.add_row("checkpoint", checkpoint(now, moment))
    grid.add_row("conditions", ", ".join(c.type for c in status.conditions if c.status == "True"))
    return grid


def replicas(now: Snapshot) -> str:
    """The number of replicas of an elastic job, and how many it wants."""
    return f"replicas {now.replicas} of {now.wanted_replicas}   " if now.wanted_replicas else ""


def restarts(now: Snapshot) -> str:
    """The number of restarts, in total and by cause."""
    causes = ", ".join(f"{restart.cause} {restart.count}" for restart in now.status.restarts)
    return f"{now.status.restart_count}{f' ({causes})' if causes else ''}"


def checkpoint(now: Snapshot, moment: datetime) -> str:
    """The newest durable checkpoint and its age."""
    saved = now.status.checkpoint
    return f"step {saved.step}, {format_age(saved.time, moment)}" if saved else "none yet"


def progress(now: Snapshot) -> Table:
    """A progress bar of steps with the estimated remaining time."""
    grid = Table.grid(padding=(0, 2))
    total = now.total_steps
    eta = now.status.eta_seconds
    bar = ProgressBar(total=total or 1, completed=min(now.step, total or 1), width=44)
    running = eta is not None and not now.holds(conditions.COMPLETE)
    ending = f"ETA {clock(eta)}" if running and eta is not None else ""
    grid.add_row(Text("step       ", style="dim"), bar, f"{now.step}/{total or '?'}", ending)
    return grid


def workers(now: Snapshot) -> Table:
    """One line per worker pod."""
    ranks = {(p.worker, p.pod): p.ranks for p in now.status.placement.workers} if now.status.placement else {}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("worker", "pod", "node", "ranks", "state"):
        table.add_column(heading, no_wrap=True)
    for pod in now.pods:
        state = Text(pod.state, POD_STYLES.get(pod.state, ""))
        table.add_row(str(pod.worker), pod.name, pod.node, ranks.get((pod.worker, pod.name), ""), state)
    return table


def events(now: Snapshot, count: int) -> Table:
    """The latest events."""
    grid = Table.grid(padding=(0, 2))
    for event in now.events[-count:]:
        style = "yellow" if event.warning else "green"
        note = Text(event.note, no_wrap=True, overflow="ellipsis")
        grid.add_row(Text(event.clock, "dim"), Text(event.reason, style), note)
    return grid
