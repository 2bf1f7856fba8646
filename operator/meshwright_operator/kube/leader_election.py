"""Leadership by a Lease: one operator acts, another may wait.

Every call has its own time limit, the clock is monotonic, and a leader that could not renew for two thirds of the lease
gives up before anybody else may take it. Its writes end even if it does not notice: every renewal moves the fence that
each write must pass. What remains of an overlap is harmless: status writes carry the resourceVersion they were decided
on, and names of pods are functions of what was persisted.
"""

from __future__ import annotations

import asyncio
import logging
import time

from meshwright.api.objects import KubeObject
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.fence import Fence
from meshwright_operator.kube.paths import lease_path
from meshwright_operator.timestamps import format_micro_time, utc_now

log = logging.getLogger(__name__)


RENEW_DEADLINE_FRACTION = 2 / 3
"""The part of the lease for which its holder may act on it."""

UNKNOWN_HOLDER = "?"
"""In place of a holder: the lease changed under this process's hands, or could not be read."""


class LeaseLostError(Exception):
    """This process leads no longer and must end."""


class LeaderElector:
    """One Lease object and this process's claim to it.

    Args:
        cluster: the API server.
        fence: moved by every renewal.
        namespace: of the Lease object.
        name: of the Lease object.
        identity: this process, in the Lease.
        seconds: how long a leader that stopped renewing keeps others out.
    """

    def __init__(
        self, cluster: KubeClient, fence: Fence, namespace: str, name: str, identity: str, seconds: float
    ) -> None:
        self._client = cluster
        self._fence = fence
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._seconds = seconds
        self._object: KubeObject | None = None
        self._last_observed: tuple[object, float] = (None, 0.0)

    async def acquire(self) -> None:
        """Waits until this process leads."""
        logged_holder = ""
        while True:
            try:
                async with asyncio.timeout(self._seconds / 3):
                    holder = await self._try_acquire_or_renew()
            except (ApiError, TimeoutError) as error:
                log.warning("cannot reach the lease", extra={"error": str(error) or "timed out"})
                holder = UNKNOWN_HOLDER
            if not holder:
                log.info("leading", extra={"lease": self._name, "identity": self._identity})
                return
            if holder not in (logged_holder, UNKNOWN_HOLDER):
                log.info("another operator leads", extra={"lease": self._name, "holder": holder})
                logged_holder = holder
            await asyncio.sleep(min(2.0, self._seconds / 5))

    async def renew_until_lost(self) -> None:
        """Renews for ever.

        Raises:
            LeaseLostError: another process leads, or it could not be renewed for two thirds of the lease.
        """
        while True:
            await asyncio.sleep(self._seconds / 5)
            try:
                async with asyncio.timeout(self._seconds / 5):
                    holder = await self._try_acquire_or_renew()
            except (ApiError, TimeoutError) as error:
                log.warning("the lease was not renewed", extra={"error": str(error) or "timed out"})
            else:
                if holder == UNKNOWN_HOLDER:
                    log.warning("somebody else wrote to the lease")
                elif holder:
                    self._fence.close()
                    raise LeaseLostError(f"{holder} leads now")
            if self._fence.seconds_left() <= 0:
                raise LeaseLostError(f"the lease was not renewed for {self._seconds * RENEW_DEADLINE_FRACTION:.0f} s")

    async def release(self) -> None:
        """Gives the lease back, so that the next leader need not wait; failing to is harmless. No write follows it."""
        self._fence.close()
        if self._object is None or self._object["spec"].get("holderIdentity") != self._identity:
            return
        try:
            async with asyncio.timeout(2):
                await self._write({"holderIdentity": "", "leaseDurationSeconds": 1})
        except (ApiError, TimeoutError) as error:
            log.info("the lease was not released", extra={"error": str(error) or "timed out"})

    async def _try_acquire_or_renew(self) -> str:
        """Takes or renews the lease; the holder when it is somebody else's."""
        started = time.monotonic()
        if self._object is not None and self._object["spec"].get("holderIdentity") == self._identity:
            # One request in place of two, as long as nobody else writes: it carries the version that was written last.
            try:
                await self._write({})
            except ApiError as error:
                if error.code not in (404, 409):
                    raise
            else:
                self._fence.extend(started + self._seconds * RENEW_DEADLINE_FRACTION)
                return ""
        try:
            self._object = await self._client.get(lease_path(self._namespace, self._name))
        except ApiError as error:
            if error.code != 404:
                raise
            self._object = None
        spec = (self._object or {}).get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        if holder and holder != self._identity and not self._expired(spec):
            return holder
        fields = {"holderIdentity": self._identity, "leaseDurationSeconds": max(1, round(self._seconds))}
        if holder != self._identity:
            fields["acquireTime"] = format_micro_time(utc_now())
            fields["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + (1 if self._object else 0)
        try:
            await self._write(fields)
        except ApiError as error:
            if error.code == 409:
                return UNKNOWN_HOLDER
            raise
        self._fence.extend(started + self._seconds * RENEW_DEADLINE_FRACTION)
        return ""

    def _expired(self, spec: KubeObject) -> bool:
        """Whether the holder has not renewed for the lease's time, by this process's clock alone."""
        mark = (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions"))
        if self._last_observed[0] != mark:
            self._last_observed = (mark, time.monotonic())
        duration = spec.get("leaseDurationSeconds")
        return time.monotonic() - self._last_observed[1] > (duration if isinstance(duration, int) else self._seconds)

    async def _write(self, fields: KubeObject) -> None:
        now = format_micro_time(utc_now())
        if self._object is None:
            body = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": {**fields, "renewTime": now},
            }
            self._object = await self._client.create(lease_path(self._namespace), body)
        else:
            body = {**self._object, "spec": {**(self._object.get("spec") or {}), **fields, "renewTime": now}}
            self._object = await self._client.replace(lease_path(self._namespace, self._name), body)
