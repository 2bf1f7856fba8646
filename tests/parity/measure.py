"""Running a case and one process, and how far they are apart."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch

from meshwright.api.precision import Precision
from meshwright_worker.validate import InvalidRunError, validate
from tests.distributed.cases import Trained, train_in_formats
from tests.distributed.pool import RankPool
from tests.parity.case import Case

STEPS = 3
LIMITS = {Precision.FP32: (1e-5, 1e-3), Precision.FP64: (1e-12, 1e-10)}
"""Of loss and gradients, and of parameters after the optimizer steps, `STEPS` in fp64. Adam divides by the gradient's
own size, which blows up rounding where a gradient is almost 0: fp32 says little about parameters, fp64 much."""


@dataclass(frozen=True)
class Errors:
    """Largest errors over all ranks, relative to the largest element of each tensor."""

    loss: float
    gradient: float
    parameter: float
    worst: str
    """The tensor with the largest error of the gradient."""

    def within(self, gradient: float, parameter: float) -> bool:
        """Whether no error is larger."""
        return self.loss <= gradient and self.gradient <= gradient and self.parameter <= parameter


class Oracle:
    """What one process computes, once for every different run."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool
        self._known: dict[str, Trained] = {}

    def of(self, case: Case, steps: Mapping[Precision, int]) -> dict[Precision, Trained]:
        """The reference of a case, in each number format after so many steps."""
        run = case.reference()
        key = json.dumps([run.model_dump(mode="json"), steps], sort_keys=True)
        if key not in self._known:
            (self._known[key],) = self._pool.run(train_in_formats, run, steps)
        return self._known[key]


def measure(case: Case, pool: RankPool, oracle: Oracle, precisions: Sequence[Precision]) -> dict[Precision, Errors]:
    """Run the case on the pool's ranks, in each of the number formats.

    In fp32 beside fp64 one step is enough: it is what the gradients are compared after.

    Raises:
        AssertionError: a rank failed, or the ranks together do not have the model's parameters.
    """
    steps = {each: 1 if each is Precision.FP32 and Precision.FP64 in precisions else STEPS for each in precisions}
    wants = oracle.of(case, steps)
    ranks = pool.run(train_in_formats, case.run(), steps)
    return {each: _errors(case, each, wants[each], [rank[each] for rank in ranks]) for each in precisions}


def _errors(case: Case, precision: Precision, want: Trained, ranks: list[Trained]) -> Errors:
    missing = set(want.gradients) ^ set().union(*(rank.gradients for rank in ranks))
    assert not missing, f"{case.name}: gradients of {sorted(missing)} on one side alone"
    _check_vanishing(case, [want, *ranks], LIMITS[precision][0] if case.exact else case.tolerance)
    gradients = [_largest(_without(rank.gradients, case), want.gradients) for rank in ranks]
    parameters = [_largest(_without(rank.parameters, case), want.parameters) for rank in ranks]
    losses = [
        abs(got.loss - expected.loss) / abs(expected.loss)
        for rank in ranks
        for got, expected in zip(rank.results, want.results, strict=True)
    ]
    gradient, worst = max(gradients)
    return Errors(max(losses), gradient, max(parameters)[0], worst)


def check_refused(case: Case) -> None:
    """Hold an illegal combination to its error, raised before any process group forms."""
    assert case.refused is not None
    with pytest.raises(InvalidRunError, match=re.escape(case.refused)):
        validate(case.run())


def _without(tensors: dict[str, torch.Tensor], case: Case) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(case.vanishing)}


def _check_vanishing(case: Case, trained: list[Trained], limit: float) -> None:
    largest = max(float(gradient.abs().max()) for gradient in trained[0].gradients.values())
    for rank in trained:
        for name in set(rank.gradients) - set(_without(rank.gradients, case)):
            assert float(rank.gradients[name].abs().max()) <= limit * largest, name


def _largest(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> tuple[float, str]:
    # An adapter's first gradient is exactly 0: its other matrix still is.
    scales = {name: float(want[name].abs().max()) or 1.0 for name in got}
    errors = [(float((got[name] - want[name]).abs().max()) / scales[name], name) for name in got]
    return max(errors, default=(0.0, ""))
