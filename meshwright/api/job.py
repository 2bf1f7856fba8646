"""A ParallelTrainingJob object as it comes from the API server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import ParallelTrainingJobStatus


class InvalidSpecError(ValueError):
    """A spec that cannot be acted on. The message names the field and the fix."""


def parse_spec(obj: Mapping[str, Any]) -> ParallelTrainingJobSpec:
    """The spec of a job object.

    Raises:
        InvalidSpecError: it does not fit the schema; the message lists `field: problem`, at most five of them.
    """
    try:
        return ParallelTrainingJobSpec.model_validate(obj.get("spec"))
    except ValidationError as error:
        problems = [f"spec.{field_path(e['loc'])}: {e['msg']}" for e in error.errors(include_url=False)]
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise InvalidSpecError("; ".join(problems[:5]) + more) from None


def parse_status(obj: Mapping[str, Any]) -> ParallelTrainingJobStatus:
    """The status of a job object; an empty one where nothing usable stands, since the operator alone writes it."""
    try:
        return ParallelTrainingJobStatus.model_validate(obj.get("status") or {})
    except ValidationError:
        return ParallelTrainingJobStatus()


def field_path(location: tuple[int | str, ...]) -> str:
    """`("workers", "env", 0, "name")` as `workers.env[0].name`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "(root)"
