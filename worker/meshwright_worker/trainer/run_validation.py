"""Validation of a run on every rank, before any process group is created (rules: `meshwright.rules`)."""

from __future__ import annotations

from meshwright.api.data import DataSpec
from meshwright.api.training import TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.protocol.messages import RunConfig
from meshwright.rules.nearest import nearest
from meshwright.rules.validation import run_problems
from meshwright_worker.rank.failures import InvalidRunError

__all__ = ["InvalidRunError", "nearest", "validate_run"]


def validate_run(run: RunConfig) -> tuple[Architecture, DataSpec, TrainingSpec]:
    """Return the sections of a run of the built-in runtime, after checking that they are compatible.

    Raises:
        InvalidRunError: a section is missing, or degrees, model, batch and data are incompatible; lists every problem.
    """
    problems = run_problems(run)
    if problems:
        raise InvalidRunError("; ".join(problems))
    assert run.architecture is not None
    assert run.data is not None
    assert run.training is not None
    return run.architecture, run.data, run.training
