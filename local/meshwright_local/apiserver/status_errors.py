"""Errors of the API: a `Status` with an HTTP code, a machine-readable reason and one cause per field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.api.objects import KubeObject


class Cause(NamedTuple):
    """One error of an object: field, type (`FieldValueInvalid`, ...) and message."""

    field: str
    reason: str
    message: str


class ApiError(Exception):
    """A request fails with this `Status`; `plain`: the response is text, not JSON, for paths outside all groups."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        details: KubeObject | None = None,
        *,
        retry_after: int | None = None,
        plain: bool = False,
        metadata: KubeObject | None = None,
    ) -> None:
        super().__init__(message)
        self.metadata = metadata or {}
        self.warnings: list[str] = []
        self.code, self.reason, self.message, self.plain = code, reason, message, plain
        self.retry_after = retry_after
        self.details = {**(details or {}), **({} if retry_after is None else {"retryAfterSeconds": retry_after})}

    def status(self) -> KubeObject:
        """Return the `Status` object of the response."""
        details = {key: value for key, value in self.details.items() if value not in ("", [])}
        head = {"kind": "Status", "apiVersion": "v1", "metadata": self.metadata, "status": "Failure"}
        why = {"reason": self.reason} if self.reason else {}
        return {**head, "message": self.message, **why, **({"details": details} if details else {}), "code": self.code}


class UnreadableError(ApiError):
    """An object cannot be decoded as its kind: 400, or 422 if a patch made it so."""

    def __init__(self, kind: str, version: str, why: str) -> None:
        super().__init__(400, "BadRequest", f'{kind} in version "{version}" cannot be handled as a {kind}: {why}')


def success(code: int | None = None, details: KubeObject | None = None) -> KubeObject:
    """Return a success `Status` object. That of a delete has no code, as in the real server."""
    status: KubeObject = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    return {**status, **({} if code is None else {"code": code}), **({"details": details} if details else {})}


def qualified(group: str, name: str) -> str:
    """Return a kind or plural name with its group, such as `deployments.apps`."""
    return f"{name}.{group}" if group else name


def details_of(group: str, kind: str, name: str, causes: Sequence[Cause] = ()) -> KubeObject:
    """Return the `details` of a Status about one object."""
    return {"name": name, "group": group, "kind": kind, "causes": [cause._asdict() for cause in causes]}


def bad_request(message: str) -> ApiError:
    """Return the error 400: the request is malformed."""
    return ApiError(400, "BadRequest", message)


def unsupported_media_type(accepted: Sequence[str]) -> ApiError:
    """Return the error 415: the request does not support the body's format."""
    text = "the body of the request was in an unknown format - accepted media types include: " + ", ".join(accepted)
    return ApiError(415, "UnsupportedMediaType", text)


def unknown_group_path() -> ApiError:
    """Return the error 404 in plain text: the path is outside the served groups."""
    return ApiError(404, "NotFound", "404 page not found", plain=True)


def unknown_path() -> ApiError:
    """Return the error 404: a served group does not have the version, resource or subresource."""
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def method_not_allowed() -> ApiError:
    """Return the error 405: the path does not support the verb."""
    return ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")


def on_object(
    code: int, reason: str, text: str, group: str, plural: str, name: str, causes: Sequence[Cause] = ()
) -> ApiError:
    """Return an error about one object; `text` has a placeholder for it, such as `{} not found`."""
    subject = qualified(group, plural) + (f' "{name}"' if name else "")
    return ApiError(code, reason, text.replace("{}", subject, 1), details_of(group, plural, name, causes))


def forbidden(group: str, plural: str, name: str, why: str, causes: Sequence[Cause] = ()) -> ApiError:
    """Return the error 403: an admission plugin or the authorizer rejects the request."""
    return on_object(403, "Forbidden", f"{{}} is forbidden: {why}", group, plural, name, causes)


def invalid(group: str, kind: str, name: str, causes: Sequence[Cause]) -> ApiError:
    """Return the error 422: the object violates its schema or a rule of its kind."""
    texts = [f"{c.field}: {c.message}" if c.field else c.message for c in causes]
    text = texts[0] if len(texts) == 1 else "[" + ", ".join(texts) + "]"
    text = f'{qualified(group, kind)} "{name}" is invalid: {text}'
    return ApiError(422, "Invalid", text, details_of(group, kind, name, causes))


def unsupported_value(field: str, value: object, supported: Sequence[object]) -> Cause:
    """Return the cause of a field with an unsupported value."""
    choices = ", ".join(format_value(choice) for choice in supported)
    return Cause(
        field, "FieldValueNotSupported", f"Unsupported value: {format_value(value)}: supported values: {choices}"
    )


def required(field: str, hint: str = "") -> Cause:
    """Return the cause of a required field that is missing."""
    return Cause(field, "FieldValueRequired", f"Required value: {hint}" if hint else "Required value")


def invalid_value(field: str, value: object, why: str) -> Cause:
    """Return the cause of a field with an invalid value."""
    return Cause(field, "FieldValueInvalid", f"Invalid value: {format_value(value)}: {why}")


def duplicate(field: str, value: object) -> Cause:
    """Return the cause of a duplicate list item."""
    return Cause(field, "FieldValueDuplicate", f"Duplicate value: {format_value(value)}")


def too_many(field: str, count: int, most: int) -> Cause:
    """Return the cause of a list with too many items."""
    return Cause(field, "FieldValueTooMany", f"Too many: {count}: must have at most {most} items")


def not_allowed(field: str, why: str) -> Cause:
    """Return the cause of a field that must not be set or changed."""
    return Cause(field, "FieldValueForbidden", f"Forbidden: {why}")


def format_value(value: object) -> str:
    """Format a value for a message: as JSON, objects and lists by their type, long text truncated."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or isinstance(value, dict | list):
        return '"null"' if value is None else '"object"' if isinstance(value, dict) else '"array"'
    text = str(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return text if isinstance(value, int | float) else f'"{text}"'
