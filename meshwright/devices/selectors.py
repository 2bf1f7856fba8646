"""Evaluates the CEL selectors of device classes and claims on devices, as the scheduler does.

A selector that cannot be evaluated selects nothing, so that no job is placed for devices that may not be there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from meshwright.api.objects import KubeObject

log = logging.getLogger(__name__)

MAX_CACHED = 256


def selectors_of(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """The CEL expressions in the `selectors` of a device class or a request."""
    return tuple(str(selector["cel"]["expression"]) for selector in spec.get("selectors") or ())


def variables_of(driver: str, attributes: Mapping[str, Any], capacity: Mapping[str, Any]) -> KubeObject:
    """The variable `device` of a selector. Names without a domain belong to the driver's."""
    found: dict[str, dict[str, dict[str, Any]]] = {"attributes": {driver: {}}, "capacity": {driver: {}}}
    values = {name: next(iter(value.values()), None) for name, value in attributes.items()}
    amounts = {name: value.get("value") for name, value in capacity.items()}
    for kind, named in (("attributes", values), ("capacity", amounts)):
        for name, value in named.items():
            domain, _, short = name.rpartition("/")
            found[kind].setdefault(domain or driver, {})[short] = value
    return {"device": {"driver": driver, **found}}


def selects(expressions: Iterable[str], variables: KubeObject) -> bool:
    """Whether all expressions are true for a device."""
    return all(_evaluate(expression, variables) for expression in expressions)


def _evaluate(expression: str, variables: KubeObject) -> bool:
    program = _program(expression)
    if program is None:
        return False
    try:
        return program.execute(variables) is True
    except Exception:  # noqa: BLE001 - the engine raises many types; a device without the attribute is not selected
        return False


@lru_cache(maxsize=MAX_CACHED)
def _program(expression: str) -> Any:
    import cel  # the operator and the command line have it; worker images evaluate no selectors

    try:
        return cel.compile(expression)
    except (ValueError, RuntimeError) as error:
        log.warning("device selector cannot be evaluated", extra={"expression": expression, "error": str(error)})
        return None
