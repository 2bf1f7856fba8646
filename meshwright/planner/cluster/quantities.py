"""Kubernetes quantities as exact integers."""

from __future__ import annotations

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
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) and len(value) <= 64 else None
    if match is None:
        raise ValueError(f"{value!r} is not a Kubernetes quantity")
    number, exponent, suffix = match.groups()
    return Fraction(number + (exponent or "")) * _SCALE[suffix or ""]
