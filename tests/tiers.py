"""Parameters of which some run always and the others, which differ from them in little, in the long tier alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def mostly_long(values: Iterable[Any], often: Callable[[Any], bool]) -> list[Any]:
    """The values for `parametrize`; those for which `often` is false run with the long tests. A tuple is several."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=() if often(value) else pytest.mark.long)
        for value in values
    ]
