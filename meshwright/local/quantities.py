"""Kubernetes quantities (`250m`, `1.5Gi`, `2e3`) as exact integers of thousandths."""

from __future__ import annotations

import math
import re
from fractions import Fraction

_UNITS = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "": Fraction(1),
    **{unit: Fraction(1000**power) for power, unit in enumerate("kMGTPE", start=1)},
    **{f"{unit}i": Fraction(1024**power) for power, unit in enumerate("KMGTPE", start=1)},
}
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:[eE]([+-]?\d{1,3})|([a-zA-Z]*))")


def thousandths(text: object) -> int:
    """The value times 1000, rounded up as Kubernetes rounds requests.

    Raises:
        ValueError: Not a quantity.
    """
    match = _QUANTITY.fullmatch(str(text).strip())
    if match is None or (match[3] or "") not in _UNITS:
        raise ValueError(f"{text!r} is not a quantity, such as 2, 250m or 1.5Gi")
    scale = Fraction(10) ** int(match[2]) if match[2] else _UNITS[match[3] or ""]
    return math.ceil(Fraction(match[1]) * scale * 1000)


def whole(text: object) -> int:
    """The value in whole units, rounded up: bytes, cores, seconds.

    Raises:
        ValueError: Not a quantity.
    """
    return -(-thousandths(text) // 1000)
