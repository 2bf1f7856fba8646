"""A document of the administrator as a file, which is read again when it changes.

A document with an error changes nothing: the last valid one stays in effect, and a log line and a metric say so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

CHECK_SECONDS = 10.0
"""Time between two looks at a file. Kubernetes replaces a mounted ConfigMap within about a minute."""
MAX_BYTES = 4 << 20

log = logging.getLogger(__name__)

Document = TypeVar("Document")
Model = TypeVar("Model", bound=BaseModel)


class DocumentError(ValueError):
    """A document is invalid. The message names the fields and what they must be."""


class DocumentFile(Generic[Document]):
    """Reads a document, and passes on each valid version of it."""

    def __init__(
        self,
        path: Path | None,
        what: str,
        parse: Callable[[str], Document],
        apply: Callable[[Document], None],
        report: Callable[[bool], None],
    ) -> None:
        """Reads nothing yet.

        Args:
            path: The file. None: there is no document, and nothing is ever applied.
            what: What the document is called in messages.
            parse: Parses a document, or raises `DocumentError`.
            apply: Called with each valid version.
            report: Called with whether the file is valid.
        """
        self._path = path
        self.what = what
        """What the document is called in messages."""
        self._parse_text = parse
        self._apply = apply
        self._report = report
        self._text: str | None = None
        """The document in effect."""
        self._problem = ""

    def load(self) -> None:
        """Apply the document at the start of the process.

        Raises:
            DocumentError: The file cannot be read, or the document is invalid. Without any valid version to fall back
                on, the process must not start: it would run without what the administrator set.
        """
        self._report(True)
        if self._path is None:
            return
        text = self._read(self._path)
        document = self._parse(text)
        self._text = text
        self._apply(document)

    async def run(self) -> None:
        """Read the file again whenever it has changed, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self.check()

    async def check(self) -> None:
        """Apply the document if it has changed and is valid. A large document is parsed off the event loop."""
        if self._path is None:
            return
        try:
            text = self._read(self._path)
            document = None if text == self._text else await asyncio.to_thread(self._parse, text)
        except DocumentError as error:
            self._report(False)
            if str(error) != self._problem:
                log.error(
                    "document is invalid; the last valid one stays in effect",
                    extra={"document": self.what, "error": str(error)},
                )
            self._problem = str(error)
            return
        self._text, self._problem = text, ""
        self._report(True)
        if document is None:
            return
        log.info("document changed", extra={"document": self.what})
        self._apply(document)

    def _read(self, path: Path) -> str:
        try:
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise DocumentError(f"{path}: larger than {MAX_BYTES} bytes")
            return content.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise DocumentError(f"{path}: cannot read the {self.what}: {error}") from None

    def _parse(self, text: str) -> Document:
        try:
            return self._parse_text(text)
        except DocumentError as error:
            raise DocumentError(f"{self._path}: {error}") from None


def parse_document(text: str, model: type[Model], expected: str, error: type[DocumentError]) -> Model:
    """Parse a document in YAML or JSON. An empty one has only defaults.

    Args:
        text: The document.
        model: Its class.
        expected: What it must be, for the message about another type.
        error: What to raise.

    Raises:
        DocumentError: The document is invalid.
    """
    try:
        return model.model_validate(load_mapping(text, expected, error))
    except ValidationError as problem:
        raise error(problems_of(problem)) from None


def load_mapping(text: str, expected: str, error: type[DocumentError]) -> dict[str, Any]:
    """The mapping in a document in YAML or JSON. Empty for an empty document.

    Raises:
        DocumentError: The document is not a mapping.
    """
    try:
        document = yaml.load(text, Loader=yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as problem:
        raise error(f"not valid YAML: {' '.join(str(problem).split())}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise error(f"must be {expected}")
    return document


def problems_of(error: ValidationError) -> str:
    """The first problems, each with the path of its field."""
    return "; ".join(_problem(one) for one in error.errors()[:10])


def _problem(problem: Any) -> str:
    path = ""
    for part in problem["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    if problem["type"] == "extra_forbidden":
        return f"unknown field `{path}`: remove it, or correct its name"
    message = problem["msg"].removeprefix("Value error, ")
    given = "" if problem["type"] in ("missing", "value_error") else f", got {str(problem['input'])[:64]!r}"
    return f"`{path}`: {message[:1].lower()}{message[1:]}{given}"
