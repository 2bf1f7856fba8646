"""Published runs of large jobs, and what the simulation says with the inputs that are published with them.

Nothing is fitted. Published times between failures count all time; `up_time` takes the stall after each failure off.
Runs of which only the result is published, and the inputs follow from it, are marked as implied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.api.goodput import TimeCause
from meshwright.rules.checkpoint_interval import best_interval_seconds, mtbf_of_nodes
from meshwright.simulation.inputs import FaultKind, Inputs, MemoryTier, Phases, Saves
from meshwright.simulation.setting import Policy, Setting, up_time
from meshwright.simulation.study import Result, study

MINUTE, HOUR = 60.0, 3600.0
TOLERANCE = 0.02
"""Two points of goodput."""
FAILURES = 20_000
"""Failures of a simulated run."""


@dataclass(frozen=True, slots=True)
class Published:
    """One published run."""

    run: str
    source: str
    published: tuple[float, float]
    """From and to; both are the same for one number."""
    inputs: str
    setting: Setting
    measure: Callable[[Result], float]
    implied: bool = False
    unit: str = ""
    """`h` for hours; a share if empty."""

    def simulated(self, seed: int = 0) -> float:
        """What the simulation says."""
        horizon = FAILURES * (self.setting.mtbf + sum(_stalls(self.setting)))
        return self.measure(study(replace(self.setting, horizon=horizon), 1, seed))

    def distance(self, value: float) -> float:
        """How far a value is from what is published. Hours relative to it."""
        low, high = self.published
        away = max(0.0, low - value, value - high)
        return away / high if self.unit else away


def _stalls(setting: Setting) -> list[float]:
    return [kind.detection for kind in setting.inputs.faults.values() if isinstance(kind.detection, float)]


def _goodput(result: Result) -> float:
    return result.goodput


def _steps_kept(result: Result) -> float:
    return result.share(TimeCause.TRAINING)


def _reconfiguration(result: Result) -> float:
    return result.share(TimeCause.DETECTING) + result.share(TimeCause.RESTARTING)


def _hours_between_failures(result: Result) -> float:
    (outcome,) = result.outcomes
    return outcome.elapsed / sum(outcome.failures.values()) / HOUR


def _rigid(wall_clock_mtbf: float, stall: float, save: float = 0.0, interval: float | None = None) -> Setting:
    """A job that stands still for `stall` after each failure. By default with the best interval."""
    mtbf = up_time(wall_clock_mtbf, stall)
    kind = FaultKind(share=1.0, cause="NodeLost", detection=stall)
    phases = Phases(spawn=0.0, rendezvous=0.0, load=0.0)
    inputs = Inputs(faults={"stop": kind}, phases=phases, saves=Saves(stall=save, durable=0.0), start=0.0)
    return Setting(mtbf=mtbf, interval=interval or best_interval_seconds(save, mtbf) or 1.0, inputs=inputs)


def _elastic(wall_clock_mtbf: float, stall: float, replicas: int, away: float) -> Setting:
    """A job whose other replicas continue after `stall`, without lost steps, and one of which is away for a while."""
    kind = FaultKind(share=1.0, cause="NodeLost", nodes=1, detection=stall, repair=0.0)
    phases = Phases(place=0.0, pod=away, spawn=0.0, rendezvous=0.0, regroup=0.0, load_from_memory=0.0)
    memory = MemoryTier(overhead=0.0)
    saves = Saves(stall=0.0, durable=0.0)
    return Setting(
        mtbf=up_time(wall_clock_mtbf, stall),
        interval=1.0,
        step=0.01,
        units=replicas,
        policy=Policy(spares=replicas, shrinks=True, at_once=True, in_memory=True, continues=True),
        inputs=Inputs(faults={"stop": kind}, phases=phases, memory=memory, saves=saves, start=0.0),
    )


def _point(value: float) -> tuple[float, float]:
    return value, value


_RSC_12000, _LLAMA = mtbf_of_nodes(1500, 6.5), mtbf_of_nodes(2048, 3.8)
_BYTEDANCE, _MEGASCALE = mtbf_of_nodes(1200, 3.8), mtbf_of_nodes(1536, 3.8)
_RSC, _FT_HSDP, _TORCHFT = "arXiv 2410.21680", "arXiv 2602.00277", "PyTorch blog, June 2025"

RUNS: tuple[Published, ...] = (
    Published(
        "RSC-1, 16,384 GPUs: MTTF",
        _RSC,
        _point(1.8),
        "r 6.5",
        _rigid(mtbf_of_nodes(2048, 6.5), 0.0),
        _hours_between_failures,
        unit="h",
    ),
    Published(
        "RSC-1, 131,072 GPUs: MTTF",
        _RSC,
        _point(0.23),
        "r 6.5",
        _rigid(mtbf_of_nodes(16384, 6.5), 0.0),
        _hours_between_failures,
        unit="h",
    ),
    Published(
        "RSC, above 1,024 GPUs",
        _RSC,
        (0.85, 0.9),
        "MTBF 7.9 h, stall 5 min, save 5 min every 60 min",
        _rigid(7.9 * HOUR, 5 * MINUTE, 5 * MINUTE, 60 * MINUTE),
        _goodput,
    ),
    Published(
        "RSC, 12,000 GPUs, short saves",
        _RSC,
        _point(0.9),
        "r 6.5, stall 5 min, save 10 s",
        _rigid(_RSC_12000, 5 * MINUTE, 10.0),
        _goodput,
    ),
    Published(
        "RSC, 12,000 GPUs, few failures",
        _RSC,
        _point(0.9),
        "r 1, stall 5 min, save 5 min",
        _rigid(mtbf_of_nodes(1500, 1.0), 5 * MINUTE, 5 * MINUTE),
        _goodput,
    ),
    Published(
        "Llama 3 405B, 16,384 GPUs",
        "arXiv 2407.21783",
        (0.9, 1.0),
        "r 3.8, stall 10 min, save 10 s",
        _rigid(_LLAMA, 10 * MINUTE, 10.0),
        _goodput,
    ),
    Published(
        "FT-HSDP, 98k GPUs, synchronous",
        _FT_HSDP,
        _point(0.44),
        "MTBF 18 min, stall 10 min",
        _rigid(18 * MINUTE, 10 * MINUTE),
        _goodput,
    ),
    Published(
        "FT-HSDP, 98k GPUs, elastic",
        _FT_HSDP,
        _point(0.8),
        "MTBF 18 min, stall 3 min, 7 min at 11/12",
        _elastic(18 * MINUTE, 3 * MINUTE, 12, 7 * MINUTE),
        _goodput,
    ),
    Published(
        "torchft, 30 groups: steps kept",
        _TORCHFT,
        _point(0.823),
        "MTBF 60 s, one step of 10.9 s lost",
        _elastic(60.0, 10.9, 30, 10.9),
        _steps_kept,
    ),
    Published(
        "torchft, 30 groups: efficiency",
        _TORCHFT,
        _point(0.812),
        "the same, and one step without the group",
        _elastic(60.0, 10.9, 30, 10.9),
        _goodput,
    ),
    Published(
        "Gemini 2.5: reconfiguration",
        "Gemini 2.5 report",
        _point(0.033),
        "3 stalls of 40 s per hour",
        _rigid(20 * MINUTE, 40.0),
        _reconfiguration,
        implied=True,
    ),
    Published(
        "ByteRobust, 9,600 GPUs",
        "arXiv 2509.16293",
        _point(0.97),
        "r 3.8, stall 9.5 min",
        _rigid(_BYTEDANCE, 9.5 * MINUTE),
        _goodput,
        implied=True,
    ),
    Published(
        "MegaScale, 12,288 GPUs",
        "arXiv 2402.15627",
        (0.9, 1.0),
        "r 3.8, stall 10 + 15 min",
        _rigid(_MEGASCALE, 25 * MINUTE),
        _goodput,
    ),
)


def table() -> list[str]:
    """Lines of a table of all runs."""
    rows = [("run", "published", "simulated", "inputs")]
    for run in RUNS:
        low, high = run.published
        span = (
            _text(low, run.unit)
            if low == high
            else f"above {_text(low, '')}"
            if high == 1.0
            else f"{low:g} to {high:g}"
        )
        inputs = f"{run.inputs} (implied)" if run.implied else run.inputs
        rows.append((run.run, span, _text(run.simulated(), run.unit), inputs))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _text(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}".rstrip() if unit else f"{value:.3f}"
