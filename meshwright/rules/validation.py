"""The rules of `rules/` for objects that never passed admission: from another CRD version, or read from a file."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.rules import SPEC_RULES, TRANSITIONS


@dataclass(frozen=True, slots=True)
class Problem:
    """A rule that a spec breaks."""

    field: str
    """Path below `spec`, such as `parallelism.tensor`."""
    message: str
    """What is wrong and the fix."""


def check_spec(spec: ParallelTrainingJobSpec) -> list[Problem]:
    """Every rule that `spec` breaks, in the order of the table; empty for a good one."""
    return [Problem(rule.field, rule.message) for rule in SPEC_RULES if not rule.holds(spec)]


def check_edit(running: ParallelTrainingJobSpec, wanted: ParallelTrainingJobSpec) -> list[Problem]:
    """What an edit of a started job changes and may not, in the order of the table; empty for an edit that is fine."""
    return [Problem(t.field, t.message) for t in TRANSITIONS if not t.holds(running, wanted)]
