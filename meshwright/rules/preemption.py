"""Rules on `preemptible` and `updatePolicy`."""

from __future__ import annotations

from meshwright.api.spec import ParallelTrainingJobSpec as Spec
from meshwright.api.spec import UpdatePolicy
from meshwright.rules.rule import Rule


def _has_own_checkpoints(spec: Spec) -> bool:
    reports = spec.checkpoint is not None and spec.runtime.command is None
    return reports or spec.update_policy is not UpdatePolicy.AT_CHECKPOINT


PREEMPTION_RULES: tuple[Rule[Spec], ...] = (
    Rule(
        "preemptible",
        "is not supported with `workers.schedulerName`, because another scheduler preempts the pods: remove one of"
        " them",
        "!self.preemptible || !has(self.workers.schedulerName)",
        lambda spec: not spec.preemptible or spec.workers.scheduler_name is None,
    ),
    Rule(
        "updatePolicy",
        "must not be `AtCheckpoint` without `checkpoint` or with `runtime.command`: use `Now` or `OnRestart`",
        "self.updatePolicy != 'AtCheckpoint' || (has(self.checkpoint) && !has(self.runtime.command))",
        _has_own_checkpoints,
    ),
)
