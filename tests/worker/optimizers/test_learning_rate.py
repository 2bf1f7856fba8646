"""The learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise, product

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, SequentialLR

from meshwright.api.training import OptimizerSpec, RateDecay
from meshwright_worker.optimizers.learning_rate import learning_rate

SPEC = OptimizerSpec(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=10)
STEPS = 110
ENDING = [decay for decay in RateDecay if decay.has_end]


def spec(decay: RateDecay | None = None, decay_steps: int | None = None, **changes: float) -> OptimizerSpec:
    return SPEC.model_copy(update={"decay": decay, "decay_steps": decay_steps, **changes})


def rates(spec: OptimizerSpec, steps: int = STEPS) -> list[float]:
    return [learning_rate(step, steps, spec) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("step", "rate"), [(1, 0.1), (5, 0.5), (9, 0.9), (10, 1.0), (35, 0.868198), (60, 0.55), (110, 0.1)]
)
def test_warm_up_then_cosine(step: int, rate: float) -> None:
    assert learning_rate(step, STEPS, SPEC) == pytest.approx(rate, abs=1e-6)


def test_warm_up_may_be_none_or_everything() -> None:
    assert learning_rate(1, 1, OptimizerSpec(learning_rate=1.0)) == 0.0
    assert learning_rate(10, 10, SPEC) == 1.0
    found = [learning_rate(step, 100, OptimizerSpec(learning_rate=1.0)) for step in range(1, 101)]
    assert found == sorted(found, reverse=True)


def cosine_of_0_1_0(step: int, steps: int, spec: OptimizerSpec) -> float:
    """The rate as release 0.1.0 computes it, operation by operation."""
    if step < spec.warmup_steps:
        return spec.learning_rate * step / spec.warmup_steps
    progress = (step - spec.warmup_steps) / max(1, steps - spec.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return spec.min_learning_rate + (spec.learning_rate - spec.min_learning_rate) * cosine


@pytest.mark.parametrize("decay", [None, RateDecay.COSINE])
def test_the_default_has_the_rates_of_0_1_0_bit_for_bit(decay: RateDecay | None) -> None:
    for peak, floor, warm_up, steps in product((3e-4, 0.7, 1e-5), (0.0, 3e-6, 1e-5), (0, 1, 7, 97), (97, 98, 1000)):
        one = spec(decay, learning_rate=peak, min_learning_rate=floor, warmup_steps=warm_up)
        assert rates(one, steps) == [cosine_of_0_1_0(step, steps, one) for step in range(1, steps + 1)]
        # A checkpoint may be ahead of an edit of `training.steps`.
        assert learning_rate(steps + 3, steps, one) == cosine_of_0_1_0(steps + 3, steps, one)


@pytest.mark.parametrize(
    ("decay", "borders"),
    [
        # Step 5 of the warm-up, its end, a quarter and half of the decay, the last step but one, the last.
        (RateDecay.COSINE, (0.5, 1.0, 0.55 + 0.45 / math.sqrt(2), 0.55, 0.1 + 0.45 * (1 - math.cos(0.01 * math.pi)))),
        (RateDecay.LINEAR, (0.5, 1.0, 0.775, 0.55, 0.109)),
        (RateDecay.SQUARE_ROOT, (0.5, 1.0, 0.55, 1.0 - 0.9 * math.sqrt(0.5), 1.0 - 0.9 * math.sqrt(0.99))),
    ],
)
def test_a_decay_begins_after_the_warm_up_and_ends_with_the_run(decay: RateDecay, borders: tuple[float, ...]) -> None:
    found = [learning_rate(step, STEPS, spec(decay)) for step in (5, 10, 35, 60, 109)]
    assert found == pytest.approx(borders, rel=1e-12)
    assert learning_rate(STEPS, STEPS, spec(decay)) == pytest.approx(0.1, rel=1e-15)
    assert learning_rate(STEPS, STEPS, spec(decay, min_learning_rate=0.0)) == 0.0


@pytest.mark.parametrize("decay", ENDING)
def test_with_decay_steps_the_peak_lasts_until_they_begin(decay: RateDecay) -> None:
    found = rates(spec(decay, decay_steps=20))
    assert found[9:89] == [1.0] * 80, "steps 10 to 89"
    assert found[89] == pytest.approx(1.0, rel=1e-15)
    last = spec(decay, warmup_steps=0)
    assert found[90:] == pytest.approx(rates(last, 20), rel=1e-15), "the decay is that of a run of 20 steps"
    assert found[89:] == sorted(found[89:], reverse=True)
    assert len(set(found[89:])) == 21


def test_the_root_falls_fastest_at_first_and_the_cosine_last() -> None:
    root, linear, cosine = (rates(spec(decay, 20))[99] for decay in (RateDecay.SQUARE_ROOT, RateDecay.LINEAR, None))
    assert (root, linear, cosine) == pytest.approx((1 - 0.9 * math.sqrt(0.5), 0.55, 0.55))
    root, linear, cosine = (rates(spec(decay, 20))[94] for decay in (RateDecay.SQUARE_ROOT, RateDecay.LINEAR, None))
    assert root < linear < cosine


def test_a_constant_rate_is_the_peak_to_the_end() -> None:
    found = rates(spec(RateDecay.CONSTANT))
    assert found[:10] == [step / 10 for step in range(1, 11)]
    assert set(found[9:]) == {1.0}


def test_the_inverse_square_root_continues_the_warm_up() -> None:
    """The rate of arXiv 1706.03762, equation 3: in proportion to min(step^-0.5, step * warmup^-1.5)."""
    one = spec(RateDecay.INVERSE_SQUARE_ROOT, min_learning_rate=0.0)
    expected = [math.sqrt(10) * min(step**-0.5, step * 10**-1.5) for step in range(1, STEPS + 1)]
    assert rates(one) == pytest.approx(expected, rel=1e-12)
    assert learning_rate(40, STEPS, one) == pytest.approx(0.5, rel=1e-15)
    assert learning_rate(4000, STEPS, SPEC.model_copy(update={"decay": RateDecay.INVERSE_SQUARE_ROOT})) == 0.1
    assert rates(one, 200)[:STEPS] == rates(one), "it does not depend on the number of steps"


@pytest.mark.parametrize("decay", ENDING)
@pytest.mark.parametrize("longer", [STEPS + 1, 300])
def test_a_longer_run_has_the_same_rates_until_the_decay_of_the_shorter(decay: RateDecay, longer: int) -> None:
    one = spec(decay, decay_steps=20)
    short, long = rates(one), rates(one, longer)
    assert short[:89] == long[:89]
    assert set(long[9 : longer - 21]) == {1.0}
    assert long[-20:] == pytest.approx(short[-20:], rel=1e-15)


def of_torch(build: Callable[[torch.optim.Optimizer], LRScheduler]) -> list[float]:
    """The rates of the steps 1 to `STEPS`: torch counts from 0, and its step 0 is none of ours."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=SPEC.learning_rate)
    scheduler = build(optimizer)
    found = []
    for _ in range(STEPS):
        optimizer.step()
        scheduler.step()
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


