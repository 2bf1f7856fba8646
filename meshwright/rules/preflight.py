"""Rules on `preflight`."""

from __future__ import annotations

from meshwright.api.spec import ParallelTrainingJobSpec as Spec
from meshwright.rules.rule import Rule


def _named_once(spec: Spec) -> bool:
    checks = spec.preflight
    return checks is None or set(checks.fatal).isdisjoint(checks.ignored)


PREFLIGHT_RULES: tuple[Rule[Spec], ...] = (
    Rule(
        "preflight.fatal",
        "must not name a check that `preflight.ignored` names: remove it from one of them",
        "!has(self.preflight) || self.preflight.fatal.all(c, !(c in self.preflight.ignored))",
        _named_once,
    ),
)
