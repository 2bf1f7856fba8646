"""Parts of a whole as bars: memory of each stage, seconds of a step, traffic by level, time of the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime

from meshwright.api.goodput import GoodputStatus, TimeCause
from meshwright.figures import format_number
from meshwright.planner.cost.fabric import FabricLevel
from meshwright.planner.cost.memory import Memory, memory_by_stage
from meshwright.planner.cost.traffic import step_traffic
from meshwright.planner.units import GIB, format_bytes
from meshwright_cli import text
from meshwright_cli.report.inputs import Planned


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar."""

    label: str
    value: float
    text: str
    percent: float
    """Width, in percent of the longest bar."""
    color: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar."""

    label: str
    text: str
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars with one scale."""

    bars: Sequence[Bar]
    legend: Sequence[tuple[str, int]]
    """(label, color) of the parts that occur."""
    limit: float | None = None
    """Position of a limit in percent, such as a GPU's memory."""
    limit_text: str = ""
    rows: Sequence[Part] = field(default_factory=tuple)
    """The parts of a single bar, one below the other."""


MEMORY_LABELS = {
    "parameters": "parameters",
    "master": "master copies",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "working": "recomputation or logits",
    "gathered": "gathered shards",
    "buffers": "communication buffers",
    "context": "CUDA context",
    "fragmentation": "fragmentation",
}
STEP_LABELS = {
    "compute": "computation",
    "recompute": "recomputation",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "expert": "expert-parallel communication",
    "pipeline": "sends between stages",
    "bubble": "pipeline bubble",
    "data": "data-parallel communication",
    "optimizer": "optimizer",
    "offload": "offload",
    "host": "kernel launches",
}
TRAFFIC_LABELS = {"tensor": "TP", "context": "CP", "expert": "EP", "pipeline": "PP", "data": "DP"}
LEVEL_LABELS = {"nvlink": "inside an NVLink domain", "host": "inside a node", "rack": "inside a rack"}
TIME_LABELS = {
    TimeCause.TRAINING: ("training", "steps that count"),
    TimeCause.QUEUED: ("queued", "waiting for nodes"),
    TimeCause.STARTING: ("starting", "pods, processes, rendezvous, loading"),
    TimeCause.CHECKPOINT_STALL: ("checkpoint stalls", "steps stood still for a save"),
    TimeCause.DETECTING: ("detecting", "from the last step to the operator's decision"),
    TimeCause.RESTARTING: ("restarting", "from the decision to the first step"),
    TimeCause.RESCALING: ("rescaling", "from the decision to resize to the first step"),
    TimeCause.REDONE_STEPS: ("redone steps", "steps that were not in the checkpoint"),
    TimeCause.SUSPENDED: ("suspended", "`spec.suspend` was true"),
}


def memory_bars(planned: Planned) -> Bars | None:
    """Return the estimated memory of a rank of each pipeline stage, by kind, next to the GPU's."""
    if planned.cost_model is None:
        return None
    model = planned.cost_model
    stages = memory_by_stage(model.work, planned.plan.strategy, model.machine.runtime)
    limit = model.machine.gpu.memory
    longest = max(limit, *(memory.total for memory in stages))
    bars = []
    for memory in _without_repetitions(stages):
        first, last, one = memory
        label = f"stage {first}" if first == last else f"stages {first} to {last}"
        bars.append(Bar(label, format_bytes(one.total), _memory_parts(one, longest)))
    used = {part.label for bar in bars for part in bar.parts}
    legend = [(label, number) for number, label in enumerate(MEMORY_LABELS.values()) if label in used]
    return Bars(bars, legend, 100 * limit / longest, f"{model.machine.gpu.name}: {limit / GIB:.0f} GiB")


def step_bars(planned: Planned) -> Bars | None:
    """Return the estimated seconds of a step by part."""
    estimate = planned.estimate
    if estimate is None:
        return None
    seconds = {field.name: float(getattr(estimate.time, field.name)) for field in fields(estimate.time)}
    return _single("one step", seconds, STEP_LABELS, estimate.seconds, _seconds)


