"""Whether another replica leads now: it has the key of the running jobs in memory, even if the Secret is gone."""

from __future__ import annotations

import time
from collections.abc import Callable

from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.paths import lease_path

LONGEST_WAIT_SECONDS = 120.0
"""How long a replica that starts waits for the leader to restore the Secret. One that serves without it never does."""
DEFAULT_LEASE_SECONDS = 15


class RunningLeader:
    """Reads the lease as a process that waits for its holder.

    Args:
        client: The API server.
        namespace: Namespace of the Lease.
        name: Name of the Lease.
        identity: Name of this process in the Lease.
        clock: Seconds of a monotonic clock: clocks of different machines are not compared.
    """

    def __init__(
        self, client: KubeClient, namespace: str, name: str, identity: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._path = lease_path(namespace, name)
        self._identity = identity
        self._clock = clock
        self._first: float | None = None
        self._renewed: tuple[object, float] = (None, 0.0)

    async def name(self) -> str:
        """The other process that holds the lease. Empty if none does, it no longer renews, or the wait is over.

        Raises:
            ApiError: The lease could not be read.
        """
        try:
            spec = (await self._client.get(self._path)).get("spec") or {}
        except ApiError as error:
            if error.code != 404:
                raise
            spec = {}
        holder, now = str(spec.get("holderIdentity") or ""), self._clock()
        if holder in ("", self._identity):
            return ""
        if self._first is None:
            self._first = now
        renewal = holder, spec.get("renewTime")
        if self._renewed[0] != renewal:
            self._renewed = renewal, now
        duration = spec.get("leaseDurationSeconds")
        expired = now - self._renewed[1] > (duration if isinstance(duration, int) else DEFAULT_LEASE_SECONDS)
        return "" if expired or now - self._first >= LONGEST_WAIT_SECONDS else holder
