"""Names, labels and selectors: validation, and text selectors as predicates on objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.status_errors import Cause, bad_request, invalid_value, not_allowed, required
from meshwright_local.kube.selectors import requirement_holds

Labels = Mapping[str, str]
MAX_ANNOTATIONS_BYTES = 256 * 1024
_FINALIZERS = ("kubernetes", "orphan", "foregroundDeletion")

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_WORD = "(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])"
_ENDS = "and must start and end with an alphanumeric character"
_REGEX = "regex used for validation is"
# Form -> maximum length, pattern, the real server's message for a text that does not match.
_FORMS = {
    "subdomain": (
        253,
        rf"{_LABEL}(\.{_LABEL})*",
        "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', "
        rf"{_ENDS} (e.g. 'example.com', {_REGEX} '{_LABEL}(\.{_LABEL})*')",
    ),
    "label": (
        63,
        _LABEL,
        "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', "
        f"{_ENDS} (e.g. 'my-name',  or '123-abc', {_REGEX} '{_LABEL}')",
    ),
    "dns-1035": (
        63,
        _LABEL.replace("[a-z0-9](", "[a-z](", 1),
        "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic "
        "character, and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', "
        f"{_REGEX} '[a-z]([-a-z0-9]*[a-z0-9])?')",
    ),
    "qualified": (
        63,
        _WORD,
        f"name part must consist of alphanumeric characters, '-', '_' or '.', {_ENDS} "
        f"(e.g. 'MyName',  or 'my.name',  or '123-abc', {_REGEX} '{_WORD[1:-1]}')",
    ),
    "value": (
        63,
        f"{_WORD}?",
        f"a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', {_ENDS} "
        f"(e.g. 'MyValue',  or 'my_value',  or '12345', {_REGEX} '{_WORD}?')",
    ),
    "path-segment": (1 << 16, r"(?!\.{1,2}\Z)[^/%]*", "may not be '.' or '..' or contain '/' or '%'"),
}
_LABEL_TERMS = re.compile(
    r"(?P<key>[^\s=!<>]+)\s+(?P<set>in|notin)\s*\((?P<values>[^()]*)\)"
    r"|(?P<equal>[^\s=!<>]+)\s*(?P<sign>==|=|!=|<|>)\s*(?P<value>[^\s=!<>]*)|(?P<not>!?)\s*(?P<exists>[^\s=!<>]+)"
)
_FIELD = re.compile(r"([^=!]+?)(==|=|!=)(.*)")


def problem(form: str, text: str) -> str | None:
    """Return the error of a text as `subdomain`, `label`, `dns-1035`, `value` or `path-segment`; None if valid."""
    longest, pattern, words = _FORMS[form]
    if len(text) > longest:
        return f"must be no more than {longest} bytes"
    return None if re.fullmatch(pattern, text) else words


def key_problem(key: str) -> str | None:
    """Return the error of a label key, annotation key or finalizer; None if valid."""
    prefix, slash, name = key.rpartition("/")
    wrong = problem("subdomain", prefix) if slash else None
    if wrong:
        return f"prefix part {wrong}"
    return problem("qualified", name) if name else "name part must be non-empty"


def check_metadata(metadata: KubeObject, form: str) -> list[Cause]:
    """Return the errors of an object's metadata, whose types already match the schema; `form` is that of its name."""
    found = [("name", name := metadata.get("name", ""), problem(form, name))]
    for key, value in (metadata.get("labels") or {}).items():
        found += [("labels", key, key_problem(key)), ("labels", value, problem("value", value))]
    annotations = metadata.get("annotations") or {}
    found += [("annotations", key, key_problem(key.lower())) for key in annotations]
    found += [("finalizers", text, key_problem(text)) for text in metadata.get("finalizers") or ()]
    causes = [invalid_value(f"metadata.{field}", shown, text) for field, shown, text in found if text]
    if sum(len(k.encode()) + len(v.encode()) for k, v in annotations.items()) > MAX_ANNOTATIONS_BYTES:
        text = f"Too long: may not be more than {MAX_ANNOTATIONS_BYTES} bytes"
        causes.append(Cause("metadata.annotations", "FieldValueTooLong", text))
    if {"orphan", "foregroundDeletion"} <= {*(metadata.get("finalizers") or ())}:
        text = "finalizer orphan and foregroundDeletion cannot be both set"
        causes.append(invalid_value("metadata.finalizers", metadata["finalizers"], text))
    owners = metadata.get("ownerReferences") or ()
    causes += [
        required(f"metadata.ownerReferences[{index}].{key}", "must not be empty")
        for index, owner in enumerate(owners)
        for key in ("apiVersion", "kind", "name", "uid")
        if not owner.get(key)
    ]
    if sum(bool(owner.get("controller")) for owner in owners) > 1:
        causes.append(not_allowed("metadata.ownerReferences", "Only one reference can have Controller set to true"))
    return causes


def check_finalizers(metadata: KubeObject) -> list[Cause]:
    """Return the errors of finalizers of a built-in kind, which need a domain; for custom resources it is advice."""
    text = "name is neither a standard finalizer name nor is it fully qualified"
    return [
        invalid_value(f"metadata.finalizers[{index}]", name, text)
        for index, name in enumerate(metadata.get("finalizers") or ())
        if "/" not in name and name not in _FINALIZERS
    ]


def field_value(obj: KubeObject, path: str) -> Any:
    """Return the value at a dotted path; None if there is none."""
    value: Any = obj
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def label_selector(text: str) -> Callable[[Labels], bool]:
    """Return a predicate on labels from a selector such as `a=b,c in (d,e),!f`.

    Raises:
        ApiError: 400 if it is not a valid selector.
    """
    tests = [_label_test(term.strip(), text) for term in re.split(r",(?![^()]*\))", text) if term.strip()]
    return lambda labels: all(test(labels) for test in tests)


def _label_test(term: str, whole: str) -> Callable[[Labels], bool]:
    match = _LABEL_TERMS.fullmatch(term)
    if match is None:
        raise bad_request(f'unable to parse requirement: found {term!r} in the label selector "{whole}"')
    key = match["key"] or match["equal"] or match["exists"]
    values = {v.strip() for v in (match["values"] or "").split(",")} if match["set"] else {match["value"] or ""}
    wrong = key_problem(key) or next((p for v in sorted(values) if (p := problem("value", v))), None)
    if wrong:
        raise bad_request(f'unable to parse the label selector "{whole}": {wrong}')
    if match["exists"]:
        return lambda labels: (key in labels) != bool(match["not"])
    if match["sign"] in ("<", ">"):
        bound = {"key": key, "operator": "Lt" if match["sign"] == "<" else "Gt", "values": sorted(values)}
        if not re.fullmatch(r"[0-9]+", bound["values"][0]):
            raise bad_request(f'unable to parse the label selector "{whole}": {key}: the value must be an integer')
        return lambda labels: requirement_holds(labels, bound)
    negated = match["set"] == "notin" or match["sign"] == "!="
    return lambda labels: (labels.get(key) in values) != negated


def field_selector(text: str, known: Mapping[str, str]) -> Callable[[KubeObject], bool]:
    """Return a predicate on objects from a selector such as `spec.nodeName=n1,status.phase!=Failed`.

    `known` has the fields that the resource allows in addition to name and namespace, each with the value for an object
    without the field.

    Raises:
        ApiError: 400 for an invalid selector, or a field that is not supported.
    """
    allowed = {"metadata.name": "", "metadata.namespace": "", **known}
    tests = []
    for term in filter(None, text.split(",")):
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
    return str(value).lower() if isinstance(value, bool) else str(value)
