"""docs/parity.md and its numbers as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from meshwright.api.precision import Precision
from tests.distributed.staged_backend import ASKED
from tests.parity.case import Case
from tests.parity.matrix import all_cases
from tests.parity.measure import LIMITS, STEPS, Errors

_SHORT = {
    "tensor": "tp",
    "pipeline": "pp",
    "data": "dp",
    "context": "cp",
    "expert": "ep",
    "micro_batches": "micro-batches",
}

LOSS_OF_ROUNDED = 5e-3
"""The limit of losses where rounding on purpose lets gradients differ by more."""
PARAMETER_ON_GPU = 1e-2
"""The limit of fp32 parameters on a GPU, whose kernels add up in other orders than a CPU's; fp64 keeps its own."""
_NUMBERS = "fp32 loss | fp32 gradients | fp64 gradients | fp64 parameters"

HEAD = f"""# Parity: every technique compared with one process

Each row trains a small decoder twice, in a parallel layout and in one process, with the same seed and samples: one
AdamW step in fp32, and {STEPS} steps in fp64. It compares the loss of every step, every gradient of the first step and
every parameter after the last. An error is the largest absolute difference over all ranks, relative to the largest
element of the tensor. `make parity` writes this page; `make test` runs a part of the rows.

Some techniques do not take the steps of one process. They are compared with their definition, also computed in one
process (`tests/parity/definitions.py`):

- pipelines without a flush: gradients at weights that are as many updates old as their papers say;
- islands: separate steps, and a synchronization once per round;
- an asynchronous parameter server: the order of reads and writes that it recorded.

The limits are {LIMITS[Precision.FP32][0]:g} for fp32 losses and gradients, {LIMITS[Precision.FP64][0]:g} for fp64 \
gradients and {LIMITS[Precision.FP64][1]:g} for fp64 parameters.
Rows that round on purpose (compression, 8-bit and 16-bit formats) show their own limit of gradients. Their losses
differ by at most that limit or {LOSS_OF_ROUNDED:g}, whichever is less. Results in 16-bit formats are in the fp32
columns.
"""


@dataclass(frozen=True)
class Row:
    """A case and what was measured: errors by number format, none yet if empty; None for a refused combination."""

    case: Case
    errors: Mapping[Precision, Errors] | None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every error is within its limit."""
        return all(errors.within(*limits(self.case, precision)) for precision, errors in (self.errors or {}).items())


def limits(case: Case, precision: Precision) -> tuple[float, float, float]:
    """The largest errors allowed: of losses, of gradients and of parameters."""
    if not case.exact:
        return min(case.tolerance, LOSS_OF_ROUNDED), case.tolerance, float("inf")
    gradient, parameter = LIMITS[precision]
    if precision is Precision.FP32:
        gradient = max(gradient, case.tolerance)
        parameter = PARAMETER_ON_GPU if ASKED == "cuda" else parameter
    return gradient, gradient, parameter


def layout(case: Case) -> str:
    """The case's options as a reader's column."""
    return ", ".join(f"{_SHORT.get(name, name)} {_shown(value)}" for name, value in case.layout.items()) or "one rank"


def markdown(rows: Sequence[Row]) -> str:
    """The page."""
    legal = [row for row in rows if row.case.refused is None]
    refused = [row for row in rows if row.case.refused is not None]
    measured = sum(bool(row.errors) for row in legal)
    rest = "" if measured == len(legal) else f", of which {measured} were measured in the last run"
    lines = [HEAD, f"{len(legal)} layouts{rest}; {len(refused)} rejected combinations.", ""]
    techniques: dict[str, list[Row]] = {}
    for row in legal:
        if not row.case.together:
            techniques.setdefault(row.case.technique, []).append(row)
    for technique, group in techniques.items():
        lines += ["", f"## {technique}", "", *_table(group)]
    lines += _pairs([row for row in legal if row.case.together])
    if refused:
        lines += ["", "## Rejected", "", "Each of these is rejected before any process group is created.", ""]
        lines += ["| Combination | Layout | The error contains |", "|---|---|---|"]
        lines += [f"| {r.case.technique} | {layout(r.case)}{_model(r.case)} | {r.case.refused} |" for r in refused]
    return "\n".join(lines).rstrip() + "\n"


def as_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The same numbers for programs."""
    return [
        {
            "name": row.case.name,
            "technique": row.case.technique,
            "layout": {name: _shown(value) for name, value in row.case.layout.items()},
            "model": {name: _shown(value) for name, value in row.case.common.items()},
            "refused": row.case.refused,
            "seconds": round(row.seconds, 2),
            **{
                precision.value: {"loss": e.loss, "gradient": e.gradient, "parameter": e.parameter, "worst": e.worst}
                for precision, e in (row.errors or {}).items()
            },
        }
        for row in rows
    ]


def from_json(stored: Sequence[Mapping[str, Any]]) -> dict[str, Row]:
    """The rows of `as_json` by name, those whose cases still exist."""
    cases = {case.name: case for case in all_cases()}
    rows = {}
    for entry in stored:
        case = cases.get(entry["name"])
        if case is not None:
            errors = {
                precision: Errors(**entry[precision.value]) for precision in Precision if precision.value in entry
            }
            rows[case.name] = Row(case, None if case.refused is not None else errors, entry["seconds"])
    return rows


def _table(rows: list[Row]) -> list[str]:
    lines = [f"| Layout | Model | {_NUMBERS} |", "|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {layout(row.case)} | {_model(row.case) or 'default'}{_bound(row)} | {_cells(row)} |")
    return lines


def _pairs(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    legal = len({frozenset(pair) for row in rows for pair in combinations(row.case.together, 2)})
    lines = [
        "",
        "## Every supported pair",
        "",
        f"A row uses all of its techniques at once. {legal} pairs are in at least one row.",
    ]
    lines += ["All other pairs are rejected; see below.", "", f"| Techniques | Ranks | {_NUMBERS} |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in rows:
        ranks = row.case.run().layout.world_size
        lines.append(f"| {row.case.technique}{_bound(row)} | {ranks} | {_cells(row)} |")
    return lines


def _cells(row: Row) -> str:
    errors = row.errors or {}
    double = errors.get(Precision.FP64)
    single = next((errors[each] for each in errors if each is not Precision.FP64), None)
    numbers = [
        *((single.loss, single.gradient) if single else (None, None)),
        *((double.gradient, double.parameter) if double else (None, None)),
    ]
    return " | ".join("-" if number is None else f"{number:.0e}" for number in numbers)


def _bound(row: Row) -> str:
    return "" if row.case.exact else f" (limit {row.case.tolerance:g})"


def _model(case: Case) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in case.common.items())


def _shown(value: Any) -> str:
    return str(getattr(value, "value", value))
