"""Running a case and one process, and how far they are apart."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from meshwright.api.precision import Precision
from meshwright_worker.rank.failures import InvalidRunError
from meshwright_worker.trainer.train import validate_run
from tests.distributed.rank_pool import RankPool
from tests.parity.case import Case
from tests.parity.compare import (
    Compared,
    Events,
    Reference,
    compared,
    references,
    train_and_compare,
    train_and_tell,
    train_as_reference,
)
from tests.parity.losses import Numbers, hexadecimal

STEPS = 3
STEPS_ROUNDED = 2
"""Where rounding on purpose leaves no rounding to compare in fp64; what has a history has one in the second step."""
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

    def within(self, loss: float, gradient: float, parameter: float) -> bool:
        """Whether no error is larger."""
        return self.loss <= loss and self.gradient <= gradient and self.parameter <= parameter


@dataclass(frozen=True)
class Measured:
    """A row in each number format: how far it is from the reference, and what it computed exactly."""

    errors: dict[Precision, Errors]
    numbers: dict[Precision, Numbers]


class Oracle:
    """What one process computes, once for every different run. Its rank is none of the cases', which keep meshes."""

    def __init__(self) -> None:
        self._pool = RankPool(timeout=600)
        self._directory = TemporaryDirectory(prefix="parity-")
        self._known: dict[str, Path] = {}

    def of(self, case: Case, steps: Mapping[Precision, int], events: Events | None = None) -> Path:
        """The file with the reference of a case, in each number format after so many steps.

        `events` are those of the parameter server of an asynchronous case.
        """
        run, layout = case.reference(), case.run()
        # Of one process most layouts' definitions are the same.
        definition = layout.model_dump(mode="json") if case.defined_by_layout else None
        key = json.dumps([run.model_dump(mode="json"), steps, definition], sort_keys=True)
        if events is not None or key not in self._known:
            path = Path(self._directory.name) / f"{len(self._known)}.pt"
            self._pool.run(train_as_reference, run, steps, path, layout, events)
            self._known[key] = path
        return self._known[key]

    def close(self) -> None:
        """End its rank and delete the files."""
        self._pool.close()
        self._directory.cleanup()


def steps_in(precisions: Sequence[Precision]) -> dict[Precision, int]:
    """Steps in each number format: in fp32 beside fp64 one is enough, it is what the gradients are compared after."""
    if Precision.FP64 not in precisions:
        return dict.fromkeys(precisions, STEPS_ROUNDED)
    return {each: STEPS if each is Precision.FP64 else 1 for each in precisions}


def measure(case: Case, pool: RankPool, oracle: Oracle, precisions: Sequence[Precision]) -> Measured:
    """Run the case on the pool's ranks, in each of the number formats.

    Raises:
        AssertionError: a rank failed, or the ranks together do not have the model's parameters.
    """
    steps = steps_in(precisions)
    if case.asynchronous:
        told = pool.run(train_and_tell, case.run(), steps)
        wants = references(oracle.of(case, steps, {each: told[0][each].events for each in precisions}))
        ranks = [
            {each: compared(rank[each].own, wants[each][rank[each].island]) for each in precisions} for rank in told
        ]
    else:
        path = oracle.of(case, steps)
        ranks = pool.run(train_and_compare, case.run(), steps, path)
        wants = references(path)
    return Measured(
        {each: _errors(case, each, wants[each][0], [rank[each] for rank in ranks]) for each in precisions},
        {
            each: Numbers([hexadecimal(want.losses) for want in wants[each]], [rank[each].numbers for rank in ranks])
            for each in precisions
        },
    )


def _errors(case: Case, precision: Precision, want: Reference, ranks: list[Compared]) -> Errors:
    _check_whole(case, want, ranks)
    _check_vanishing(case, want, ranks, LIMITS[precision][0] if case.exact else case.tolerance)
    gradient, worst = max(
        (_worst(rank.gradients, case) for rank in ranks), key=lambda found: (math.isnan(found[0]), found[0])
    )
    parameters = [_worst(rank.parameters, case)[0] for rank in ranks]
    losses = [loss for rank in ranks for loss in rank.losses]
    return Errors(_nan_or_max(losses), gradient, _nan_or_max(parameters), worst)


def check_refused(case: Case) -> str:
    """Hold an illegal combination to its error, raised before any process group forms; the whole text of it."""
    assert case.refused is not None
    with pytest.raises(InvalidRunError, match=re.escape(case.refused)) as raised:
        validate_run(case.run())
    return str(raised.value)


def _check_whole(case: Case, want: Reference, ranks: list[Compared]) -> None:
    """The ranks have the gradients of one process, and their different parts of each make up the whole."""
    odd = set(want.gradients) ^ set().union(*(rank.gradients for rank in ranks))
    assert not odd, f"{case.name}: gradients of {sorted(odd)} on one side alone"
    for name, whole in want.gradients.items():
        parts = {rank.boxes[name] for rank in ranks if name in rank.boxes}
        covered = sum(math.prod(stop - start for start, stop in box) for box in parts)
        assert covered == whole.numel(), f"{case.name}: of {name} ranks have {covered} elements of {whole.numel()}"


def _check_vanishing(case: Case, want: Reference, ranks: list[Compared], limit: float) -> None:
    largest = max(float(gradient.abs().max()) for gradient in want.gradients.values())
    sizes = [{name: float(gradient.abs().max()) for name, gradient in want.gradients.items()}]
    for found in sizes + [rank.largest for rank in ranks]:
        for name, size in found.items():
            assert not name.endswith(case.vanishing) or size <= limit * largest, name


def _worst(errors: Mapping[str, float], case: Case) -> tuple[float, str]:
    """The largest of the errors and whose it is, of the tensors that do not vanish; not a number when any is none."""
    held = [(error, name) for name, error in errors.items() if not name.endswith(case.vanishing)]
    return max(held, key=lambda found: (math.isnan(found[0]), found[0]), default=(0.0, ""))


def _nan_or_max(errors: Sequence[float]) -> float:
    return max(errors, key=lambda error: (math.isnan(error), error))
