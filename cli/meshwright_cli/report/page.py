"""The page: what each section shows, and its HTML. Everything that comes from a job is escaped by the templates."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from meshwright.api import conditions
from meshwright.api.goodput import TimeCause
from meshwright.figures import format_number
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.timeline import simulate_pipeline
from meshwright.planner.units import format_bytes
from meshwright.schedules.actions import Schedule
from meshwright.schedules.measured import MeasuredStep
from meshwright.schedules.registry import kind_of
from meshwright.schedules.schedule import PipelineShape
from meshwright.schedules.simulator import Simulation, simulate
from meshwright_cli.figures.schedule_figure import MAX_SLOTS, legend_of, schedule_figure
from meshwright_cli.figures.svg import Element, to_markup
from meshwright_cli.jobs.goodput import Ledger
from meshwright_cli.report.bars import Bars, duration, goodput_bars, memory_bars, step_bars, traffic_bars
from meshwright_cli.report.cluster_map import COLORS, ClusterMap, cluster_map
from meshwright_cli.report.curves import Curve, curves, measured_bubble, measured_step_seconds
from meshwright_cli.report.inputs import ReportInputs

REFRESH_SECONDS = 5
"""Time between two updates of the page that `meshwright open` serves."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A number at the top of the page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The drawn pipeline schedule, and how it compares with the run."""

    svg: Element
    legend: Sequence[tuple[str, str]]
    name: str
    stages: int
    chunks: int
    """Stages of one rank."""
    micro_batches: int
    simulated_bubble: float
    measured_bubble: float | None
    estimated: bool
    """Whether the passes have estimated times. Otherwise each takes equally long."""
    cut: bool
    alone: bool = False
    """Whether steps overlap, and only one of them is drawn."""
    measured: MeasuredTimeline | None = None


@dataclass(frozen=True, slots=True)
class MeasuredTimeline:
    """The drawn timeline of a step of the run."""

    svg: Element
    legend: Sequence[tuple[str, str]]
    step: int
    seconds: float
    bubble: float
    cut: bool


@dataclass(frozen=True, slots=True)
class Page:
    """Everything that the template shows."""

    name: str
    namespace: str
    generated: str
    running: bool
    live: bool
    state: str
    tone: str
    message: str
    summary: str
    tiles: Sequence[Tile]
    cluster: ClusterMap | None
    timeline: Timeline | None
    memory: Bars | None
    step: Bars | None
    traffic: Bars | None
    goodput: Bars | None
    curves: Sequence[Curve]
    marks: Sequence[tuple[str, str, str]]
    """(when, what, details) of restarts, resizes and starts."""
    inputs: ReportInputs

    @property
    def evaluated(self) -> bool:
        """Whether the loss has a curve of evaluations."""
        return any(point.evaluation_loss is not None for point in self.inputs.history.points)

    @property
    def reasons(self) -> Sequence[str]:
        """Why each degree was chosen."""
        return self.inputs.plan.reasons if self.inputs.plan else ()


def page_of(inputs: ReportInputs, *, live: bool = False) -> Page:
    """Return what the page shows."""
    planned, status = inputs.planned, inputs.status
    state, tone, message = _state(inputs)
    return Page(
        name=inputs.name,
        namespace=inputs.namespace,
        generated=_clock(inputs.generated),
        running=inputs.running,
        live=live,
        state=state,
        tone=tone,
        message=message,
        summary=inputs.plan.summary if inputs.plan else "",
        tiles=_tiles(inputs),
        cluster=cluster_map(inputs),
        timeline=_timeline(inputs),
        memory=memory_bars(planned) if planned else None,
        step=step_bars(planned) if planned else None,
        traffic=traffic_bars(planned) if planned else None,
        goodput=goodput_bars(status.goodput, inputs.generated) if status and status.goodput else None,
        curves=curves(inputs.history),
        marks=_marks(inputs),
        inputs=inputs,
    )


def render(page: Page) -> str:
    """Return the page as one HTML document."""
    script = _resource("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            page=page,
            colors=COLORS,
            refresh=REFRESH_SECONDS,
            style=Markup(_resource("report.css")),  # noqa: S704 - a file of this package
            script=Markup(script),  # noqa: S704 - a file of this package
            script_hash=f"sha256-{digest}",
        )
    )