@pytest.mark.parametrize("length", [20, 100])
@pytest.mark.parametrize("decay", [RateDecay.COSINE, RateDecay.LINEAR])
def test_the_rates_are_those_of_torchs_schedulers(decay: RateDecay, length: int) -> None:
    def build(optimizer: torch.optim.Optimizer) -> LRScheduler:
        warm_up = LambdaLR(optimizer, lambda step: step / SPEC.warmup_steps)
        stable = ConstantLR(optimizer, factor=1.0)
        last: LRScheduler = CosineAnnealingLR(optimizer, T_max=length, eta_min=SPEC.min_learning_rate)
        if decay is RateDecay.LINEAR:
            last = LinearLR(optimizer, 1.0, SPEC.min_learning_rate / SPEC.learning_rate, total_iters=length)
        parts, milestones = [warm_up, stable, last], [SPEC.warmup_steps, STEPS - length]
        if length == STEPS - SPEC.warmup_steps:
            parts, milestones = [warm_up, last], milestones[:1]
        return SequentialLR(optimizer, parts, milestones)

    assert rates(spec(decay, length)) == pytest.approx(of_torch(build), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "one"),
    [
        ("get_cosine_schedule_with_warmup", {"num_training_steps": STEPS}, spec()),
        ("get_linear_schedule_with_warmup", {"num_training_steps": STEPS}, spec(RateDecay.LINEAR)),
        ("get_constant_schedule_with_warmup", {}, spec(RateDecay.CONSTANT)),
        ("get_inverse_sqrt_schedule", {}, spec(RateDecay.INVERSE_SQUARE_ROOT)),
        ("get_wsd_schedule", {"num_decay_steps": 20, "decay_type": "linear"}, spec(RateDecay.LINEAR, 20)),
        ("get_wsd_schedule", {"num_decay_steps": 20, "decay_type": "1-sqrt"}, spec(RateDecay.SQUARE_ROOT, 20)),
        ("get_wsd_schedule", {"num_decay_steps": 20, "decay_type": "cosine"}, spec(RateDecay.COSINE, 20)),
    ],
)
def test_the_rates_are_those_of_transformers(name: str, options: dict[str, object], one: OptimizerSpec) -> None:
    optimization = pytest.importorskip("transformers.optimization", exc_type=ImportError)
    if name == "get_wsd_schedule":
        options = {"num_training_steps": STEPS, **options}
    found = of_torch(lambda optimizer: getattr(optimization, name)(optimizer, SPEC.warmup_steps, **options))
    assert rates(one.model_copy(update={"min_learning_rate": 0.0})) == pytest.approx(found, abs=1e-12)


def test_no_rate_jumps() -> None:
    for decay, length in product(RateDecay, (None, 20)):
        if length is None or decay.has_end:
            found = rates(spec(decay, length))
            assert all(abs(one - other) < 0.21 for one, other in pairwise(found))
            assert max(found) == 1.0
