"""Garbage collection by ownerReferences: background, foreground and orphan, for every resource the server has.

Follows kube-controller-manager's collector: a graph is fed by watches of everything deletable; each suspicion is
checked against the live object before anything is deleted, because watches of different resources are not ordered
among each other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from functools import partial

import aiohttp

from meshwright.local.client import ApiClient, ApiError
from meshwright.local.controllers.ownership import FOREGROUND, ORPHAN, Graph, Node, OwnerState, judge
from meshwright.local.discovery import discover
from meshwright.local.informers import Informers
from meshwright.local.reflector import Change, ChangeType, Reflector
from meshwright.local.resources import CRDS, Object, Resource, key_of
from meshwright.local.workqueue import WorkQueue

logger = logging.getLogger(__name__)

# Events name no owners, come in numbers and expire by themselves: Kubernetes leaves them out too.
_IGNORED = frozenset({"events"})
_NEEDED_VERBS = frozenset({"list", "watch", "delete"})
_DISCOVERY_SECONDS = 30.0
_REMEMBERED_ABSENT = 10_000


class GarbageCollector:
    """Deletes what nobody owns any more and lets owners go once their dependents are gone."""

    def __init__(self, informers: Informers) -> None:
        self._client: ApiClient = informers.client
        self._graph = Graph()
        self._kinds: dict[tuple[str, str], Resource] = {}
        self._watches: dict[Resource, tuple[Reflector, asyncio.Task[None]]] = {}
        self._unsure: set[str] = set()
        """Dependents of an owner that no watch has shown: looked at again when there are more watches."""
        self._absent: OrderedDict[str, None] = OrderedDict()
        self._queue: WorkQueue[str] = WorkQueue("garbage", self._look, workers=4)
        self._rediscover = asyncio.Event()
        informers.get(CRDS).listeners.append(lambda _: self._rediscover.set())

    async def run(self) -> None:
        """Collect until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_resources(group))
                group.create_task(self._queue.run())
        finally:
            self._watches.clear()

    async def _follow_resources(self, group: asyncio.TaskGroup) -> None:
        while True:
            self._rediscover.clear()
            try:
                await self._update_watches(group)
            except (ApiError, aiohttp.ClientError, OSError, TimeoutError) as error:
                logger.debug("discovery failed: %r", error)
                await asyncio.sleep(0.5)
                continue
            try:
                async with asyncio.timeout(_DISCOVERY_SECONDS):
                    await self._rediscover.wait()
                    # A definition is served a moment after it is written.
                    await asyncio.sleep(0.05)
            except TimeoutError:
                pass

    async def _update_watches(self, group: asyncio.TaskGroup) -> None:
        served = await discover(self._client)
        self._kinds = {(item.resource.group, item.resource.kind): item.resource for item in served}
        wanted = {
            item.resource for item in served if item.verbs >= _NEEDED_VERBS and item.resource.plural not in _IGNORED
        }
        for resource in wanted - self._watches.keys():
            reflector = Reflector(self._client, resource, trim=_metadata_only)
            reflector.listeners.append(partial(self._changed, resource))
            self._watches[resource] = (reflector, group.create_task(reflector.run()))
            group.create_task(self._recheck(reflector))
        for resource in self._watches.keys() - wanted:
            reflector, task = self._watches.pop(resource)
            task.cancel()
            for item in reflector.objects.values():
                # No longer served is not deleted: what they own stays, as long as nothing better is known.
                self._graph.remove(item["metadata"]["uid"])

    async def _recheck(self, reflector: Reflector) -> None:
        await reflector.synced.wait()
        unsure, self._unsure = self._unsure, set()
        for uid in unsure:
            self._queue.add(uid)

    def _changed(self, resource: Resource, change: Change) -> None:
        node = Node.of(resource, change.object)
        if change.type is ChangeType.DELETED:
            self._graph.remove(node.uid)
            self._remember_absent(node.uid)
            for dependent in self._graph.dependents(node.uid):
                self._queue.add(dependent.uid)
        else:
            old = self._graph.put(node)
            if node.owners or node.deleting:
                self._queue.add(node.uid)
            if node.in_foreground:
                for dependent in self._graph.dependents(node.uid):
                    self._queue.add(dependent.uid)
            if old is None or old.owners == node.owners:
                return
            node = old
        for owner in node.owners:
            # One blocker fewer may be what the owner waits for.
            if owner["uid"] in self._graph.nodes and self._graph.nodes[owner["uid"]].deleting:
                self._queue.add(owner["uid"])

    def _remember_absent(self, uid: str) -> None:
        # With a definition its kind goes too, and then the server cannot be asked about the owner any more.
        self._absent[uid] = None
        while len(self._absent) > _REMEMBERED_ABSENT:
            self._absent.popitem(last=False)

    async def _look(self, uid: str) -> float | None:
        node = self._graph.nodes.get(uid)
        if node is None:
            return None
        live = await self._client.find(node.resource, node.name, node.namespace)
        if live is None or live["metadata"]["uid"] != uid:
            # The watch will tell; if the graph was ahead of it, nothing is lost either.
            return None
        node = Node.of(node.resource, live)
        if node.orphaning:
            return await self._orphan(node, live)
        if node.in_foreground:
            await self._release(node, live)
        await self._collect(node, live)
        return None

    async def _orphan(self, owner: Node, live: Object) -> float | None:
        for dependent in self._graph.dependents(owner.uid):
            await self._drop_owners(dependent, frozenset({owner.uid}))
        await self._remove_finalizer(owner, live, ORPHAN)
        return None

    async def _release(self, owner: Node, live: Object) -> None:
        blockers = self._graph.blockers(owner.uid)
        for dependent in self._graph.dependents(owner.uid):
            self._queue.add(dependent.uid)
        if not blockers:
            await self._remove_finalizer(owner, live, FOREGROUND)

    async def _collect(self, node: Node, live: Object) -> None:
        states = {owner["uid"]: await self._owner_state(node, owner) for owner in node.owners}
        verdict = judge(node, states, bool(self._graph.dependents(node.uid)))
        if verdict.delete:
            logger.debug("collecting %s %s/%s", node.resource.plural, node.namespace, node.name)
            await self._client.delete(
                node.resource, node.name, node.namespace or None, propagation=verdict.delete, uid=node.uid
            )
        elif verdict.drop_owners:
            await self._drop_owners(node, verdict.drop_owners)

    async def _owner_state(self, node: Node, owner: Object) -> OwnerState:
        if owner["uid"] in self._absent:
            return OwnerState.GONE
        known = self._graph.nodes.get(owner["uid"])
        if known is None:
            # It may go before its kind is watched, and then nobody would tell.
            self._unsure.add(node.uid)
        if known is None or known.namespace not in ("", node.namespace):
            group = owner["apiVersion"].rpartition("/")[0]
            resource = self._kinds.get((group, owner["kind"]))
            if resource is None:
                # Perhaps a definition that was just made; never delete for want of knowledge.
                return OwnerState.SOLID
            live = await self._client.find(resource, owner["name"], node.namespace if resource.namespaced else None)
            if live is None or live["metadata"]["uid"] != owner["uid"]:
                return OwnerState.GONE
            known = Node.of(resource, live)
        return OwnerState.LEAVING if known.in_foreground and owner.get("blockOwnerDeletion") else OwnerState.SOLID

    async def _drop_owners(self, node: Node, uids: frozenset[str]) -> None:
        live = await self._client.find(node.resource, node.name, node.namespace)
        if live is None or live["metadata"]["uid"] != node.uid:
            return
        owners = live["metadata"].get("ownerReferences") or []
        kept = [owner for owner in owners if owner["uid"] not in uids]
        if len(kept) != len(owners):
            await self._patch_metadata(node, live, {"ownerReferences": kept or None})

    async def _remove_finalizer(self, node: Node, live: Object, name: str) -> None:
        kept = [item for item in live["metadata"].get("finalizers") or () if item != name]
        await self._patch_metadata(node, live, {"finalizers": kept or None})

    async def _patch_metadata(self, node: Node, live: Object, fields: Object) -> None:
        metadata = live["metadata"]
        exact = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"], **fields}
        await self._client.patch(node.resource, node.name, {"metadata": exact}, node.namespace or None)


def _metadata_only(item: Object) -> Object:
    metadata = item["metadata"]
    namespace, name = key_of(item)
    kept = ("uid", "resourceVersion", "ownerReferences", "finalizers", "deletionTimestamp")
    slim = {field: metadata[field] for field in kept if field in metadata}
    return {"metadata": {"namespace": namespace, "name": name, **slim}}
