"""Rules on what success and failure mean."""

from __future__ import annotations

from meshwright.api.spec import ParallelTrainingJobSpec as Spec
from meshwright.api.spec import SuccessPolicy
from meshwright.rules.rule import Rule

MAX_COUNTED_IN_WINDOW = 100
"""The moments of so many restarts stand in status."""


def _few_in_window(spec: Spec) -> bool:
    return spec.recovery.restart_window_seconds is None or spec.recovery.max_restarts <= MAX_COUNTED_IN_WINDOW


def _first_worker_of_command(spec: Spec) -> bool:
    return spec.success_policy is SuccessPolicy.ALL_WORKERS or spec.runtime.command is not None


POLICY_RULES: tuple[Rule[Spec], ...] = (
    Rule(
        "recovery.maxRestarts",
        f"must be at most {MAX_COUNTED_IN_WINDOW} with `recovery.restartWindowSeconds`: lower it, or remove the window",
        f"!has(self.recovery.restartWindowSeconds) || self.recovery.maxRestarts <= {MAX_COUNTED_IN_WINDOW}",
        _few_in_window,
    ),
    Rule(
        "successPolicy",
        "may only be `FirstWorker` with `runtime.command`: Meshwright's own runtime ends on all workers together",
        "self.successPolicy == 'AllWorkers' || has(self.runtime.command)",
        _first_worker_of_command,
    ),
)
