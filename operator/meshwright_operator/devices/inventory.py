"""Follows ResourceSlices, device classes and claims, and adds devices to the resources of the cache's nodes.

On a cluster without the API, or without the right to read it, nothing is counted, and the operator goes on without it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any

from meshwright.api.objects import KubeObject
from meshwright.devices.amounts import amounts_by_node
from meshwright.devices.claims import AllocatedClaim, Wanted, read_claim
from meshwright.devices.selectors import selectors_of
from meshwright.devices.slices import MALFORMED, NodeDevices, devices_by_node
from meshwright_operator.kube.cache import Cache
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.informer import Informer, Watched
from meshwright_operator.kube.paths import DEVICES
from meshwright_operator.kube.watch_liveness import WatchLiveness

RETRY_SECONDS = 600.0
"""Time between two looks whether the cluster has the API and the operator the right to read it."""
ERROR_SECONDS = 5.0
"""The same if the last look failed for another reason, or took too long."""
COLLECT_SECONDS = 1.0
"""How long changes are collected before nodes are counted again."""
INLINE_DEVICES = 2048
"""So many devices are counted in the event loop; more in a thread."""
UNAVAILABLE = (403, 404)

log = logging.getLogger(__name__)


class DeviceInventory:
    """What nodes have behind Dynamic Resource Allocation."""

    def __init__(self, client: KubeClient, cache: Cache, on_change: Callable[[], None]) -> None:
        """`on_change` is called when nodes have got or lost devices."""
        self._client = client
        self._cache = cache
        self._on_change = on_change
        self._slices: dict[str, KubeObject] = {}
        self._classes: dict[str, tuple[tuple[str, ...], str]] = {}
        self._claims: dict[str, AllocatedClaim] = {}
        self._nodes: dict[str, NodeDevices] | None = None
        """The devices of each node; None after a slice has changed."""
        self._versions: dict[str, str] = {}
        """Collection -> the resourceVersion of its last listing."""
        self._requested: set[Wanted] = set()
        self._changed = asyncio.Event()
        self.available = False
        """Whether all three collections have been listed."""
        self._retry_seconds = ERROR_SECONDS

    def known(self, device_class: str) -> bool:
        """Whether the cluster has this device class."""
        return self.available and device_class in self._classes

    def count(self, wanted: Wanted) -> None:
        """Count the devices for this request from now on."""
        if wanted not in self._requested:
            self._requested.add(wanted)
            self._changed.set()

    async def load(self) -> bool:
        """List everything once. Return whether the API can be read."""
        self._retry_seconds = ERROR_SECONDS
        try:
            for relist in (self._list_classes, self._list_slices, self._list_claims):
                await relist()
        except ApiError as error:
            if error.code in UNAVAILABLE:
                self._retry_seconds = RETRY_SECONDS
            else:
                log.warning("devices cannot be listed", extra={"error": str(error)})
            self.available = False
            return False
        self.available = True
        await self._update()
        return True

    async def run(self, liveness: WatchLiveness, idle_seconds: float) -> None:
        """Follow the collections until cancelled, as soon as they can be read."""
        while not self.available:  # noqa: ASYNC110 - the API server does not say when the API is installed
            await asyncio.sleep(self._retry_seconds)
            await self.load()
        async with asyncio.TaskGroup() as group:
            for resource, relist, apply in (
                ("deviceclasses", self._list_classes, self._put_class),
                ("resourceslices", self._list_slices, self._put_slice),
                ("resourceclaims", self._list_claims, self._put_claim),
            ):
                path = f"{DEVICES}/{resource}"
                watched = Watched(
                    path=path,
                    listed_version=partial(self._listed_version, resource),
                    relist=relist,
                    apply=partial(self._apply, apply),
                )
                group.create_task(Informer(self._client, watched, liveness, idle_seconds).run(), name=resource)
            group.create_task(self._follow(), name="devices of nodes")

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            await asyncio.sleep(COLLECT_SECONDS)
            await self._update()

    async def _update(self) -> None:
        self._changed.clear()
        started = time.monotonic()
        if self._nodes is None:
            self._nodes = devices_by_node(self._slices.values())
        count = partial(
            amounts_by_node,
            dict(self._nodes),
            dict(self._classes),
            list(self._claims.values()),
            frozenset(self._requested),
            self._counted_with_pod,
        )
        small = sum(len(node.devices) for node in self._nodes.values()) < INLINE_DEVICES
        amounts = count() if small else await asyncio.to_thread(count)
        if self._cache.set_device_amounts(amounts):
            log.info("devices of nodes changed", extra={"seconds": round(time.monotonic() - started, 3)})
            self._on_change()

    def _counted_with_pod(self, claim: AllocatedClaim) -> bool:
        return claim.pod is not None and self._cache.counts_claims_of(*claim.pod)

    def _apply(self, put: Callable[[KubeObject, bool], None], event: KubeObject) -> None:
        put(event["object"], event["type"] != "DELETED")
        self._changed.set()

    def _listed_version(self, resource: str) -> str:
        return self._versions.get(resource, "")

    async def _list_classes(self) -> str:
        return await self._list("deviceclasses", self._put_class, self._classes)

    async def _list_slices(self) -> str:
        return await self._list("resourceslices", self._put_slice, self._slices)

    async def _list_claims(self) -> str:
        return await self._list("resourceclaims", self._put_claim, self._claims)

    async def _list(
        self, resource: str, put: Callable[[KubeObject, bool], None], stored: MutableMapping[str, Any]
    ) -> str:
        """Replace what is stored of a collection, once the list is complete."""
        found: list[KubeObject] = []
        version = ""
        async for page in self._client.pages(f"{DEVICES}/{resource}"):
            found += page.items
            version = page.version
        stored.clear()
        self._nodes = None
        for obj in found:
            put(obj, True)
        self._versions[resource] = version
        self._changed.set()
        return version

    def _put_class(self, obj: KubeObject, exists: bool) -> None:
        name = _name(obj)
        self._classes.pop(name, None)
        if exists:
            try:
                spec = obj.get("spec") or {}
                self._classes[name] = selectors_of(spec), str(spec.get("extendedResourceName") or "")
            except MALFORMED:
                log.warning("ignoring a malformed device class", extra={"device_class": name})

    def _put_slice(self, obj: KubeObject, exists: bool) -> None:
        self._nodes = None
        if exists:
            self._slices[_name(obj)] = {"spec": obj.get("spec")}
        else:
            self._slices.pop(_name(obj), None)

    def _put_claim(self, obj: KubeObject, exists: bool) -> None:
        key = f"{obj['metadata'].get('namespace', '')}/{_name(obj)}"
        claim = read_claim(obj) if exists else None
        if claim is None:
            self._claims.pop(key, None)
        else:
            self._claims[key] = claim


def _name(obj: Mapping[str, Any]) -> str:
    return str(obj["metadata"]["name"])
