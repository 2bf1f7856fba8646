"""The query parameters of requests, read and checked in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.local.apiserver.errors import ApiError, bad_request

MAX_MANAGER = 128
_VALIDATIONS = ("Ignore", "Warn", "Strict")


@dataclass(slots=True)
class WriteOptions:
    """How to write."""

    manager: str
    """Who owns the fields that this write sets."""
    explicit_manager: bool
    dry_run: bool
    field_validation: str
    force: bool
    warnings: list[str] = field(default_factory=list)
    """What the answer's Warning headers will say."""


@dataclass(frozen=True, slots=True)
class ListOptions:
    """What to list or watch."""

    label_selector: str
    field_selector: str
    limit: int
    resume: str
    """The `continue` token."""
    revision: str
    """`resourceVersion` as given."""
    revision_match: str
    watch: bool
    timeout_seconds: float | None
    bookmarks: bool
    initial_events: bool | None


def write_options(query: Mapping[str, str], user_agent: str) -> WriteOptions:
    """The options of a create, update, patch or delete.

    Raises:
        ApiError: a parameter has a value that it cannot have.
    """
    if query.get("dryRun", "All") not in ("All", ""):
        text = f'Invalid value: ["{query["dryRun"]}"]: valid values: ["All"]'
        raise ApiError(400, "BadRequest", f"PatchOptions.meta.k8s.io is invalid: dryRun: {text}")
    validation = query.get("fieldValidation") or "Warn"
    if validation not in _VALIDATIONS:
        raise bad_request(f"fieldValidation: Unsupported value: {validation!r}: supported values: {_VALIDATIONS}")
    manager = query.get("fieldManager", "")
    if len(manager) > MAX_MANAGER or not manager.isprintable():
        raise bad_request(f"fieldManager: Invalid value: must be printable and at most {MAX_MANAGER} characters")
    fallback = user_agent.split("/")[0][:MAX_MANAGER] or "unknown"
    return WriteOptions(
        manager or fallback, bool(manager), query.get("dryRun") == "All", validation, _flag(query, "force") or False
    )


def list_options(query: Mapping[str, str]) -> ListOptions:
    """The options of a list or watch.

    Raises:
        ApiError: a parameter has a value that it cannot have.
    """
    options = ListOptions(
        query.get("labelSelector", ""),
        query.get("fieldSelector", ""),
        _number(query, "limit") or 0,
        query.get("continue", ""),
        query.get("resourceVersion", ""),
        query.get("resourceVersionMatch", ""),
        _flag(query, "watch") or False,
        _number(query, "timeoutSeconds"),
        _flag(query, "allowWatchBookmarks") or False,
        _flag(query, "sendInitialEvents"),
    )
    if options.revision and not options.revision.isdigit():
        text = f'Invalid value: "{options.revision}": must be a number'
        raise ApiError(400, "BadRequest", f"ListOptions.meta.k8s.io is invalid: resourceVersion: {text}")
    if options.initial_events is not None and options.revision_match != "NotOlderThan":
        text = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"
        raise ApiError(
            422, "Invalid", f'ListOptions.meta.k8s.io "" is invalid: resourceVersionMatch: Forbidden: {text}'
        )
    return options


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name)
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise bad_request(f'{name}: Invalid value: "{text}": must be a non-negative number')
    return int(text)


def _flag(query: Mapping[str, str], name: str) -> bool | None:
    text = query.get(name)
    if text is None:
        return None
    return text.lower() not in ("false", "0")


def delete_options(query: Mapping[str, str], body: dict[str, object]) -> dict[str, object]:
    """The options of a delete: those of the body, and over them those of the query.

    Raises:
        ApiError: a parameter has a value that it cannot have.
    """
    options = {key: value for key, value in body.items() if key not in ("kind", "apiVersion")}
    grace = _number(query, "gracePeriodSeconds")
    if grace is not None:
        options["gracePeriodSeconds"] = grace
    if query.get("propagationPolicy"):
        options["propagationPolicy"] = query["propagationPolicy"]
    if "orphanDependents" in options or "orphanDependents" in query:
        orphan = options.pop("orphanDependents", None) or _flag(query, "orphanDependents")
        options.setdefault("propagationPolicy", "Orphan" if orphan else "Background")
    options["dryRun"] = bool(options.get("dryRun") or query.get("dryRun"))
    policy = options.get("propagationPolicy")
    if policy not in (None, "Background", "Foreground", "Orphan"):
        raise bad_request(f'propagationPolicy: Unsupported value: "{policy}": use Background, Foreground or Orphan')
    if not isinstance(options.get("gracePeriodSeconds", 0), int | None):
        raise bad_request("gracePeriodSeconds: Invalid value: must be a number")
    if not isinstance(options.get("preconditions", {}), dict | None):
        raise bad_request("preconditions: Invalid value: must be an object")
    return options
