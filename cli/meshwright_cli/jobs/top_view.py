"""The text of `meshwright top`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from meshwright.layout import Layout
from meshwright_cli.client.objects import Job, ranks_by_worker
from meshwright_cli.client.rank_metrics import RankTimes, slowness, stragglers
from meshwright_cli.jobs.output import table
from meshwright_cli.jobs.placement_tree import coordinates, layout_of
from meshwright_cli.jobs.status_view import JobView, status_lines
from meshwright_cli.text import duration, plural

HEADER = ("RANK", "STATE", "NODE", "MESH", "STEP", "STEP TIME", "DATA WAIT", "VS MEDIAN", "PEAK MEM")
NARROW = 100
"""With fewer columns, the peak of memory is left out, and long names of nodes are shortened."""
NODE_WIDTH = 16


@dataclass(frozen=True, slots=True)
class TopView:
    """A job with the times of its ranks."""

    view: JobView
    times: Sequence[RankTimes] = ()
    unreachable: Mapping[str, str] = field(default_factory=dict)
    """Pod -> why its metrics cannot be read."""


def top_lines(top: TopView, now: datetime, columns: int, height: int) -> list[str]:
    """The state of a job in a few lines, then its slowest ranks, as many as fit."""
    job = top.view.job
    if not top.times:
        reason = next(iter(top.unreachable.values()), "the job has no running pod")
        if top.unreachable and job.state != "Running" and top.view.pods is not None:
            reason = "the pods are not ready yet"
        often = "written every 10 s, less often if hundreds of jobs train"
        note = f"No metrics of ranks: {reason}. This is the status, which is {often}."
        return [*status_lines(top.view, now, columns), "", note]
    listed = list(top.times)
    stages = _stages(job, listed)
    slow = stragglers(listed, stages) - _silent(job, listed)
    more = slowness(listed, stages)
    lines = [
        f"{job.namespace}/{job.name}  {job.state}  {_progress(job, listed)}",
        f"{plural(len(listed), 'rank')}, {_who_is_slow(listed, slow)}",
        "",
    ]
    room = max(3, height - len(lines) - 3)
    listed.sort(key=lambda one: (one.rank not in slow, -more.get(one.rank, 0.0), one.rank))
    shown = listed[:room]
    if len(listed) <= room:
        shown.sort(key=lambda one: one.rank)
    narrow = columns < NARROW
    nodes, layout = _nodes(job), layout_of(job.status.plan)
    rows = [
        _row(one, nodes.get(one.rank, ""), layout, more.get(one.rank), one.rank in slow, narrow=narrow) for one in shown
    ]
    lines += table(HEADER[: len(rows[0])], rows)
    if len(shown) < len(listed):
        lines.append(f"and {len(listed) - len(shown)} faster ranks")
    if top.unreachable:
        name, reason = next(iter(top.unreachable.items()))
        lines.append(f"No metrics of {plural(len(top.unreachable), 'pod')}: {name}: {reason}"[:columns])
    return lines


def _silent(job: Job, times: Sequence[RankTimes]) -> set[int]:
    """The ranks of a user's command that report no steps, as most do on ranks other than 0."""
    own = bool((job.raw.get("spec", {}).get("runtime") or {}).get("command"))
    return {one.rank for one in times if own and one.up and one.step == 0}


def _stages(job: Job, times: Sequence[RankTimes]) -> dict[int, int]:
    """The pipeline stages of the ranks, as far as the plan has them."""
    layout = layout_of(job.status.plan)
    if layout is None:
        return {}
    return {one.rank: layout.coordinates(one.rank).pipeline for one in times if one.rank < layout.world_size}


def _who_is_slow(times: Sequence[RankTimes], slow: set[int]) -> str:
    if not any(one.up for one in times):
        return "none runs"
    down = {one.rank for one in times if not one.up}
    texts = [f"{plural(len(slow - down), 'straggler')}{_named(slow - down)}"] if slow - down or not down else []
    texts += [f"{len(down)} down{_named(down)}"] if down else []
    return ", ".join(texts)


def _named(slow: set[int]) -> str:
    names = ", ".join(str(rank) for rank in sorted(slow)[:8])
    return f": rank {names}{' and more' if len(slow) > 8 else ''}" if slow else ""


def _progress(job: Job, times: Sequence[RankTimes]) -> str:
    status = job.status
    step = max(one.step for one in times)
    parts = [f"step {step:,}" + (f" of {status.total_steps:,}" if status.total_steps else "")]
    parts += [f"loss {status.loss}"] if status.loss else []
    parts += [f"{status.tokens_per_second:,} tokens/s"] if status.tokens_per_second else []
    parts += [f"{duration(status.eta_seconds)} left"] if status.eta_seconds is not None and not job.finished else []
    return ", ".join(parts)


def _nodes(job: Job) -> dict[int, str]:
    """The node of each rank."""
    nodes = {entry.worker: entry.node for entry in job.status.placement.workers} if job.status.placement else {}
    return {rank: nodes.get(worker, "") for worker, ranks in ranks_by_worker(job.status).items() for rank in ranks}


def _row(
    one: RankTimes, node: str, layout: Layout | None, more: float | None, slow: bool, *, narrow: bool
) -> tuple[str, ...]:
    if narrow and len(node) > NODE_WIDTH:
        node = f"{node[: NODE_WIDTH // 2 - 1]}…{node[-NODE_WIDTH // 2 :]}"
    peak = () if narrow else (f"{one.peak_memory / 2**30:.1f} GiB" if one.peak_memory else "",)
    return (
        str(one.rank),
        "down" if not one.up else "slow" if slow else "ok",
        node,
        coordinates(layout, range(one.rank, one.rank + 1)),
        str(one.step),
        milliseconds(one.step_seconds),
        milliseconds(one.data_seconds),
        f"{round(100 * more):+d}%" if more is not None else "",
        *peak,
    )


def milliseconds(seconds: float | None) -> str:
    """A time of a step."""
    if seconds is None:
        return ""
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
