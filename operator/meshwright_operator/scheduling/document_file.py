"""A document of the administrator as a file, which is read again when it changes.

A document with an error changes nothing: the last valid one stays in effect, and a log line and a metric say so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from prometheus_client import Gauge

CHECK_SECONDS = 10.0
"""Time between two looks at the file. Kubernetes replaces a mounted ConfigMap within about a minute."""
MAX_BYTES = 4 << 20

log = logging.getLogger(__name__)

T = TypeVar("T")


class DocumentFile(Generic[T]):
    """Reads a document, and passes on each valid version of it."""

    def __init__(
        self,
        path: Path | None,
        name: str,
        parse: Callable[[str], T],
        apply: Callable[[T], None],
        valid: Gauge,
        error: type[ValueError],
    ) -> None:
        """Without a path there is no document.

        Args:
            path: The file.
            name: What the document is, for log lines.
            parse: Parses it, and raises `error` if it is invalid.
            apply: Called with each valid version.
            valid: The metric that is 1 while the file has no error.
            error: Raised if the file cannot be read.
        """
        self._path = path
        self._name = name
        self._parse_text = parse
        self._apply = apply
        self._valid = valid
        self._error = error
        self._text: str | None = None
        """The document in effect."""
        self._problem = ""

    def load(self) -> None:
        """Apply the document at the start of the process.

        Raises:
            ValueError: The file cannot be read, or the document is invalid. Without any valid version to fall back on,
                the process must not start.
        """
        self._valid.set(1)
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
        except self._error as error:
            self._valid.set(0)
            if str(error) != self._problem:
                log.error(
                    "document is invalid; the last valid one stays in effect",
                    extra={"document": self._name, "error": str(error)},
                )
            self._problem = str(error)
            return
        self._text, self._problem = text, ""
        self._valid.set(1)
        if document is None:
            return
        log.info("document changed", extra={"document": self._name})
        self._apply(document)

    def _read(self, path: Path) -> str:
        try:
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise self._error(f"{path}: larger than {MAX_BYTES} bytes")
            return content.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise self._error(f"{path}: cannot read the {self._name}: {error}") from None

    def _parse(self, text: str) -> T:
        try:
            return self._parse_text(text)
        except self._error as error:
            raise self._error(f"{self._path}: {error}") from None
