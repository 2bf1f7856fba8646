"""Parses and validates the query parameters of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver import status_errors
from meshwright_local.apiserver.duplicate_keys import DuplicateKeys
from meshwright_local.apiserver.status_errors import ApiError, Cause

MAX_MANAGER = 128
_MATCHES = ("Exact", "NotOlderThan")
_POLICIES = ("Foreground", "Background", "Orphan")
_KINDS = {"POST": "CreateOptions", "PUT": "UpdateOptions", "DELETE": "DeleteOptions"}


@dataclass(slots=True)
class WriteOptions:
    """Options of a write: field manager, dry run, and validation of unknown fields."""

    manager: str
    explicit_manager: bool = True
    dry_run: bool = False
    field_validation: str = "Warn"
    force: bool = False
    check: Callable[[Any, KubeObject, KubeObject | None], None] | None = None
    """A check of the user's rights, with the resource, the new object and the old one; raises ApiError."""
    duplicates: DuplicateKeys | None = None
    """Keys that the body has twice; None without a body."""
    warnings: list[str] = field(default_factory=list)
    """Texts of the response's Warning headers."""


@dataclass(frozen=True, slots=True)
class ListOptions:
    """Options of a list or watch; `resume` is the `continue` token."""

    label_selector: str
    field_selector: str
    limit: int
    resume: str
    revision: str
    revision_match: str
    watch: bool
    timeout_seconds: float | None
    bookmarks: bool
    initial_events: bool | None


def invalid_options(kind: str, cause: Cause) -> ApiError:
    """Return the error 422 of an invalid parameter; `kind` is for example PatchOptions."""
    return status_errors.invalid("meta.k8s.io", kind, "", [cause])


def write_options(method: str, query: Mapping[str, str], user_agent: str) -> WriteOptions:
    """Parse the options of a create, update or patch; raises ApiError for an invalid value."""
    kind = _KINDS.get(method, "PatchOptions")
    dry_run = query.get("dryRun", "")
    _check_dry_run(kind, [dry_run] if dry_run else [])
    validation = query.get("fieldValidation", "")
    if validation not in ("", "Ignore", "Strict", "Warn"):
        raise invalid_options(
            kind, status_errors.unsupported_value("fieldValidation", validation, ("Ignore", "Strict", "Warn"))
        )
    manager = query.get("fieldManager", "")
    if len(manager) > MAX_MANAGER or not manager.isprintable():
        text = f"must be printable and at most {MAX_MANAGER} characters"
        raise invalid_options(kind, status_errors.invalid_value("fieldManager", manager, text))
    fallback = user_agent.split("/")[0][:MAX_MANAGER] or "unknown"
    force = _flag(query, "force") or False
    return WriteOptions(manager or fallback, bool(manager), bool(dry_run), validation or "Warn", force)


def list_options(query: Mapping[str, str]) -> ListOptions:
    """Parse the options of a list or watch; raises ApiError for an invalid value."""
    options = ListOptions(
        query.get("labelSelector", ""),
        query.get("fieldSelector", ""),
        max(0, _number(query, "limit", least=None) or 0),
        query.get("continue", ""),
        query.get("resourceVersion", ""),
        query.get("resourceVersionMatch", ""),
        _flag(query, "watch") or False,
        _number(query, "timeoutSeconds"),
        _flag(query, "allowWatchBookmarks") or False,
        _flag(query, "sendInitialEvents"),
    )
    if options.revision and not (options.revision.isascii() and options.revision.isdigit()):
        text = f'Invalid value: "{options.revision}": strconv.ParseUint: parsing "{options.revision}": invalid syntax'
        raise status_errors.bad_request(f"invalid resource version: resourceVersion: {text}")
    return options


def check_list_options(options: ListOptions) -> None:
    """Check the combination of a list's or watch's options; raises ApiError 422."""
    causes = list((_watch_causes if options.watch else _list_causes)(options))
    if causes:
        raise status_errors.invalid("meta.k8s.io", "ListOptions", "", causes)


