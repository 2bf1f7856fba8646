"""Whether a node matches a node selector of Kubernetes, such as that of a claim with devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def selected(node: Mapping[str, Any], selector: Mapping[str, Any]) -> bool:
    """Whether any term of the selector matches the node. Operators that are not known match nothing."""
    metadata = node["metadata"]
    fields, labels = {"metadata.name": metadata["name"]}, metadata.get("labels") or {}
    return any(
        all(_holds(one, fields) for one in term.get("matchFields") or ())
        and all(_holds(one, labels) for one in term.get("matchExpressions") or ())
        for term in selector.get("nodeSelectorTerms") or ()
    )


def _holds(requirement: Mapping[str, Any], values: Mapping[str, str]) -> bool:
    key, operator, wanted = requirement.get("key"), requirement.get("operator"), requirement.get("values") or ()
    there = key in values
    if operator in ("Exists", "DoesNotExist"):
        return there == (operator == "Exists")
    if operator == "In":
        return there and values[str(key)] in wanted
    return operator == "NotIn" and not (there and values[str(key)] in wanted)
