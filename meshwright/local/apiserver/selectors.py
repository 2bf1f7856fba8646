"""Label and field selectors: text into a predicate on objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.local.apiserver.errors import bad_request
from meshwright.local.apiserver.objectmeta import label_value_problem, qualified_name_problem
from meshwright.local.apiserver.resources import field_value

Labels = Mapping[str, str]
Predicate = Callable[[dict[str, Any]], bool]

_SET = re.compile(r"(\S+)\s+(in|notin)\s*\(([^()]*)\)")
_EQUAL = re.compile(r"([^\s=!<>]+)\s*(==|=|!=)\s*([^\s=!]*)")
_COMPARE = re.compile(r"([^\s=!<>]+)\s*([<>])\s*(-?[0-9]+)")
_KEY = re.compile(r"(!?)\s*([^\s=!<>]+)")
_FIELD = re.compile(r"([^=!]+?)(==|=|!=)(.*)")


def label_selector(text: str) -> Callable[[Labels], bool]:
    """A predicate on labels from a selector such as `a=b,c in (d,e),!f`.

    Raises:
        ApiError: 400 for what is no selector.
    """
    tests = [_label_test(term.strip(), text) for term in re.split(r",(?![^()]*\))", text) if term.strip()]
    return lambda labels: all(test(labels) for test in tests)


def _label_test(term: str, whole: str) -> Callable[[Labels], bool]:
    if match := _SET.fullmatch(term):
        key, operator, values = match[1], match[2], frozenset(v.strip() for v in match[3].split(","))
        _check(key, values, whole)
        if operator == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    if match := _EQUAL.fullmatch(term):
        key, operator, value = match[1], match[2], match[3]
        _check(key, frozenset({value}), whole)
        if operator == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if match := _COMPARE.fullmatch(term):
        key, operator, bound = match[1], match[2], int(match[3])
        _check(key, frozenset(), whole)
        return lambda labels: _compare(labels.get(key), operator, bound)
    if match := _KEY.fullmatch(term):
        negated, key = bool(match[1]), match[2]
        _check(key, frozenset(), whole)
        return lambda labels: (key in labels) != negated
    raise bad_request(f'unable to parse requirement: found {term!r} in the label selector "{whole}"')


def _compare(value: str | None, operator: str, bound: int) -> bool:
    if value is None or not re.fullmatch(r"-?[0-9]+", value):
        return False
    return int(value) > bound if operator == ">" else int(value) < bound


def _check(key: str, values: frozenset[str], whole: str) -> None:
    problem = qualified_name_problem(key) or next((p for v in sorted(values) if (p := label_value_problem(v))), None)
    if problem:
        raise bad_request(f'unable to parse the label selector "{whole}": {problem}')


def field_selector(text: str, known: Mapping[str, str]) -> Predicate:
    """A predicate on objects from a selector such as `spec.nodeName=n1,status.phase!=Failed`.

    `known` names the fields that the resource allows beside its name and namespace, each with the value of an object
    that lacks it.

    Raises:
        ApiError: 400 for what is no selector or a field that cannot be selected by.
    """
    allowed = {"metadata.name": "", "metadata.namespace": "", **known}
    tests = []
    for term in (t for t in text.split(",") if t):
        match = _FIELD.fullmatch(term)
        if match is None:
            raise bad_request(f'invalid selector: "{text}"; can\'t understand "{term}"')
        if match[1] not in allowed:
            raise bad_request(f"field label not supported: {match[1]}")
        tests.append((match[1], match[2] == "!=", match[3], allowed[match[1]]))
    return lambda obj: all((_as_text(field_value(obj, p), missing) == v) != neg for p, neg, v, missing in tests)


def _as_text(value: Any, missing: str) -> str:
    if value is None:
        return missing
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def label_selector_object(selector: Mapping[str, Any] | None) -> Callable[[Labels], bool]:
    """A predicate from a LabelSelector object (`matchLabels`, `matchExpressions`); none selects nothing."""
    if selector is None:
        return lambda labels: False
    wanted = selector.get("matchLabels") or {}
    expressions = selector.get("matchExpressions") or ()
    return lambda labels: (
        all(labels.get(k) == v for k, v in wanted.items()) and all(_expression_holds(e, labels) for e in expressions)
    )


def _expression_holds(expression: Mapping[str, Any], labels: Labels) -> bool:
    key, operator, values = expression["key"], expression["operator"], expression.get("values") or ()
    return {
        "In": labels.get(key) in values,
        "NotIn": labels.get(key) not in values,
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
    }.get(operator, False)
