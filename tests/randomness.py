"""How random histories, faults and malformed inputs are drawn: the same ones every time, unless others are asked for.

`make chaos SEED=7 RUNS=100` and `make fuzz SEED=7 RUNS=100` ask for others: MESHWRIGHT_TEST_SEED is where drawing
begins, MESHWRIGHT_TEST_RUNS the number of histories, kills or seeds of each test. The same two give the same draws.
A history that fails is kept as a test of its own.
"""

from __future__ import annotations

import os

_SEED = os.environ.get("MESHWRIGHT_TEST_SEED")
_RUNS = os.environ.get("MESHWRIGHT_TEST_RUNS")
ASKED = bool(_SEED or _RUNS)
"""Whether others than the usual draws are asked for."""


def runs(default: int) -> int:
    """How many histories or faults to draw."""
    return int(_RUNS) if _RUNS else default


def first_seed(default: int = 0) -> int:
    """The seed to begin with."""
    return int(_SEED) if _SEED else default


def seeds(default: int) -> range:
    """The seeds to run, `default` of them unless others are asked for."""
    return range(first_seed(), first_seed() + runs(default))
