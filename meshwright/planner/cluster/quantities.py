"""Kubernetes quantities as exact integers."""

from __future__ import annotations

import functools
import re
from fractions import Fraction

_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([eE][+-]?[0-9]{1,3})|([numkMGTPE]|[KMGTPE]i)?)")
_SCALE = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "": Fraction(1),
    **{suffix: Fraction(1000**power) for power, suffix in enumerate("kMGTPE", start=1)},
    **{f"{suffix}i": Fraction(1024**power) for power, suffix in enumerate("KMGTPE", start=1)},
}


def parse_quantity(value: object) -> Fraction:
    """Return the number that a quantity such as `500m`, `64Gi`, `1e3` or `8` represents.

    Raises:
        ValueError: `value` is not a quantity.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return Fraction(value)
    number = _parsed(value) if isinstance(value, str) and len(value) <= 64 else None
    if number is None:
        raise ValueError(f"{value!r} is not a Kubernetes quantity")
    return number


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> Fraction | None:
    """Nodes and pods of a cluster state few different quantities, each thousands of times."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    number, exponent, suffix = match.groups()
    return Fraction(number + (exponent or "")) * _SCALE[suffix or ""]