def traffic_bars(planned: Planned) -> Bars | None:
    """Return the bytes that a rank sends in a step, by dimension and level. None if it sends nothing."""
    model, groups = planned.cost_model, planned.groups
    if model is None or groups is None:
        return None
    found = step_traffic(model.work, planned.plan.strategy, model.machine, groups)
    longest = max((one.total for one in found), default=0.0)
    if not longest:
        return None
    levels = model.machine.fabric.levels
    bars, used = [], set()
    for one in found:
        parts = []
        for number, sent in enumerate(one.by_level):
            if sent > 0:
                used.add(number)
                label = _level_label(levels, number)
                parts.append(Part(label, sent, format_bytes(sent), 100 * sent / longest, number))
        bars.append(Bar(TRAFFIC_LABELS[one.dimension], format_bytes(one.total), parts))
    return Bars(bars, [(_level_label(levels, number), number) for number in sorted(used)])


def goodput_bars(goodput: GoodputStatus, now: datetime) -> Bars | None:
    """Return what the time of a job was spent on. The time since the last booking is that of the current cause."""
    seconds = {one.cause: one.milliseconds / 1000 for one in goodput.booked}
    if goodput.cause and goodput.since is not None:
        open_seconds = max(0.0, (now - datetime.fromisoformat(goodput.since)).total_seconds())
        seconds[goodput.cause] = seconds.get(goodput.cause, 0.0) + open_seconds
    known = {cause.value: seconds.pop(cause.value, 0.0) for cause in TIME_LABELS}
    known.update(seconds)
    labels = {cause.value: label for cause, (label, _) in TIME_LABELS.items()}
    notes = {label: note for label, note in TIME_LABELS.values()}
    total = sum(known.values())
    return _single("the job", known, labels, total, duration, notes) if total > 0 else None


def duration(seconds: float) -> str:
    """Return seconds as the other commands do, but with fractions below a minute."""
    return _seconds(seconds) if seconds < 60 else text.duration(seconds)


def _single(
    label: str,
    values: dict[str, float],
    labels: dict[str, str],
    total: float,
    as_text: Callable[[float], str],
    notes: dict[str, str] | None = None,
) -> Bars:
    """One bar with its parts below it."""
    order = {name: number for number, name in enumerate(labels.values())}
    parts = []
    for name, value in values.items():
        if value > 0:
            shown = labels.get(name, name)
            note = (notes or {}).get(shown, "")
            color = order.get(shown, len(order))
            parts.append(Part(shown, value, as_text(value), 100 * value / total, color, note))
    rows = sorted(parts, key=lambda part: -part.value)
    return Bars([Bar(label, as_text(total), parts)], [(part.label, part.color) for part in parts], rows=rows)


def _without_repetitions(stages: Sequence[Memory]) -> list[tuple[int, int, Memory]]:
    """(first stage, last stage, memory) of runs of stages with equal memory."""
    runs: list[tuple[int, int, Memory]] = []
    for number, memory in enumerate(stages):
        if runs and abs(runs[-1][2].total - memory.total) < 1e-6 * memory.total:
            runs[-1] = (runs[-1][0], number, runs[-1][2])
        else:
            runs.append((number, number, memory))
    return runs


def _memory_parts(memory: Memory, longest: float) -> list[Part]:
    values = {name: float(getattr(memory, name)) for name in MEMORY_LABELS}
    values["working"] = max(memory.working, memory.logits)
    values["gradients"] = memory.peak_gradients
    return [
        Part(label, values[name], format_bytes(values[name]), 100 * values[name] / longest, number)
        for number, (name, label) in enumerate(MEMORY_LABELS.items())
        if values[name] > 0
    ]


def _level_label(levels: Sequence[FabricLevel], number: int) -> str:
    level = levels[number]
    if number == len(levels) - 1 and number > 0:
        return f"between {_plural_below(levels[number - 1].name)}"
    return LEVEL_LABELS.get(level.name, level.name)


def _plural_below(name: str) -> str:
    return {"nvlink": "NVLink domains", "host": "nodes", "rack": "racks"}.get(name, "nodes")


def _seconds(seconds: float) -> str:
    return f"{format_number(seconds)} s" if seconds >= 0.1 else f"{format_number(1000 * seconds)} ms"
