"""Parses ParallelTrainingJob objects of the API server."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import ParallelTrainingJobStatus

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# Each repair removes something. This is more than any damaged status needs.
MAX_REPAIRS = 32

Model = TypeVar("Model", bound=BaseModel)


class InvalidSpecError(ValueError):
    """An invalid spec. The message names the field and the fix."""

    def __init__(self, message: str, problems: Sequence[tuple[str, str]] = ()) -> None:
        """`problems` are the fields and what is wrong with each, if they are known apart."""
        super().__init__(message)
        self.problems = tuple(problems)


def parse_spec(obj: Mapping[str, Any]) -> ParallelTrainingJobSpec:
    """The spec of a job object.

    Raises:
        InvalidSpecError: it violates the schema; the message lists at most five problems as `field: problem`.
    """
    try:
        return ParallelTrainingJobSpec.model_validate(obj.get("spec"))
    except ValidationError as error:
        problems = [(f"spec.{field_path(e['loc'])}", problem_text(e)) for e in error.errors(include_url=False)]
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        text = "; ".join(f"{field}: {problem}" for field, problem in problems[:5])
        raise InvalidSpecError(text + more, problems) from None


def parse_known_fields(model: type[Model], raw: Any) -> Model:
    """Parse JSON that another version may have written: unknown fields are ignored.

    Raises:
        ValueError: a known field is invalid (pydantic's `ValidationError` is a ValueError).
    """
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        unknown = [e["loc"] for e in error.errors(include_url=False) if e["type"] == "extra_forbidden"]
        if not unknown:
            raise
    known = copy.deepcopy(raw)
    try:
        for location in unknown:
            holder = known
            for part in location[:-1]:
                holder = holder[part]
            del holder[location[-1]]
    except (LookupError, TypeError):
        raise ValueError(f"the fields {unknown[:3]} are unknown and cannot be ignored") from None
    return model.model_validate(known)


def parse_status(obj: Mapping[str, Any]) -> ParallelTrainingJobStatus:
    """The status of a job object, without its invalid parts.

    Only the operator writes the status, but another version may have written it, or a user by mistake. Each invalid
    field is dropped alone, or with the list item that requires it. A damaged time or number therefore never loses the
    mesh generation or the workers' incarnations.
    """
    status = obj.get("status")
    if not isinstance(status, Mapping):
        return ParallelTrainingJobStatus()
    try:
        return ParallelTrainingJobStatus.model_validate(status)
    except ValidationError:
        raw: Any = copy.deepcopy(dict(status))
    for _ in range(MAX_REPAIRS):
        try:
            return ParallelTrainingJobStatus.model_validate(raw)
        except ValidationError as error:
            locations = {e["loc"] for e in error.errors(include_url=False, include_input=False, include_context=False)}
            # Deepest and last first: removing a list item must not move one that is still to be removed.
            for location in sorted(locations, key=lambda loc: [str(part).rjust(8, "0") for part in loc], reverse=True):
                _drop(raw, location)
    return ParallelTrainingJobStatus()


def _drop(raw: dict[str, Any], location: tuple[int | str, ...]) -> None:
    """Remove the value at `location`, or the object around it if a required field is missing."""
    holder: Any = raw
    for part in location[:-1]:
        try:
            holder = holder[part]
        except (KeyError, IndexError, TypeError):
            return
    try:
        del holder[location[-1]]
    except (KeyError, IndexError, TypeError):
        if len(location) > 1:
            _drop(raw, location[:-1])


def problem_text(error: ErrorDetails) -> str:
    """What is wrong, without the name that pydantic puts before the message of a validator."""
    return error["msg"].removeprefix("Value error, ")


def field_path(location: tuple[int | str, ...]) -> str:
    """`("workers", "env", 0, "name")` as `workers.env[0].name`."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "(root)"
