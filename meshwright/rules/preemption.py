"""Rules on `preemptible`."""

from __future__ import annotations

from meshwright.api.spec import ParallelTrainingJobSpec as Spec
from meshwright.rules.rule import Rule

PREEMPTION_RULES: tuple[Rule[Spec], ...] = (
    Rule(
        "preemptible",
        "is not supported with `workers.schedulerName`, because another scheduler preempts the pods: remove one of"
        " them",
        "!self.preemptible || !has(self.workers.schedulerName)",
        lambda spec: not spec.preemptible or spec.workers.scheduler_name is None,
    ),
)
