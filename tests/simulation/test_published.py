"""The simulation against published runs of large jobs, with the inputs that are published, and nothing fitted."""

import pytest

from meshwright.simulation.published import RUNS, TOLERANCE, Published

ROUNDED = 0.05
"""Published hours have two digits."""


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.run)
def test_a_published_run(run: Published) -> None:
    distance = run.distance(run.simulated())
    assert distance <= (ROUNDED if run.unit else TOLERANCE), f"{run.run}: {distance:.4f} away"
