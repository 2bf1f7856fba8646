"""The administrator's policy as a file, which is read again when it changes.

A document with an error changes nothing: the last valid one stays in effect, and a log line and a metric say so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from meshwright_operator.metrics.operator_metrics import OperatorMetrics
from meshwright_operator.scheduling.policy import Policy, PolicyError, parse_policy

CHECK_SECONDS = 10.0
"""Time between two looks at the file. Kubernetes replaces a mounted ConfigMap within about a minute."""
MAX_BYTES = 4 << 20

log = logging.getLogger(__name__)


class PolicyFile:
    """Reads the policy, and passes on each valid version of it."""

    def __init__(self, path: Path | None, metrics: OperatorMetrics, apply: Callable[[Policy], None]) -> None:
        self._path = path
        self._metrics = metrics
        self._apply = apply
        self._text: str | None = None
        """The document in effect."""
        self._problem = ""

    def load(self) -> None:
        """Apply the policy at the start of the process. Without a path there are no bounds.

        Raises:
            PolicyError: The file cannot be read, or the document is invalid. Without any valid policy to fall back on,
                the process must not start: it would run without the administrator's bounds.
        """
        self._metrics.policy_valid.set(1)
        if self._path is None:
            return
        text = self._read(self._path)
        policy = self._parse(text)
        self._text = text
        self._apply(policy)

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
            policy = None if text == self._text else await asyncio.to_thread(self._parse, text)
        except PolicyError as error:
            self._metrics.policy_valid.set(0)
            if str(error) != self._problem:
                log.error("policy is invalid; the last valid one stays in effect", extra={"error": str(error)})
            self._problem = str(error)
            return
        self._text, self._problem = text, ""
        self._metrics.policy_valid.set(1)
        if policy is None:
            return
        log.info("policy changed", extra={"namespaces": len(policy.namespaces)})
        self._apply(policy)

    def _read(self, path: Path) -> str:
        try:
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise PolicyError(f"{path}: larger than {MAX_BYTES} bytes")
            return content.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyError(f"{path}: cannot read the policy: {error}") from None

    def _parse(self, text: str) -> Policy:
        try:
            return parse_policy(text)
        except PolicyError as error:
            raise PolicyError(f"{self._path}: {error}") from None
