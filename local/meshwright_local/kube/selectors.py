"""Label selectors and node selector terms (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from meshwright.api.objects import KubeObject
from meshwright.api.workers import covers_taint

OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")
"""Operators of a LabelSelector."""


def requirement_holds(values: Mapping[str, str], requirement: KubeObject) -> bool:
    """Return whether values satisfy a requirement `{key, operator, values}`."""
    value = values.get(requirement["key"])
    wanted = requirement.get("values") or []
    match requirement["operator"]:
        case "In":
            return value in wanted
        case "NotIn":
            return value not in wanted
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            try:
                number, bound = int(value or ""), int(wanted[0])
            except (ValueError, IndexError):
                return False
            return number > bound if operator == "Gt" else number < bound
        case _:
            return False


def labels_match(selector: KubeObject | None, labels: Mapping[str, str]) -> bool:
    """Return whether a LabelSelector matches labels: None matches nothing, an empty one everything."""
    if selector is None:
        return False
    plain = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in plain.items()) and all(
        requirement_holds(labels, requirement) for requirement in selector.get("matchExpressions") or ()
    )


def selector_text(selector: KubeObject) -> str:
    """Return a LabelSelector in the form of `kubectl get --selector`, such as `app=a,tier in (b,c)`."""
    plain = selector.get("matchLabels") or {}
    forms = {"In": "{} in ({})", "NotIn": "{} notin ({})", "Exists": "{}", "DoesNotExist": "!{}"}
    terms = [f"{key}={value}" for key, value in plain.items()]
    terms += [
        forms[requirement["operator"]].format(requirement["key"], ",".join(sorted(requirement.get("values") or ())))
        for requirement in selector.get("matchExpressions") or ()
    ]
    return ",".join(sorted(terms))


def node_term_matches(term: KubeObject, node: KubeObject) -> bool:
    """Return whether a nodeSelectorTerm matches a node. An empty term matches no node, as in Kubernetes."""
    expressions = term.get("matchExpressions") or ()
    fields = term.get("matchFields") or ()
    if not expressions and not fields:
        return False
    labels = node["metadata"].get("labels") or {}
    names = {"metadata.name": node["metadata"]["name"]}
    return all(requirement_holds(labels, requirement) for requirement in expressions) and all(
        requirement_holds(names, requirement) for requirement in fields
    )


def node_matches(pod_spec: KubeObject, node: KubeObject) -> bool:
    """Return whether a node satisfies a pod's `nodeSelector` and required node affinity."""
    labels = node["metadata"].get("labels") or {}
    if any(labels.get(key) != value for key, value in (pod_spec.get("nodeSelector") or {}).items()):
        return False
    terms = required_node_terms(pod_spec)
    return terms is None or any(node_term_matches(term, node) for term in terms)


def required_node_terms(pod_spec: KubeObject) -> list[KubeObject] | None:
    """Return the terms of the required node affinity, of which one must match, or None if there is none."""
    affinity = (pod_spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    return None if required is None else list(required.get("nodeSelectorTerms") or ())


def pinned_to(pod_spec: KubeObject) -> set[str] | None:
    """Return the only nodes that a pod can run on, if every term of its required affinity names nodes; else None."""
    terms = required_node_terms(pod_spec)
    names: set[str] = set()
    for term in terms or ():
        named = [set(item.get("values") or ()) for item in term.get("matchFields") or () if item["operator"] == "In"]
        if not named:
            return None
        names |= set.intersection(*named)
    return names if terms else None


def tolerates(tolerations: Iterable[KubeObject], taint: KubeObject) -> bool:
    """Return whether any toleration covers a taint."""
    return any(toleration_covers(toleration, taint) for toleration in tolerations)


def toleration_covers(toleration: KubeObject, taint: KubeObject) -> bool:
    """Return whether one toleration covers a taint."""
    key, value, effect = toleration.get("key"), toleration.get("value"), toleration.get("effect")
    return covers_taint(key, toleration.get("operator", "Equal"), value, effect, taint)
