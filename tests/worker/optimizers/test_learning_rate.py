"""The learning rate of each step."""

from __future__ import annotations

import pytest

from meshwright.api.training import OptimizerSpec
from meshwright_worker.optimizers.optimizer import learning_rate

SPEC = OptimizerSpec(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=10)


@pytest.mark.parametrize(
    ("step", "rate"), [(1, 0.1), (5, 0.5), (9, 0.9), (10, 1.0), (35, 0.868198), (60, 0.55), (110, 0.1)]
)
def test_warm_up_then_cosine(step: int, rate: float) -> None:
    assert learning_rate(step, 110, SPEC) == pytest.approx(rate, abs=1e-6)


def test_warm_up_may_be_none_or_everything() -> None:
    assert learning_rate(1, 1, OptimizerSpec(learning_rate=1.0)) == 0.0
    assert learning_rate(10, 10, SPEC) == 1.0
    rates = [learning_rate(step, 100, OptimizerSpec(learning_rate=1.0)) for step in range(1, 101)]
    assert rates == sorted(rates, reverse=True)