def _list_causes(options: ListOptions) -> Iterator[Cause]:
    field_name, match = "resourceVersionMatch", options.revision_match
    if match and not options.revision:
        yield status_errors.not_allowed(field_name, f"{field_name} is forbidden unless resourceVersion is provided")
    if match and options.resume:
        yield status_errors.not_allowed(field_name, f"{field_name} is forbidden when continue is provided")
    if match not in ("", *_MATCHES):
        yield status_errors.unsupported_value(field_name, match, (*_MATCHES, ""))
    if match == "Exact" and options.revision == "0":
        yield status_errors.not_allowed(field_name, f'{field_name} "exact" is forbidden for resourceVersion "0"')
    if options.initial_events is not None:
        yield status_errors.not_allowed("sendInitialEvents", "sendInitialEvents is forbidden for list")


def _watch_causes(options: ListOptions) -> Iterator[Cause]:
    field_name, match = "resourceVersionMatch", options.revision_match
    if options.initial_events is not None and match != "NotOlderThan":
        text = f"sendInitialEvents requires setting {field_name} to NotOlderThan"
        yield status_errors.not_allowed(field_name, text)
    if match and options.initial_events is None:
        text = f"{field_name} is forbidden for watch unless sendInitialEvents is provided"
        yield status_errors.not_allowed(field_name, text)
    if match not in ("", "NotOlderThan"):
        yield status_errors.unsupported_value(field_name, match, ("NotOlderThan",))
    if options.resume:
        yield status_errors.not_allowed(field_name, f"{field_name} is forbidden when continue is provided")


def delete_options(query: Mapping[str, str], body: KubeObject) -> KubeObject:
    """Parse the options of a delete: those of the query override those of the body; raises ApiError."""
    options: dict[str, Any] = {key: value for key, value in body.items() if key not in ("kind", "apiVersion")}
    grace = _number(query, "gracePeriodSeconds")
    options |= {} if grace is None else {"gracePeriodSeconds": grace}
    policy = query.get("propagationPolicy") or options.get("propagationPolicy")
    if "orphanDependents" in options or "orphanDependents" in query:
        if policy is not None:
            text = "orphanDependents and deletionPropagation cannot be both set"
            raise invalid_options("DeleteOptions", status_errors.invalid_value("propagationPolicy", policy, text))
        policy = "Orphan" if options.get("orphanDependents") or _flag(query, "orphanDependents") else "Background"
    stages = options.get("dryRun") or ([query["dryRun"]] if query.get("dryRun") else [])
    if policy not in (None, *_POLICIES):
        cause = status_errors.unsupported_value("propagationPolicy", policy, (*_POLICIES, "nil"))
        raise invalid_options("DeleteOptions", cause)
    kinds: dict[str, Any] = {"dryRun": list, "gracePeriodSeconds": int, "preconditions": dict}
    for key, kind in kinds.items():
        if not isinstance(options.get(key), kind | None) or isinstance(options.get(key), bool):
            raise status_errors.bad_request(f"{key}: Invalid value: must be of type {kind.__name__}")
    _check_dry_run("DeleteOptions", stages)
    return {**options, "propagationPolicy": policy, "dryRun": bool(stages)}


def _check_dry_run(kind: str, stages: list[Any]) -> None:
    if any(stage != "All" for stage in stages):
        raise invalid_options(kind, status_errors.unsupported_value("dryRun", stages[0], ["All"]))


def _number(query: Mapping[str, str], name: str, *, least: int | None = 0) -> int | None:
    text = query.get(name)
    if not text:
        return None
    digits = text.removeprefix("-") if least is None else text
    if not digits.isascii() or not digits.isdigit() or len(digits) > 18:
        raise status_errors.bad_request(f'{name}: Invalid value: "{text}": must be a non-negative number')
    return int(text)


def _flag(query: Mapping[str, str], name: str) -> bool | None:
    text = query.get(name)
    return None if text is None else text.lower() not in ("false", "0")
