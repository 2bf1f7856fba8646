"""Leader election with a Lease: one operator process leads, others wait.

Every call has a timeout, and the clock is monotonic. A leader that cannot renew for two thirds of the lease duration
exits, before another process can take the lease. Even if it does not notice, its writes end: every renewal extends the
fence, which each write checks. An overlap of two leaders would be harmless: status writes have the resourceVersion on
which they were decided, and pod names are functions of the persisted status.

A process calls `look` before it lists and `acquire` afterwards, so that none with an empty cache takes the lease from
one that could lead at once.
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
"""The fraction of the lease duration in which its holder may write."""

MAX_WAIT_SECONDS = 1.0
"""A waiting process reads the lease this often, so that it notices the last renewal, and the expiry, soon."""

UNKNOWN_HOLDER = "?"
"""The holder if another process changed the lease at the same time, or if it could not be read."""


class LeaseLostError(Exception):
    """This process no longer leads and must exit."""


class LeaderElector:
    """Acquires, renews and releases one Lease object.

    Args:
        cluster: Client of the API server.
        fence: Extended by every renewal.
        namespace: Namespace of the Lease object.
        name: Name of the Lease object.
        identity: Name of this process in the Lease.
        seconds: Duration of the lease.
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
        self._released = False
        self._writing = asyncio.Lock()
        self._free_version: str | None = None
        """resourceVersion of the lease when `look` found it free, empty if there was none. None if it was not free."""
        self.led_alone = False
        """Whether no other process has led since `look`: what was listed in between has all that others wrote."""
        self.other_leads = False
        """Whether another process held the lease when this one read it last, and had renewed it in time."""

    @property
    def found_free(self) -> bool:
        """Whether no other process held the lease when `look` read it."""
        return self._free_version is not None

    async def look(self) -> None:
        """Read the lease once. Failing is harmless: another process then counts as the holder."""
        try:
            async with asyncio.timeout(self._seconds / 3):
                lease = await self._read()
        except (ApiError, TimeoutError) as error:
            log.warning("lease request failed", extra={"error": str(error) or "timed out"})
            return
        holder = _spec(lease).get("holderIdentity") or self._identity
        self._free_version = _version(lease) if holder == self._identity else None
        self.other_leads = not self.found_free

    async def acquire(self) -> None:
        """Wait until this process leads."""
        logged_holder = ""
        while True:
            try:
                async with asyncio.timeout(self._seconds / 3):
                    holder = await self._try_acquire_or_renew()
            except (ApiError, TimeoutError) as error:
                log.warning("lease request failed", extra={"error": str(error) or "timed out"})
                holder = UNKNOWN_HOLDER
            self.other_leads = holder not in ("", UNKNOWN_HOLDER)
            if not holder:
                log.info("acquired the lease", extra={"lease": self._name, "identity": self._identity})
                return
            if holder not in (logged_holder, UNKNOWN_HOLDER):
                log.info("another operator holds the lease", extra={"lease": self._name, "holder": holder})
                logged_holder = holder
            await asyncio.sleep(min(self._until_expiry(), MAX_WAIT_SECONDS, self._seconds / 10))

    async def renew_until_lost(self) -> None:
        """Renew the lease until it is lost or released.

        Raises:
            LeaseLostError: Another process leads, or renewals failed for two thirds of the lease duration.
        """
        while True:
            await asyncio.sleep(self._seconds / 5)
            if self._released:
                return
            try:
                async with asyncio.timeout(self._seconds / 5):
                    holder = await self._try_acquire_or_renew()
            except (ApiError, TimeoutError) as error:
                log.warning("lease renewal failed", extra={"error": str(error) or "timed out"})
            else:
                if holder == UNKNOWN_HOLDER:
                    log.warning("another process changed the lease")
                elif holder:
                    self._fence.close()
                    raise LeaseLostError(f"{holder} holds the lease")
            if self._fence.seconds_left() <= 0 and not self._released:
                raise LeaseLostError(f"lease not renewed for {self._seconds * RENEW_DEADLINE_FRACTION:.0f} s")

    async def release(self) -> None:
        """Release the lease, so that the next leader need not wait. Closes the fence first. Failing is harmless."""
        self._released = True
        self._fence.close()
        try:
            # A renewal in flight would take the lease again.
            async with asyncio.timeout(2), self._writing:
                self._fence.close()
                if _spec(self._object).get("holderIdentity") != self._identity:
                    return
                await self._write({"holderIdentity": "", "leaseDurationSeconds": 1})
        except (ApiError, TimeoutError) as error:
            log.info("lease release failed", extra={"error": str(error) or "timed out"})

    async def _try_acquire_or_renew(self) -> str:
        """Acquire or renew the lease. Return its holder if that is another process, else an empty string."""
        async with self._writing:
            return "" if self._released else await self._acquire_or_renew()

    async def _acquire_or_renew(self) -> str:
        started = time.monotonic()
        if _spec(self._object).get("holderIdentity") == self._identity:
            # One request instead of two, while no other process writes: it has the version that was written last.
            try:
                await self._write({})
            except ApiError as error:
                if error.code not in (404, 409):
                    raise
            else:
                self._fence.extend(started + self._seconds * RENEW_DEADLINE_FRACTION)
                return ""
        self._object = await self._read()
        found = _version(self._object)
        spec = _spec(self._object)
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
        self.led_alone = found == self._free_version
        self._fence.extend(started + self._seconds * RENEW_DEADLINE_FRACTION)
        return ""

    async def _read(self) -> KubeObject | None:
        """The lease; None if there is none."""
        try:
            return await self._client.get(lease_path(self._namespace, self._name))
        except ApiError as error:
            if error.code != 404:
                raise
            return None

    def _until_expiry(self) -> float:
        """Seconds until the lease expires if its holder does not renew it, but at least a moment."""
        spec = _spec(self._object)
        duration = spec.get("leaseDurationSeconds")
        seconds = duration if isinstance(duration, int) else self._seconds
        return max(0.05, self._last_observed[1] + seconds - time.monotonic() + 0.01)

    def _expired(self, spec: KubeObject) -> bool:
        """Whether the holder has not renewed for the lease duration, by the clock of this process only."""
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
            body = {**self._object, "spec": {**_spec(self._object), **fields, "renewTime": now}}
            self._object = await self._client.replace(lease_path(self._namespace, self._name), body)


def _version(lease: KubeObject | None) -> str:
    return str(lease["metadata"]["resourceVersion"]) if lease is not None else ""


def _spec(lease: KubeObject | None) -> KubeObject:
    """Empty without a lease, and if it was made without a spec, which is optional."""
    return (lease or {}).get("spec") or {}