def _resource(name: str) -> str:
    return (files("meshwright_cli.report") / "templates" / name).read_text(encoding="utf-8")


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("meshwright_cli.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = lambda figure: Markup(to_markup(figure))  # noqa: S704 - made by the XML library
    environment.filters["code"] = _with_code
    environment.filters["percent"] = lambda part: f"{100 * part:.1f}%"
    environment.filters["number"] = format_number
    return environment


def _with_code(text: str) -> Markup:
    """Escape text, and set what is between backticks as code."""
    parts = [str(escape(part)) for part in text.split("`")]
    if len(parts) % 2 == 0:
        return escape(text)
    marked = [f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts)]
    return Markup("".join(marked))  # noqa: S704 - every part is escaped


def _state(inputs: ReportInputs) -> tuple[str, str, str]:
    """(state, tone, message): `good`, `bad`, or `plain`."""
    if not inputs.running:
        if inputs.pending:
            return "Does not fit now", "bad", inputs.pending
        return "Planned, not submitted", "plain", ""
    found = inputs.status.conditions if inputs.status else []
    reason, message = conditions.state(found), conditions.message(found)
    if conditions.is_true(found, conditions.FAILED) or conditions.is_true(found, conditions.STALLED):
        return reason, "bad", message
    good = conditions.is_true(found, conditions.READY) or conditions.is_true(found, conditions.COMPLETE)
    return reason, "good" if good else "plain", message


def _tiles(inputs: ReportInputs) -> list[Tile]:
    tiles: list[Tile] = []
    status, plan = inputs.status, inputs.plan
    estimate = inputs.planned.estimate if inputs.planned else None
    if status is not None:
        tiles += _run_tiles(inputs)
    if plan is not None:
        note = f"{plan.workers} workers" if plan.workers != 1 else "1 worker"
        tiles.append(Tile("Ranks", f"{plan.world_size:,}", note))
    tiles += _estimate_tiles(inputs, estimate)
    if plan is not None and plan.memory_per_rank_bytes:
        model = inputs.planned.cost_model if inputs.planned else None
        note = f"of {format_bytes(model.machine.gpu.memory)}, estimated" if model else "estimated"
        tiles.append(Tile("Fullest rank", format_bytes(plan.memory_per_rank_bytes), note))
    if plan is not None and plan.parameters:
        tiles.append(Tile("Parameters", _short(plan.parameters)))
    return tiles


def _run_tiles(inputs: ReportInputs) -> list[Tile]:
    status = inputs.status
    assert status is not None
    tiles = []
    if status.step is not None:
        of = f"of {status.total_steps:,}" if status.total_steps else ""
        tiles.append(Tile("Step", f"{status.step:,}", of))
    if status.loss:
        tiles.append(Tile("Loss", status.loss))
    if status.tokens_per_second is not None:
        estimated = inputs.plan.estimated_tokens_per_second if inputs.plan else None
        note = f"estimate {_short(estimated)}" if estimated else ""
        tiles.append(Tile("Tokens/s", _short(status.tokens_per_second), note))
    if status.eta_seconds is not None and not status.completion_time:
        tiles.append(Tile("Time left", duration(status.eta_seconds)))
    ledger = Ledger.of(status.goodput, inputs.generated)
    if ledger is not None and ledger.ratio is not None:
        time = "time not suspended" if ledger.seconds.get(TimeCause.SUSPENDED) else "all time"
        tiles.append(Tile("Goodput", f"{100 * ledger.ratio:.1f}%", f"training, of {time}"))
    restarts = status.restart_count
    tiles.append(Tile("Restarts", f"{restarts:,}"))
    return tiles


def _estimate_tiles(inputs: ReportInputs, estimate: Estimate | None) -> list[Tile]:
    if estimate is None:
        return []
    measured = measured_step_seconds(inputs.history)
    tiles = [
        Tile(
            "Step time",
            f"{format_number(estimate.seconds)} s",
            f"measured {format_number(measured)} s" if measured else "estimated",
        )
    ]
    if not inputs.running:
        tiles.append(Tile("Tokens/s", _short(estimate.tokens_per_second), "estimated"))
    tiles.append(Tile("MFU", f"{estimate.mfu:.0%}", "estimated"))
    return tiles


