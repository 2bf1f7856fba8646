"""How properties are drawn: the same examples every time, unless a long run asks for new ones.

MESHWRIGHT_TEST_RUNS=N draws at random, and N histories of each state machine. A history that fails then is kept as a
test of its own.
"""

import os

ASKED = os.environ.get("MESHWRIGHT_TEST_RUNS")


def runs(default: int) -> int:
    """How many histories of a state machine to draw."""
    return int(ASKED) if ASKED else default
