"""The query parameters of requests, read and checked in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from meshwright.local.apiserver.errors import (
    ApiError,
    bad_request,
    invalid_options,
    invalid_value,
    not_allowed,
    unsupported_value,
)

MAX_MANAGER = 128
_VALIDATIONS = ("", "Ignore", "Strict", "Warn")
_POLICIES = ("Foreground", "Background", "Orphan")


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


def write_options(kind: str, query: Mapping[str, str], user_agent: str) -> WriteOptions:
    """The options of a create, update or patch; `kind` is such as PatchOptions, for messages.

    Raises:
        ApiError: a parameter has a value that it cannot have.
    """
    dry_run = query.get("dryRun", "")
    _check_dry_run(kind, [dry_run] if dry_run else [])
    validation = query.get("fieldValidation", "")
    if validation not in _VALIDATIONS:
        raise invalid_options(kind, unsupported_value("fieldValidation", _json(validation), _VALIDATIONS))
    manager = query.get("fieldManager", "")
    if len(manager) > MAX_MANAGER or not manager.isprintable():
        text = f"must be printable and at most {MAX_MANAGER} characters"
        raise invalid_options(kind, invalid_value("fieldManager", manager, text))
    fallback = user_agent.split("/")[0][:MAX_MANAGER] or "unknown"
    return WriteOptions(
        manager or fallback, bool(manager), bool(dry_run), validation or "Warn", _flag(query, "force") or False
    )


def _check_dry_run(kind: str, stages: list[object]) -> None:
    if any(stage != "All" for stage in stages):
        raise invalid_options(kind, unsupported_value("dryRun", _json(stages), ["All"]))


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


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
        raise invalid_options("ListOptions", not_allowed("resourceVersionMatch", text))
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
    policy = options.get("propagationPolicy")
    if "orphanDependents" in options or "orphanDependents" in query:
        orphan = options.pop("orphanDependents", None) or _flag(query, "orphanDependents")
        if policy is not None:
            text = "orphanDependents and deletionPropagation cannot be both set"
            raise invalid_options("DeleteOptions", invalid_value("propagationPolicy", policy, text))
        options["propagationPolicy"] = policy = "Orphan" if orphan else "Background"
    stages = options.get("dryRun") or ([query["dryRun"]] if query.get("dryRun") else [])
    if not isinstance(stages, list):
        raise bad_request("dryRun: Invalid value: must be a list")
    _check_dry_run("DeleteOptions", stages)
    options["dryRun"] = bool(stages)
    if policy not in (None, *_POLICIES):
        cause = unsupported_value("propagationPolicy", _json(policy), (*_POLICIES, "nil"))
        raise invalid_options("DeleteOptions", cause)
    if not isinstance(options.get("gracePeriodSeconds", 0), int | None):
        raise bad_request("gracePeriodSeconds: Invalid value: must be a number")
    if not isinstance(options.get("preconditions", {}), dict | None):
        raise bad_request("preconditions: Invalid value: must be an object")
    return options