def _timeline(inputs: ReportInputs) -> Timeline | None:
    """The schedule with the estimated times of stages, or with equal times if they are not known."""
    if inputs.plan is None or inputs.plan.pipeline < 2:
        return None
    found = _estimated_pipeline(inputs) or _unit_pipeline(inputs)
    if found is None:
        return None
    schedule, simulation, estimated = found
    measured = measured_bubble(inputs.history)
    title = (
        f"Timeline of schedule {schedule.name} with {len(schedule.ranks)} pipeline ranks and "
        f"{schedule.micro_batches} micro-batches: ranks wait {simulation.bubble:.1%} of the time"
    )
    slots = sum(len(timed_slots) for timed_slots in simulation.timeline)
    return Timeline(
        svg=schedule_figure(schedule, simulation, title),
        legend=legend_of(schedule),
        name=kind_of(inputs.plan.schedule).name if inputs.plan.schedule else schedule.name,
        chunks=schedule.chunks,
        stages=schedule.stages,
        micro_batches=schedule.micro_batches,
        simulated_bubble=simulation.bubble,
        measured_bubble=measured,
        estimated=estimated,
        cut=slots > MAX_SLOTS,
        alone=kind_of(inputs.plan.schedule).asynchronous if inputs.plan.schedule else False,
        measured=_measured_timeline(inputs.measured) if inputs.measured is not None else None,
    )


def _measured_timeline(found: MeasuredStep) -> MeasuredTimeline:
    timeline = found.timeline
    title = (
        f"Measured timeline of step {found.step:,} on {len(timeline.timeline)} pipeline ranks: "
        f"ranks wait {timeline.bubble:.1%} of the time"
    )
    return MeasuredTimeline(
        svg=schedule_figure(found.schedule, timeline, title),
        legend=legend_of(found.schedule),
        step=found.step,
        seconds=timeline.makespan,
        bubble=timeline.bubble,
        cut=sum(len(slots) for slots in timeline.timeline) > MAX_SLOTS,
    )


def _estimated_pipeline(inputs: ReportInputs) -> tuple[Schedule, Simulation, bool] | None:
    planned = inputs.planned
    if planned is None or planned.cost_model is None or planned.groups is None:
        return None
    model = planned.cost_model
    try:
        pipeline = simulate_pipeline(model.work, planned.plan.strategy, model.machine, planned.groups)
    except ValueError:
        return None
    return pipeline.schedule, pipeline.simulation, True


def _unit_pipeline(inputs: ReportInputs) -> tuple[Schedule, Simulation, bool] | None:
    plan = inputs.plan
    if plan is None or plan.schedule is None:
        return None
    kind = kind_of(plan.schedule)
    shape = PipelineShape(plan.pipeline, plan.micro_batches, kind.stages_per_rank(plan.virtual_stages or 1))
    try:
        schedule = kind.generate(shape)
        return schedule, simulate(schedule), False
    except ValueError:
        return None


def _marks(inputs: ReportInputs) -> list[tuple[str, str, str]]:
    """Restarts, resizes and starts: from the tracker's file, else from the events that the cluster still has."""
    if inputs.history.marks:
        return [(f"after step {mark.step:,}", mark.name, mark.note) for mark in inputs.history.marks]
    wanted = ("Started", "Recovered", "Rescaled", "Failed", "Completed")
    return [
        (f"{event.time:%H:%M:%S}" if event.time else "", event.reason, event.message)
        for event in inputs.events
        if event.reason in wanted and not event.about
    ]


def _clock(when: datetime) -> str:
    return when.strftime("%Y-%m-%d %H:%M:%S UTC")


def _short(number: float) -> str:
    """A number with at most four digits: `8.03 B`, `171 k`."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 10 * unit or (number >= unit and unit > 1e3):
            return f"{format_number(number / unit)} {name}"
    return f"{number:,.0f}"
