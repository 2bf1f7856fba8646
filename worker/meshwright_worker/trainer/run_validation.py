"""A run's parts, once `meshwright.rules.resolved` has nothing against them: the ranks' look before any process group
forms.
"""

from __future__ import annotations

from meshwright.api.data import DataSpec
from meshwright.api.training import TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.protocol.messages import RunConfig
from meshwright.rules.nearest import nearest
from meshwright.rules.resolved.run_checks import run_problems
from meshwright_worker.rank.failures import InvalidRunError

__all__ = ["InvalidRunError", "nearest", "validate_run"]


def validate_run(run: RunConfig) -> tuple[Architecture, DataSpec, TrainingSpec]:
    """The parts of a run of this runtime, after checking that they fit each other.

    Raises:
        InvalidRunError: a part is missing, or degrees, model, batch and data do not fit; lists every problem.
    """
    problems = run_problems(run)
    if problems:
        raise InvalidRunError("; ".join(problems))
    assert run.architecture is not None
    assert run.data is not None
    assert run.training is not None
    return run.architecture, run.data, run.training
