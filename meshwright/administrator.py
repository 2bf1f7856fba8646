"""Documents that an administrator writes for the operator: one YAML document each, checked by its pydantic class.

An error names every field with its path, what it must be, and what was given.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

MAX_PROBLEMS = 10
"""Largest number of fields that one message names."""

Document = TypeVar("Document", bound=BaseModel)


def parse_document(kind: type[Document], text: str, expected: str) -> Document:
    """Parse a document, in YAML or JSON. An empty one has the default of every field.

    Args:
        kind: the document's class.
        text: the document.
        expected: what it must be, for the message about another type.

    Raises:
        ValueError: the document is invalid. The message names the fields and what they must be.
    """
    document = load_mapping(text, expected)
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise ValueError(problems_of(error)) from None


def load_mapping(text: str, expected: str) -> dict[str, Any]:
    """The mapping in a document in YAML or JSON. Empty for an empty document.

    Raises:
        ValueError: the document is not a mapping.
    """
    import yaml  # the planner, which only uses the classes of documents, does not need it

    try:
        document = yaml.load(text, Loader=yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"not valid YAML: {' '.join(str(error).split())}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ValueError(f"must be {expected}")
    return document


def document_in_values(text: str, key: str, expected: str) -> str:
    """The document under `key` if `text` has values of the chart, or else `text`, which then is the document itself.

    Raises:
        ValueError: `text` is not a mapping.
    """
    import yaml

    inner = load_mapping(text, expected).get(key)
    return yaml.safe_dump(inner) if isinstance(inner, dict) else text


def problems_of(error: ValidationError) -> str:
    """The first problems, each with the path of its field."""
    return "; ".join(_problem(problem) for problem in error.errors()[:MAX_PROBLEMS])


def _problem(problem: Any) -> str:
    path = ""
    for part in problem["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    if problem["type"] == "extra_forbidden":
        return f"unknown field `{path}`: remove it, or correct its name"
    message = problem["msg"].removeprefix("Value error, ")
    given = "" if problem["type"] in ("missing", "value_error") else f", got {str(problem['input'])[:64]!r}"
    named = f"`{path}`: " if path else ""
    return f"{named}{message[:1].lower()}{message[1:]}{given}"
