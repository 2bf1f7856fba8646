"""Writes one pod's status to the API: the newest state wins, nothing is written twice, outages are waited out."""

from __future__ import annotations

import asyncio
import logging

import aiohttp

from meshwright.local.client import STRATEGIC_PATCH, ApiClient, ApiError
from meshwright.local.nodeagent.context import PodContext
from meshwright.local.nodeagent.state import PodState, status
from meshwright.local.resources import PODS, Object

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5


class StatusReporter:
    """Reports a pod until its object is gone."""

    def __init__(self, client: ApiClient, context: PodContext, state: PodState) -> None:
        self._client = client
        self._context = context
        self._state = state
        self._lock = asyncio.Lock()
        self._sent: Object | None = None
        self._dirty = asyncio.Event()
        self._gone = False

    def changed(self) -> None:
        """The state changed: report it soon."""
        self._dirty.set()

    async def run(self) -> None:
        """Report changes until cancelled."""
        while True:
            await self._dirty.wait()
            await self.flush()

    async def flush(self) -> None:
        """Return once the API has the present state, or the pod's object is gone."""
        async with self._lock:
            while not self._gone:
                self._dirty.clear()
                pod = self._context.pod
                gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates") or ()]
                body = status(self._state, gates, (pod.get("status") or {}).get("conditions") or [])
                if body == self._sent:
                    return
                try:
                    await self._send(body)
                    self._sent = body
                    return
                except ApiError as error:
                    if error.status in (404, 409):
                        self._gone = True
                        return
                    logger.warning("status of %s: %s", pod["metadata"]["name"], error)
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    logger.debug("status of %s: %r", pod["metadata"]["name"], error)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _send(self, body: Object) -> None:
        metadata = self._context.pod["metadata"]
        # The merge is by address: one that an earlier life of the pod had would stay beside the present one.
        body = {**body, "podIPs": [{"$patch": "replace"}, *body["podIPs"]]}
        # The uid makes the server refuse a report about an earlier pod of the same name.
        await self._client.patch(
            PODS,
            metadata["name"],
            {"metadata": {"uid": metadata["uid"]}, "status": body},
            metadata["namespace"],
            subresource="status",
            content_type=STRATEGIC_PATCH,
        )
