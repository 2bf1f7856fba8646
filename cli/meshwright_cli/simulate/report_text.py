"""The report of `meshwright simulate` as text of at most 80 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from meshwright.api.goodput import TimeCause
from meshwright.figures import format_number
from meshwright.simulation.inputs import mean
from meshwright.simulation.replay import NOT_SIMULATED
from meshwright.simulation.run import Outcome
from meshwright.simulation.setting import Policy
from meshwright.simulation.study import NEGLIGIBLE, Result, Row
from meshwright_cli.simulate.report import SimulationReport
from meshwright_cli.text import duration, plural

WIDTH = 80
_OWN, _OTHER = "> ", "  "


def lines(report: SimulationReport) -> Iterator[str]:
    """The lines of the report."""
    yield from _job(report)
    yield ""
    yield from _result(report)
    if report.replay is not None:
        yield from _replay(report)
    else:
        yield from _causes(report.result)
    yield from _costs(report)
    yield from _intervals(report)
    yield from _spares(report.spares)
    yield from _minimum(report)
    yield from _table("Checkpoints on", report.tiers, lambda row: f"{row.result.goodput:.3f}", "goodput")
    yield from _rungs(report)
    advice = report.advice()
    if advice:
        yield ""
        yield "Advice"
        for text in advice:
            yield from textwrap.wrap(
                text, WIDTH, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False
            )
    for note in report.notes:
        yield ""
        yield from textwrap.wrap(f"Note: {note}", WIDTH, break_on_hyphens=False)


def _job(report: SimulationReport) -> Iterator[str]:
    setting, inputs = report.setting, report.setting.inputs
    size = f"{plural(setting.nodes, 'node')}, {plural(setting.gpus, 'GPU')}"
    extra = f", {plural(setting.policy.spares, 'spare node')}" if report.replay is None else ""
    yield f"Job          {report.name}: {size}{extra}"
    work = f"{duration(setting.work)} of training" if math.isfinite(setting.work) else ""
    span = f"{duration(setting.horizon)} simulated" if math.isinf(setting.work) else ""
    yield f"             {work or span}, {seconds(setting.step)} per step"
    rate = "none" if math.isinf(setting.mtbf) else f"one in {duration(setting.mtbf)} on average"
    yield f"Failures     {rate} ({report.mtbf_source})"
    yield from _repair(report)
    if math.isinf(setting.interval):
        yield "Checkpoints  none"
        return
    steps = round(setting.interval / setting.step)
    yield (
        f"Checkpoints  every {plural(steps, 'step')} ({duration(setting.interval)}), stall"
        f" {seconds(inputs.saves.stall)}, complete after {seconds(inputs.saves.durable)}"
    )


def _repair(report: SimulationReport) -> Iterator[str]:
    kinds = [kind for kind in report.setting.inputs.faults.values() if kind.nodes and not kind.planned]
    if not kinds:
        return
    most = max(kinds, key=lambda kind: kind.share)
    days = f"{duration(mean(most.repair))} on average"
    text = (
        f"after {days}" if isinstance(most.repair, float) else f"after {duration(most.repair.median)} (median), {days}"
    )
    yield f"Lost nodes   are available again {text}"


def seconds(value: float) -> str:
    """Seconds with three digits, or longer times with units."""
    return f"{value:.3g} s" if value < 120 else duration(value)


def _result(report: SimulationReport) -> Iterator[str]:
    result = report.result
    low, high = result.between(lambda one: one.goodput)
    error = f" (± {result.error:.3f})" if result.error >= 0.0005 else ""
    yield f"Goodput      {result.goodput:.3f} expected{error}; 90% of runs: {low:.3f} to {high:.3f}"
    if math.isfinite(result.setting.work):
        yield from _completion(result)
    kinds = result.setting.inputs.faults

    def failures(outcome: Outcome) -> float:
        return float(sum(count for name, count in outcome.failures.items() if not kinds[name].planned))

    few, many = result.between(failures)
    yield f"Failures     {format_number(result.mean(failures))} expected; 90% of runs: {few:.0f} to {many:.0f}"
    if degraded := result.mean(lambda one: one.degraded / one.elapsed):
        yield f"Smaller      {degraded:.1%} of the time, which counts in proportion to the speed"


def _completion(result: Result) -> Iterator[str]:
    """When the job is complete. Runs that are not complete at the end of the simulated time count with that time."""
    first, last = (duration(one) for one in result.between(lambda one: one.elapsed))
    unfinished = result.mean(lambda one: float(one.useful < result.setting.work * (1 - 1e-9)))
    if unfinished == 1:
        yield f"Complete     no run within {duration(result.setting.horizon)}"
        return
    yield f"Complete     after {duration(result.days * 86400)} expected; 90% of runs: {first} to {last}"
    if unfinished:
        yield f"             {unfinished:.0%} of the runs are not complete within {duration(result.setting.horizon)}"


def _causes(result: Result) -> Iterator[str]:
    yield ""
    yield "Where the time goes, by the causes of `status.goodput`"
    for cause in TimeCause:
        if share := result.share(cause):
            yield f"  {cause.value:<16} {share:7.2%}  {duration(share * result.days * 86400):>8}"


def _costs(report: SimulationReport) -> Iterator[str]:
    """What one failure of each kind costs."""
    if not report.costs:
        return
    width = max(len(cost.kind) for cost in report.costs)
    title = f"Lost by one failure, {_recovery(report.setting.policy)}"
    yield ""
    yield from textwrap.wrap(title, WIDTH, break_on_hyphens=False)
    yield f"  {'':<{width}}  {'detecting':>9}  {'waiting':>9}  {'restart':>9}  {'redone':>9}"
    for cost in report.costs:
        times = (cost.detecting, cost.waiting, cost.restarting, cost.redone)
        yield f"  {cost.kind:<{width}}  {'  '.join(f'{seconds(time):>9}' for time in times)}"


def _recovery(policy: Policy) -> str:
    """How a job recovers, in words."""
    if not policy.in_memory:
        return "after which all ranks restart"
    text = "after which ranks that are left keep their state"
    if policy.copy_steps is not None:
        text += f", of which peers have copies every {plural(policy.copy_steps, 'step')}"
    return f"{text}, and other replicas continue at once" if policy.continues else text


def _replay(report: SimulationReport) -> Iterator[str]:
    """The ledger next to the simulated one."""
    replay = report.replay
    assert replay is not None
    yield f"Ledger       {replay.goodput:.3f}"
    yield ""
    yield "Cause                ledger  simulated  90% of runs"
    for cause in TimeCause:
        booked = replay.seconds.get(cause, 0.0)
        if cause in NOT_SIMULATED:
            if booked:
                yield f"  {cause.value:<16} {duration(booked):>8}  {'-':>9}  (depends on the cluster)"
            continue
        low, high = report.result.between(lambda one, cause=cause: one.seconds[cause])  # type: ignore[misc]
        mean = report.result.mean(lambda one, cause=cause: one.seconds[cause])  # type: ignore[misc]
        if booked or mean:
            yield f"  {cause.value:<16} {duration(booked):>8}  {duration(mean):>9}  {duration(low)} to {duration(high)}"


def _table(title: str, rows: Sequence[Row], cells: Callable[[Row], str], heads: str, note: str = "") -> Iterator[str]:
    if not rows:
        return
    width = max(len(title) - 2, *(len(row.name) for row in rows))
    yield ""
    yield f"{title:<{width + 2}}  {heads}"
    for row in rows:
        yield f"{_OWN if row.is_job else _OTHER}{row.name:<{width}}  {cells(row)}".rstrip()
    if note:
        yield note


def _intervals(report: SimulationReport) -> Iterator[str]:
    rows, row = report.intervals, report.best_interval
    if row is None:
        return
    step = report.setting.step
    near = [one for one in rows if one.result.goodput >= row.result.goodput - NEGLIGIBLE]
    note = f"  {near[0].name} to {near[-1].name} steps are within 0.1 points of the best" if len(near) > 1 else ""

    def cells(one: Row) -> str:
        mark = "  best" if one is row else ""
        return f"{duration(int(one.name) * step):>7}  {one.result.goodput:>7.3f}{mark}"

    yield from _table("checkpoint.everySteps", rows, cells, "   time  goodput", note)


def _spares(rows: Sequence[Row]) -> Iterator[str]:
    def cells(row: Row) -> str:
        waits = row.result.share(TimeCause.QUEUED)
        return f"{row.result.goodput:>7.3f}  {row.result.per_node:>8.3f}  {waits:>7.2%}"

    yield from _table("Spare nodes", rows, cells, "goodput  per node  waiting")


def _minimum(report: SimulationReport) -> Iterator[str]:
    def cells(row: Row) -> str:
        fewest = min(one.fewest_units for one in row.result.outcomes) * report.replicas // report.setting.units
        text = "not elastic" if int(row.name) == report.setting.units else f"{fewest} reached"
        return f"{row.result.goodput:>7.3f}  {text}"

    rows = [replace(row, name=str(report.replicas_of(row))) for row in report.minimum]
    yield from _table("elastic.minReplicas", rows, cells, "goodput")


def _rungs(report: SimulationReport) -> Iterator[str]:
    before: list[float] = []

    def cells(row: Row) -> str:
        gain = f"{round(100 * (row.result.goodput - before[-1]), 1) + 0.0:+.1f}" if before else ""
        before.append(row.result.goodput)
        return f"{row.result.goodput:>7.3f}  {gain:>6}  {row.fields}"

    yield from _table("Each rung, with those above it", report.rungs, cells, "goodput  points")
