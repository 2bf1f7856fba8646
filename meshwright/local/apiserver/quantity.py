"""Resource quantities in the canonical form the real server stores: `0.5` becomes `500m`, `1024Mi` becomes `1Gi`."""

from __future__ import annotations

import re
from decimal import ROUND_UP, Decimal
from typing import Any

from meshwright.local.apiserver.schema.node import SchemaNode

_FORM = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([eE][+-]?[0-9]+)|(Ki|Mi|Gi|Ti|Pi|Ei)|(n|u|m|k|M|G|T|P|E)?)")
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_NANO = Decimal(1).scaleb(-9)


class QuantityError(ValueError):
    """Text that is no quantity."""


def canonical(value: str | float) -> str:
    """The canonical form of a quantity.

    Raises:
        QuantityError: it is none.
    """
    match = _FORM.fullmatch(str(value).strip())
    if match is None:
        raise QuantityError(
            f"quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$': {value}"
        )
    digits, exponent, binary, decimal = match.groups()
    number = Decimal(digits)
    if exponent:
        return _scaled(number.scaleb(int(exponent[1:])), {f"e{p}": p for p in range(-9, 19, 3) if p} | {"": 0})
    if binary:
        whole = number * (1 << _BINARY[binary])
        if whole == whole.to_integral_value() and abs(whole) >= 1024:
            return _shifted(int(whole))
        return _scaled(whole, _DECIMAL)
    return _scaled(number.scaleb(_DECIMAL[decimal or ""]), _DECIMAL)


def _scaled(number: Decimal, suffixes: dict[str, int]) -> str:
    """The integer with the largest suffix that loses nothing; finer than a nano is rounded up."""
    number = number.quantize(_NANO, rounding=ROUND_UP)
    if number == 0:
        return "0"
    for suffix, power in sorted(suffixes.items(), key=lambda item: -item[1]):
        mantissa = number.scaleb(-power)
        if mantissa == mantissa.to_integral_value():
            return f"{int(mantissa)}{suffix}"
    return str(number)


def _shifted(number: int) -> str:
    for suffix, bits in reversed(_BINARY.items()):
        if number % (1 << bits) == 0:
            return f"{number >> bits}{suffix}"
    return str(number)


def canonicalize(node: SchemaNode, value: Any, path: str = "") -> list[tuple[str, str]]:
    """Rewrite every quantity below `value` in place; returns (path, problem) of those that are none."""
    problems: list[tuple[str, str]] = []
    places: list[tuple[Any, Any, SchemaNode | None]] = []
    if isinstance(value, dict):
        places = [(key, item, node.child(key)) for key, item in value.items()]
    elif isinstance(value, list):
        places = [(index, item, node.items) for index, item in enumerate(value)]
    for key, item, sub in places:
        here = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}" if path else key
        if sub is not None and sub.quantity and isinstance(item, str | int | float):
            try:
                value[key] = canonical(item)
            except QuantityError as error:
                problems.append((here, str(error)))
        elif sub is not None and isinstance(item, dict | list):
            problems += canonicalize(sub, item, here)
    return problems
