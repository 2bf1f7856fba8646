"""Compares numbers with the bounds of a schema as the real server does, in Go's types.

A JSON number without a point or an exponent is an int64 if it fits, and a float64 otherwise. An integer is compared
with the bound truncated to int64, and a bound beyond int64 wraps to the smallest one: `maximum: 1e30` then rejects
every integer, and 2.5 means 2. If the type is `integer`, a bound that is not an integer is an error of every value that
is validated, including defaults.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from decimal import Decimal

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.status_errors import Cause, invalid_value

_SMALLEST, _LARGEST = -(1 << 63), (1 << 63) - 1
_JSON_INTEGER = (1 << 53) - 1
_LARGEST_FLOAT32 = 3.4028235677973366e38  # halfway between the largest float32 and the next value beyond it
# Keyword -> when a number violates it, and the message; exclusive bounds are a separate flag.
_BOUNDS: dict[str, tuple[Callable[[float, float], bool], str]] = {
    "minimum": (operator.lt, "greater than"),
    "maximum": (operator.gt, "less than"),
}


def as_go(value: float) -> float:
    """Return the number in the server's type: int for int64, float for float64."""
    return value if isinstance(value, int) and _SMALLEST <= value <= _LARGEST else float(value)


def is_integer(value: float) -> bool:
    """Return whether a number has the JSON type `integer`; floats only up to the size where they are exact."""
    number = as_go(value)
    return isinstance(number, int) or (abs(number) <= _JSON_INTEGER and _is_nearly_integer(number))


def _is_nearly_integer(number: float) -> bool:
    """As in the server: equal to the integer part, or above it by a tiny proportion."""
    integer_part = int(number)
    return number == integer_part or (
        integer_part != 0 and abs(number - integer_part) < 1e-9 * (abs(number) + abs(integer_part))
    )


def check_range(schema: KubeObject, value: float, path: str) -> list[Cause]:
    """Return the errors of a number: size of its type, `multipleOf`, `minimum` and `maximum`."""
    number = as_go(value)
    causes = _fits(schema, number, "Checked", path)
    if schema.get("multipleOf") is not None:
        step = as_go(float(schema["multipleOf"]))
        wrong = _fits(schema, step, "MultipleOf", path)
        causes += wrong + _check_step(number, step if wrong else _in_type_of(number, step), path)
    for key, (breaks, words) in _BOUNDS.items():
        if schema.get(key) is not None:
            bound = float(schema[key])
            wrong = _fits(schema, bound, f"{key.capitalize()} boundary", path)
            if not wrong:
                bound = _in_type_of(number, bound)
            exclusive = schema.get(f"exclusive{key.capitalize()}") is True
            if breaks(number, bound) or (exclusive and number == bound):
                text = f"{path} in body should be {words}{'' if exclusive else ' or equal to'} {_format_bound(bound)}"
                wrong.append(invalid_value(path, value, text))
            causes += wrong
    return causes


def _in_type_of(number: float, bound: float) -> float:
    """Return the bound in the type of the compared number."""
    if isinstance(number, float):
        return bound
    return int(bound) if _SMALLEST <= bound < _LARGEST else _SMALLEST


def _check_step(number: float, step: float, path: str) -> list[Cause]:
    if step <= 0:
        return [
            invalid_value(path, step, f"factor MultipleOf declared for {path} must be positive: {_format_bound(step)}")
        ]
    if isinstance(number, int) and isinstance(step, int):
        good = number % step == 0
    else:
        good = is_integer(number / step)
    return (
        [] if good else [invalid_value(path, number, f"{path} in body should be a multiple of {_format_bound(step)}")]
    )


def _fits(schema: KubeObject, number: float, what: str, path: str) -> list[Cause]:
    """Return the error of a value or bound that exceeds its type and format. As in the server, it has no field."""
    kind, form = schema.get("type"), schema.get("format") or ""
    if kind == "integer":
        bits = 31 if form == "int32" else 63
        # The server parses a float from its shortest decimal digits: 2**63 - 1 as a bound becomes 9223372036854776000.
        exact = Decimal(repr(number))
        good = exact == int(exact) and -(1 << bits) <= exact < 1 << bits
    else:
        good = form != "float" or abs(number) < _LARGEST_FLOAT32
    if good:
        return []
    said = f"with format {form}" if form else "(default format)"
    text = f'Invalid value: "": {what} value must be of type {kind} {said} in {path}'
    return [Cause("<nil>", "FieldValueInvalid", text)]


def _format_bound(bound: float) -> str:
    """Format a number as Go does: integral floats without a point."""
    return str(int(bound)) if float(bound).is_integer() and abs(bound) < 1e21 else str(bound)
