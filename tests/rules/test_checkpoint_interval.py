"""The interval between checkpoints: against the papers' series, against a search, and at the limits."""

import math
import random

import pytest

from meshwright.rules.checkpoint_interval import (
    best_interval_seconds,
    estimated_mtbf,
    interval_in_steps,
    mtbf_of_nodes,
    useful_share,
)


def daly(save: float, mtbf: float) -> float:
    """The series of Daly 2006, equation 37."""
    half = save / (2.0 * mtbf)
    return math.sqrt(2.0 * save * mtbf) * (1.0 + math.sqrt(half) / 3.0 + half / 9.0) - save


@pytest.mark.parametrize(("save", "mtbf"), [(1.0, 1e6), (10.0, 11160.0), (60.0, 28440.0), (300.0, 28440.0)])
def test_the_interval_is_that_of_dalys_series_where_it_holds(save: float, mtbf: float) -> None:
    assert best_interval_seconds(save, mtbf) == pytest.approx(daly(save, mtbf), rel=2e-4)


def test_no_other_interval_gives_more_useful_time() -> None:
    draw = random.Random(1)
    for _ in range(200):
        mtbf = 10 ** draw.uniform(2, 6)
        save, down, load = mtbf * 10 ** draw.uniform(-6, 0.3), mtbf * draw.uniform(0, 2), mtbf * draw.uniform(0, 1)
        best = best_interval_seconds(save, mtbf)
        most = useful_share(best, save, mtbf, down, load)
        for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
            assert useful_share(best * factor, save, mtbf, down, load) <= most * (1 + 1e-12)


def test_short_saves_have_youngs_interval() -> None:
    for save in (1e-6, 1e-4, 9e-4, 1.1e-3, 1e-2):
        assert best_interval_seconds(save, 1e6) == pytest.approx(math.sqrt(2 * save * 1e6), rel=1e-3)


def test_limits() -> None:
    assert best_interval_seconds(10.0, math.inf) == math.inf
    assert best_interval_seconds(0.0, 1000.0) == 0.0
    assert best_interval_seconds(0.0, 1000.0, durable_seconds=60.0) == 60.0
    assert best_interval_seconds(1e9, 1000.0) == pytest.approx(1000.0)
    assert useful_share(100.0, 10.0, math.inf) == pytest.approx(100 / 110)
    assert useful_share(math.inf, 10.0, math.inf) == 1.0
    assert useful_share(1e9, 10.0, 100.0) == 0.0
    with pytest.raises(ValueError, match="must be at least 0"):
        best_interval_seconds(-1.0, 100.0)


def test_a_published_run() -> None:
    """Llama 3 405B: 2,048 nodes, saves of 10 s, restarts of 10 min: above 0.90 (arXiv 2407.21783, section 3.3.4)."""
    mtbf = mtbf_of_nodes(2048)
    assert mtbf / 3600 == pytest.approx(3.08, abs=0.01)
    assert useful_share(best_interval_seconds(10.0, mtbf), 10.0, mtbf, 600.0) == pytest.approx(0.906, abs=0.005)


def test_steps() -> None:
    assert interval_in_steps(100.0, 7.0) == 14
    assert interval_in_steps(1.0, 7.0) == 1
    assert interval_in_steps(math.inf, 7.0, most=500) == 500
    assert interval_in_steps(100.0, 0.0, most=500) == 500


def test_observed_failures_replace_the_expectation() -> None:
    expected = mtbf_of_nodes(16)
    assert estimated_mtbf(0, 0.0, expected) == expected
    assert estimated_mtbf(0, expected, expected) == 2 * expected
    assert estimated_mtbf(1000, 1000 * 3600.0, 3600.0) == 3600.0
    assert estimated_mtbf(3, 3600.0, math.inf) == 1200.0
    assert mtbf_of_nodes(16, 0.0) == math.inf
