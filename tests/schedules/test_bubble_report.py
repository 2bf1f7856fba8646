"""What `benchmarks/pipeline_bubble.py` holds measured bubbles against."""

from __future__ import annotations

import pytest

from benchmarks.pipeline_bubble import TWO_A_RANK, predicted, schedule_of
from meshwright.schedules.registry import NAMES
from meshwright.schedules.validate import schedule_problems
from tests.schedules.test_schedules import EXACT


@pytest.mark.parametrize("name", [*NAMES, "automatic"])
def test_a_row_has_the_schedule_that_its_predictions_are_of(name: str) -> None:
    schedule, found = schedule_of(name, 4, 8), predicted(name, 4, 8)
    assert schedule_problems(schedule) == []
    assert schedule.stages == (8 if name in TWO_A_RANK else 4)
    assert set(found) == {"simulated", "closed form"}
    if name in (*EXACT, "automatic"):
        assert found["closed form"] == pytest.approx(found["simulated"])


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_textbook_bubble_is_the_prediction(name: str) -> None:
    assert predicted(name, 4, 8) == pytest.approx({"simulated": 3 / 11, "closed form": 3 / 11})
