"""Failures as the API speaks them: a `Status` with an HTTP code, a machine-readable reason and one cause a field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright_local.kube.resources import Object


class Cause(NamedTuple):
    """One thing wrong with an object: where, what sort of mistake (`FieldValueInvalid`, ...), and in words."""

    field: str
    reason: str
    message: str


class ApiError(Exception):
    """A request that is answered with a failure `Status`; `plain` is for paths that no group serves: text, no JSON."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        details: Object | None = None,
        *,
        retry_after: int | None = None,
        plain: bool = False,
    ) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.plain = code, reason, message, plain
        self.retry_after = retry_after
        self.details = {**(details or {}), **({} if retry_after is None else {"retryAfterSeconds": retry_after})}

    def status(self) -> Object:
        """The `Status` object of the answer."""
        details = {key: value for key, value in self.details.items() if value not in ("", [])}
        head = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        return {**head, "message": self.message, "reason": self.reason, "details": details, "code": self.code}


def success(code: int | None = None, details: Object | None = None) -> Object:
    """A success `Status` object. That of a delete carries no code, as with a real server."""
    status: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    return {**status, **({} if code is None else {"code": code}), **({"details": details} if details else {})}


def qualified(group: str, name: str) -> str:
    """A kind or plural name with its group, such as `deployments.apps`."""
    return f"{name}.{group}" if group else name


def details_of(group: str, kind: str, name: str, causes: Sequence[Cause] = ()) -> Object:
    """The `details` of a Status about one object."""
    return {"name": name, "group": group, "kind": kind, "causes": [cause._asdict() for cause in causes]}


def bad_request(message: str) -> ApiError:
    """400: the request itself makes no sense."""
    return ApiError(400, "BadRequest", message)


def unsupported_media_type(accepted: Sequence[str]) -> ApiError:
    """415: a body in a format that this request does not take."""
    text = "the body of the request was in an unknown format - accepted media types include: " + ", ".join(accepted)
    return ApiError(415, "UnsupportedMediaType", text)


def unknown_group_path() -> ApiError:
    """404 in plain text: the path is outside the groups that are served."""
    return ApiError(404, "NotFound", "404 page not found", plain=True)


def unknown_path() -> ApiError:
    """404: a served group has no such version, resource or subresource."""
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def method_not_allowed() -> ApiError:
    """405: the path exists, the verb does not."""
    return ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")


def on_object(
    code: int, reason: str, text: str, group: str, plural: str, name: str, causes: Sequence[Cause] = ()
) -> ApiError:
    """A failure about one object; `text` has a place for it, such as `{} not found`."""
    subject = qualified(group, plural) + (f' "{name}"' if name else "")
    return ApiError(code, reason, text.replace("{}", subject, 1), details_of(group, plural, name, causes))


def forbidden(group: str, plural: str, name: str, why: str, causes: Sequence[Cause] = ()) -> ApiError:
    """403: an admission rule or the authorizer says no."""
    return on_object(403, "Forbidden", f"{{}} is forbidden: {why}", group, plural, name, causes)


def invalid(group: str, kind: str, name: str, causes: Sequence[Cause]) -> ApiError:
    """422: the object breaks its schema or a rule of its kind."""
    texts = [f"{c.field}: {c.message}" if c.field else c.message for c in causes]
    text = texts[0] if len(texts) == 1 else "[" + ", ".join(texts) + "]"
    text = f'{qualified(group, kind)} "{name}" is invalid: {text}'
    return ApiError(422, "Invalid", text, details_of(group, kind, name, causes))


def unsupported_value(field: str, value: object, supported: Sequence[object]) -> Cause:
    """A field with none of the values that it may have."""
    choices = ", ".join(format_value(choice) for choice in supported)
    return Cause(
        field, "FieldValueNotSupported", f"Unsupported value: {format_value(value)}: supported values: {choices}"
    )


def required(field: str, hint: str = "") -> Cause:
    """A field that must be there and is not."""
    return Cause(field, "FieldValueRequired", f"Required value: {hint}" if hint else "Required value")


def invalid_value(field: str, value: object, why: str) -> Cause:
    """A field with a value that cannot be."""
    return Cause(field, "FieldValueInvalid", f"Invalid value: {format_value(value)}: {why}")


def duplicate(field: str, value: object) -> Cause:
    """A list item that must be unique and is not."""
    return Cause(field, "FieldValueDuplicate", f"Duplicate value: {format_value(value)}")


def not_allowed(field: str, why: str) -> Cause:
    """A field that must not be set or changed now."""
    return Cause(field, "FieldValueForbidden", f"Forbidden: {why}")


def format_value(value: object) -> str:
    """A value inside a message: JSON, but objects and lists by their type, and long text cut."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or isinstance(value, dict | list):
        return '"null"' if value is None else '"object"' if isinstance(value, dict) else '"array"'
    text = str(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return text if isinstance(value, int | float) else f'"{text}"'
