"""The closed form of an undisturbed stretch, against a loop over its saves."""

import math
import random

import pytest

from meshwright.simulation.running import Stretch


def by_loop(stretch: Stretch, seconds: float, lag: float) -> tuple[float, float | None]:
    """Position and newest complete checkpoint after so many seconds, save by save."""
    now, position, durable = 0.0, stretch.begin, None
    while True:
        following = (math.floor(position / stretch.interval + 1e-9) + 1) * stretch.interval
        arrives = now + (following - position) / stretch.rate
        if arrives >= seconds:
            return position + (seconds - now) * stretch.rate, durable
        if arrives + stretch.stall > seconds:
            return following, durable
        now, position = arrives + stretch.stall, following
        if now + lag <= seconds:
            durable = following


def test_positions_and_checkpoints_are_those_of_a_loop_over_saves() -> None:
    draw = random.Random(7)
    for _ in range(300):
        interval = draw.choice([10.0, 17.5, 60.0])
        begin = draw.choice([0.0, interval * draw.randrange(5), draw.uniform(0, 100)])
        stretch = Stretch(begin, draw.choice([1.0, 0.5, 0.97]), interval, draw.choice([0.0, 0.3, 25.0]))
        seconds, lag = draw.uniform(0, 600), draw.choice([0.0, 5.0, 200.0])
        position, durable = by_loop(stretch, seconds, lag)
        assert stretch.position(seconds) == pytest.approx(position, abs=1e-6)
        assert stretch.durable(seconds, lag) == (None if durable is None else pytest.approx(durable, abs=1e-6))


def test_the_time_to_a_position_is_when_it_is_reached() -> None:
    draw = random.Random(8)
    for _ in range(200):
        stretch = Stretch(draw.uniform(0, 50), draw.uniform(0.5, 1), 20.0, draw.choice([0.0, 3.0]))
        target = stretch.begin + draw.uniform(0, 500)
        seconds = stretch.seconds_to(target)
        assert stretch.position(seconds) == pytest.approx(target, abs=1e-6)
        if seconds > 1e-3:
            assert stretch.position(seconds - 1e-3) < target


def test_without_checkpoints_nothing_is_saved() -> None:
    stretch = Stretch(5.0, 0.5, math.inf, 1.0)
    assert stretch.position(100.0) == 55.0
    assert stretch.durable(1e9, 0.0) is None
    assert stretch.seconds_to(55.0) == 100.0
