"""Errors as the API speaks them: a `Status` object with an HTTP code and a machine-readable reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing wrong with an object: where, what sort of mistake (`FieldValueInvalid`, ...), and in words."""

    field: str
    reason: str
    message: str

    def wire(self) -> JsonObject:
        """The form it has in `status.details.causes`."""
        return {"reason": self.reason, "message": self.message, "field": self.field}


class ApiError(Exception):
    """A request that is answered with a failure `Status`."""

    def __init__(
        self, code: int, reason: str, message: str, details: JsonObject | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details or {}
        self.retry_after = retry_after
        if retry_after is not None:
            self.details = {**self.details, "retryAfterSeconds": retry_after}

    def status(self) -> JsonObject:
        """The `Status` object of the answer."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": {key: value for key, value in self.details.items() if value != ""},
            "code": self.code,
        }


def success(code: int | None = None, details: JsonObject | None = None) -> JsonObject:
    """A success `Status` object. That of a delete carries no code, as with a real server."""
    status: JsonObject = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    if code is not None:
        status["code"] = code
    return {**status, "details": {k: v for k, v in details.items() if v != ""}} if details else status


def bad_request(message: str) -> ApiError:
    """400: the request itself makes no sense."""
    return ApiError(400, "BadRequest", message)


def unauthorized() -> ApiError:
    """401: no credentials, or unknown ones."""
    return ApiError(401, "Unauthorized", "Unauthorized")


def forbidden(group: str, plural: str, name: str, why: str, causes: Sequence[Cause] = ()) -> ApiError:
    """403: an admission rule or the authorizer says no."""
    details: JsonObject = {"name": name, "group": group, "kind": plural}
    if causes:
        details["causes"] = [c.wire() for c in causes]
    qualified = f"{plural}.{group}" if group else plural
    subject = f'{qualified} "{name}"' if name else qualified
    return ApiError(403, "Forbidden", f"{subject} is forbidden: {why}", details)


class UnservedPath(ApiError):
    """404 in plain text: what a path outside the groups that are served gets."""

    def __init__(self) -> None:
        super().__init__(404, "NotFound", "404 page not found")


def unknown_path() -> ApiError:
    """404: a served group has no such version or resource."""
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def not_found(group: str, plural: str, name: str) -> ApiError:
    """404: no such object."""
    qualified = f"{plural}.{group}" if group else plural
    return ApiError(404, "NotFound", f'{qualified} "{name}" not found', {"name": name, "group": group, "kind": plural})


def method_not_allowed(why: str = "the server does not allow this method on the requested resource") -> ApiError:
    """405: the path exists, the verb does not."""
    return ApiError(405, "MethodNotAllowed", why)


def already_exists(group: str, plural: str, name: str) -> ApiError:
    """409: a create of an object that stands."""
    qualified = f"{plural}.{group}" if group else plural
    return ApiError(
        409, "AlreadyExists", f'{qualified} "{name}" already exists', {"name": name, "group": group, "kind": plural}
    )


def conflict(group: str, plural: str, name: str, why: str) -> ApiError:
    """409: the write was based on something that is no longer so."""
    qualified = f"{plural}.{group}" if group else plural
    return ApiError(
        409,
        "Conflict",
        f'Operation cannot be fulfilled on {qualified} "{name}": {why}',
        {"name": name, "group": group, "kind": plural},
    )


def expired(message: str) -> ApiError:
    """410: the revision asked for is no longer known; list again."""
    return ApiError(410, "Expired", message)


def unsupported_media_type(accepted: Sequence[str]) -> ApiError:
    """415: a body in a format this request does not take."""
    return ApiError(
        415,
        "UnsupportedMediaType",
        "the body of the request was in an unknown format - accepted media types include: " + ", ".join(accepted),
    )


def invalid(group: str, kind: str, name: str, causes: Sequence[Cause]) -> ApiError:
    """422: the object breaks its schema or a rule of its kind."""
    qualified = f"{kind}.{group}" if group else kind
    texts = [f"{c.field}: {c.message}" if c.field else c.message for c in causes]
    text = texts[0] if len(texts) == 1 else "[" + ", ".join(texts) + "]"
    return ApiError(
        422,
        "Invalid",
        f'{qualified} "{name}" is invalid: {text}',
        {"name": name, "group": group, "kind": kind, "causes": [c.wire() for c in causes]},
    )


def invalid_options(kind: str, cause: Cause) -> ApiError:
    """422: a query parameter, or a field of the body of a delete, that cannot be; `kind` is such as PatchOptions."""
    return invalid("meta.k8s.io", kind, "", [cause])


def unsupported_value(field: str, value: str, supported: Sequence[str]) -> Cause:
    """A field with none of the values that it may have; `value` is JSON."""
    choices = ", ".join(f'"{choice}"' for choice in supported)
    return Cause(field, "FieldValueNotSupported", f"Unsupported value: {value}: supported values: {choices}")


def required(field: str, hint: str = "") -> Cause:
    """A field that must be there and is not."""
    return Cause(field, "FieldValueRequired", f"Required value: {hint}" if hint else "Required value")


def invalid_value(field: str, value: object, why: str) -> Cause:
    """A field with a value that cannot be; `value` is shown as JSON, objects and lists by their type."""
    return Cause(field, "FieldValueInvalid", f"Invalid value: {shown(value)}: {why}")


def not_allowed(field: str, why: str) -> Cause:
    """A field that must not be set or changed now."""
    return Cause(field, "FieldValueForbidden", f"Forbidden: {why}")


def shown(value: object) -> str:
    """A value inside a message."""
    if isinstance(value, dict):
        return '"object"'
    if isinstance(value, list):
        return '"array"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return '"null"'
    text = str(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return text if isinstance(value, int | float) else f'"{text}"'
