"""Looks up the PersistentVolumeClaims of a job before it is placed: without them its pods would hold GPUs and wait."""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Callable

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright_operator.decide.missing_claims import MissingClaim, claims_of
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.paths import core_path

log = logging.getLogger(__name__)

FOUND_SECONDS = 600.0
"""For how long a claim that was found is not looked up again."""
MAX_FOUND = 4096
MAX_SIMILAR = 2


class ClaimCheck:
    """Which claims exist. Claims that were found are remembered for some minutes, others are asked for each time."""

    def __init__(self, client: KubeClient, now: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._now = now
        self._found: dict[tuple[str, str], float] = {}

    async def missing(self, namespace: str, spec: ParallelTrainingJobSpec) -> list[MissingClaim]:
        """The claims that a job names and that do not exist. Without the right to read claims, none is missing."""
        absent = [(field, name) for field, name in claims_of(spec) if not await self._exists(namespace, name)]
        if not absent:
            return []
        known = await self._names(namespace)
        return [
            MissingClaim(field, name, tuple(difflib.get_close_matches(name, known, MAX_SIMILAR)))
            for field, name in absent
        ]

    async def _exists(self, namespace: str, name: str) -> bool:
        found = self._found.get((namespace, name))
        if found is not None and self._now() - found < FOUND_SECONDS:
            return True
        try:
            await self._client.get(core_path(namespace, "persistentvolumeclaims", name))
        except ApiError as error:
            if error.code == 404:  # noqa: PLR2004
                return False
            if error.code != 403:  # noqa: PLR2004 - the role of an earlier version
                raise
            log.info("claims cannot be checked before placement", extra={"claim": name, "error": str(error)})
        if len(self._found) >= MAX_FOUND:
            self._found.clear()
        self._found[namespace, name] = self._now()
        return True

    async def _names(self, namespace: str) -> list[str]:
        """All claims of the namespace, to name similar ones."""
        path = core_path(namespace, "persistentvolumeclaims")
        try:
            return [item["metadata"]["name"] async for page in self._client.pages(path) for item in page.items]
        except ApiError as error:
            if error.code != 403:  # noqa: PLR2004
                raise
            return []
