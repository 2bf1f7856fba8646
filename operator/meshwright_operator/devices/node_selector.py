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
    key, operator = str(requirement.get("key")), str(requirement.get("operator"))
    wanted = requirement.get("values") or ()
    there = key in values
    among: bool = there and values[key] in wanted
    if operator in ("Exists", "DoesNotExist"):
        return there == (operator == "Exists")
    return among if operator == "In" else (operator == "NotIn" and not among)
