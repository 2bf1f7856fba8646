"""Kubernetes quantities (`250m`, `1.5Gi`, `2e3`): exact values, and the canonical form that API servers store."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from meshwright.planner.cluster.quantities import parse_quantity

Form = Literal["decimal", "binary", "exponent"]
"""How a quantity was written; sums and canonical forms keep to it."""

_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {f"{unit}i": 10 * power for power, unit in enumerate("KMGTPE", start=1)}
_EXPONENT = re.compile(r"[eE][+-]?[0-9]")


@lru_cache(maxsize=4096)
def parse(text: object) -> tuple[Fraction, Form]:
    """The exact value, and how it was written.

    Raises:
        ValueError: Not a quantity.
    """
    written = str(text).strip()
    try:
        value = parse_quantity(written)
    except ValueError:
        raise ValueError(f"{text!r} is not a quantity, such as 2, 250m or 1.5Gi") from None
    form: Form = "binary" if written.endswith("i") else "exponent" if _EXPONENT.search(written) else "decimal"
    return value, form


def render(value: Fraction, form: Form) -> str:
    """The canonical text: a whole number with the largest suffix that loses nothing; finer than nano rounds up."""
    if form == "binary" and value.denominator == 1 and abs(value) >= 1024:
        suffix = next((unit for unit, bits in reversed(_BINARY.items()) if value % 2**bits == 0), "")
        return f"{value / 2 ** _BINARY.get(suffix, 0)}{suffix}"
    nanos = math.ceil(abs(value) * 10**9)
    unit, power = next((u, p) for u, p in reversed(_DECIMAL.items()) if not nanos or nanos % 10 ** (p + 9) == 0)
    if not nanos:
        return "0"
    if form == "exponent":
        unit = f"e{power}" if power else ""
    return f"{'-' if value < 0 else ''}{nanos // 10 ** (power + 9)}{unit}"


@lru_cache(maxsize=4096)
def canonical(text: object) -> str:
    """The form that an API server stores: `0.5` becomes `500m`, `1024Mi` becomes `1Gi`.

    Raises:
        ValueError: Not a quantity.
    """
    return render(*parse(text))


def milli_value(text: object) -> int:
    """The value times 1000, rounded up as Kubernetes rounds requests.

    Raises:
        ValueError: Not a quantity.
    """
    return math.ceil(parse(text)[0] * 1000)


def integer_value(text: object) -> int:
    """The value in whole units, rounded up: bytes, cores, seconds.

    Raises:
        ValueError: Not a quantity.
    """
    return math.ceil(parse(text)[0])
