"""Numbers as text for people, with as many digits as they are worth and without exponents."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_STEP = 1000


def format_number(value: float, digits: int = 3) -> str:
    """Format a number with `digits` significant digits: `0.0123`, `12.3`, and `1,234` instead of `1.23e+03`."""
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e+" in text else text


def format_decimal_bytes(count: float) -> str:
    """Format bytes in the units of disks, networks and object stores: `12.3 GB`.

    For memory, see `planner.units.format_bytes`.
    """
    unit = 0
    # What three digits round up to a thousand is one of the next unit.
    while float(f"{count:.3g}") >= _STEP and unit < len(_UNITS) - 1:
        count, unit = count / _STEP, unit + 1
    return f"{format_number(count)} {_UNITS[unit]}"


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 pod`, `2 pods`, `2 micro-batches`."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else ending}"
