"""Checks of `metadata`: names, labels, annotations, owners, finalizers."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

from meshwright.local.apiserver.errors import Cause, invalid_value, required

MAX_ANNOTATIONS_BYTES = 256 * 1024

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_DNS_LABEL = re.compile(_LABEL)
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")

_SUBDOMAIN_TEXT = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    r"'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_DNS_LABEL_TEXT = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with "
    "an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)
_DNS_1035_TEXT = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, "
    "and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is "
    "'[a-z]([-a-z0-9]*[a-z0-9])?')"
)
_QUALIFIED_TEXT = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric "
    "character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is "
    "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)
_LABEL_VALUE_TEXT = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    "'(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)


class NameForm(Enum):
    """Which names a kind allows."""

    SUBDOMAIN = "subdomain"
    LABEL = "label"
    DNS_1035 = "dns-1035"
    PATH_SEGMENT = "path-segment"


def name_problem(form: NameForm, name: str) -> str | None:
    """What is wrong with a name; None when nothing is."""
    if form is NameForm.PATH_SEGMENT:
        bad = name in (".", "..") or "/" in name or "%" in name
        return "may not be '.' or '..' or contain '/' or '%'" if bad else None
    longest = 253 if form is NameForm.SUBDOMAIN else 63
    if len(name) > longest:
        return f"must be no more than {longest} bytes"
    pattern, text = {
        NameForm.SUBDOMAIN: (_SUBDOMAIN, _SUBDOMAIN_TEXT),
        NameForm.LABEL: (_DNS_LABEL, _DNS_LABEL_TEXT),
        NameForm.DNS_1035: (_DNS_1035, _DNS_1035_TEXT),
    }[form]
    return None if pattern.fullmatch(name) else text


def qualified_name_problem(name: str) -> str | None:
    """What is wrong with a label key, annotation key or finalizer; None when nothing is."""
    prefix, slash, short = name.rpartition("/")
    if slash and (not prefix or len(prefix) > 253 or _SUBDOMAIN.fullmatch(prefix) is None):
        return f"prefix part {_SUBDOMAIN_TEXT}"
    if not short:
        return "name part must be non-empty"
    if len(short) > 63:
        return "name part must be no more than 63 bytes"
    return None if _QUALIFIED.fullmatch(short) else _QUALIFIED_TEXT


def label_value_problem(value: str) -> str | None:
    """What is wrong with a label's value; None when nothing is."""
    if len(value) > 63:
        return "must be no more than 63 bytes"
    return None if _LABEL_VALUE.fullmatch(value) else _LABEL_VALUE_TEXT


def check_metadata(metadata: dict[str, Any], form: NameForm) -> list[Cause]:
    """What is wrong with an object's metadata, whose types already fit the schema."""
    problem = name_problem(form, metadata.get("name", ""))
    causes = [invalid_value("metadata.name", metadata.get("name", ""), problem)] if problem else []
    for key, value in (metadata.get("labels") or {}).items():
        for text, shown in ((qualified_name_problem(key), key), (label_value_problem(value), value)):
            if text:
                causes.append(invalid_value("metadata.labels", shown, text))
    annotations = metadata.get("annotations") or {}
    for key in annotations:
        text = qualified_name_problem(key.lower())
        if text:
            causes.append(invalid_value("metadata.annotations", key, text))
    if sum(len(k.encode()) + len(v.encode()) for k, v in annotations.items()) > MAX_ANNOTATIONS_BYTES:
        text = f"Too long: may not be more than {MAX_ANNOTATIONS_BYTES} bytes"
        causes.append(Cause("metadata.annotations", "FieldValueTooLong", text))
    for finalizer in metadata.get("finalizers") or ():
        text = qualified_name_problem(finalizer)
        if text:
            causes.append(invalid_value("metadata.finalizers", finalizer, text))
    return causes + _check_owners(metadata.get("ownerReferences") or ())


def _check_owners(owners: Any) -> list[Cause]:
    causes = []
    for index, owner in enumerate(owners):
        for key in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(key):
                causes.append(required(f"metadata.ownerReferences[{index}].{key}", "must not be empty"))
    controllers = [o.get("name") for o in owners if o.get("controller")]
    if len(controllers) > 1:
        text = f'Only one reference can have Controller set to true. Found "true" in references for {controllers}'
        causes.append(invalid_value("metadata.ownerReferences", owners, text))
    return causes
