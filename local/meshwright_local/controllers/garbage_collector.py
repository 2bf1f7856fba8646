"""Garbage collection by ownerReferences: background, foreground and orphan, for every resource of the server.

Follows kube-controller-manager's collector: watches of every deletable resource feed a graph. Before the collector
deletes an object it checks the live object, because watches of different resources are not ordered relative to each
other.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from meshwright.api.objects import KubeObject
from meshwright_local.controllers.base import Controller, Key
from meshwright_local.controllers.owner_graph import FOREGROUND, ORPHAN, Graph, Node, OwnerState, decide_dependent
from meshwright_local.kube.client import REQUEST_ERRORS
from meshwright_local.kube.reflector import Change, ChangeType, Informers, Reflector
from meshwright_local.kube.resources import CRDS, Resource

logger = logging.getLogger(__name__)

# Events have no owners, are numerous and expire by themselves: Kubernetes ignores them too.
_IGNORED = frozenset({"events"})
_NEEDED_VERBS = frozenset({"list", "watch", "delete"})
_DISCOVERY_SECONDS = 30.0
_UNSURE_SECONDS = 1.0


class GarbageCollector(Controller):
    """Deletes objects without an owner, and owners whose dependents are gone. Keys are `("", uid)`."""

    def __init__(self, informers: Informers) -> None:
        super().__init__(informers, "garbage-collector", workers=4)
        self._graph = Graph()
        self._kinds: dict[tuple[str, str], Resource] = {}
        """By group and kind. Kinds whose definition was deleted stay, so that the loss of their objects is noticed."""
        self._watches: dict[Resource, tuple[Reflector, asyncio.Task[None]]] = {}
        self._rediscover = asyncio.Event()
        informers.get(CRDS).listeners.append(lambda _: self._rediscover.set())

    async def run(self) -> None:
        """Collect until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_resources(group))
            group.create_task(super().run())

    async def _follow_resources(self, group: asyncio.TaskGroup) -> None:
        while True:
            self._rediscover.clear()
            pause = _DISCOVERY_SECONDS
            try:
                self._update_watches(group, await self.client.resources())
            except REQUEST_ERRORS as error:
                logger.debug("discovery failed: %r", error)
                pause = 0.5
            try:
                async with asyncio.timeout(pause):
                    await self._rediscover.wait()
                    # A definition is served shortly after it is written.
                    await asyncio.sleep(0.05)
            except TimeoutError:
                pass

    def _update_watches(self, group: asyncio.TaskGroup, served: dict[Resource, frozenset[str]]) -> None:
        self._kinds |= {(resource.group, resource.kind): resource for resource in served}
        wanted = {item for item, verbs in served.items() if verbs >= _NEEDED_VERBS and item.plural not in _IGNORED}
        for resource in wanted - self._watches.keys():
            reflector = Reflector(self.client, resource, trim=_metadata_only)
            reflector.listeners.append(partial(self._changed, resource))
            self._watches[resource] = (reflector, group.create_task(reflector.run()))
        for resource in self._watches.keys() - wanted:
            reflector, task = self._watches.pop(resource)
            task.cancel()
            for item in reflector.objects.values():
                # "No longer served" does not mean "deleted": check again what their objects own.
                self._changed(resource, Change(ChangeType.DELETED, item))

    def _changed(self, resource: Resource, change: Change) -> None:
        node = Node.of(resource, change.object)
        if change.type is ChangeType.DELETED:
            self._graph.remove(node.uid)
            self._enqueue_nodes(self._graph.dependents(node.uid))
            owners = node.owners
        else:
            old = self._graph.put(node)
            if node.owners or node.deleting:
                self.add(("", node.uid))
            if node.in_foreground:
                self._enqueue_nodes(self._graph.dependents(node.uid))
            owners = old.owners if old is not None and old.owners != node.owners else ()
        for owner in owners:
            # The owner may wait for this blocker.
            if owner["uid"] in self._graph.nodes and self._graph.nodes[owner["uid"]].deleting:
                self.add(("", owner["uid"]))

    def _enqueue_nodes(self, nodes: list[Node]) -> None:
        self.add(*(("", node.uid) for node in nodes))

    async def reconcile(self, key: Key) -> float | None:
        """Check one object: whether its owners still exist, and whether its own deletion affects its dependents."""
        node = self._graph.nodes.get(key[1])
        live = await self._live(node) if node is not None else None
        if node is None or live is None:
            # The watch delivers the change. If the graph was ahead of it, nothing is lost either.
            return None
        node = Node.of(node.resource, live)
        dependents = self._graph.dependents(node.uid)
        if node.orphaning:
            for dependent in dependents:
                await self._drop_owners(dependent, frozenset({node.uid}))
            await self._remove_finalizer(node, live, ORPHAN)
            return None
        if node.in_foreground:
            self._enqueue_nodes(dependents)
            if not self._graph.blockers(node.uid):
                await self._remove_finalizer(node, live, FOREGROUND)
        return await self._collect(node, bool(dependents))

    async def _collect(self, node: Node, has_dependents: bool) -> float | None:
        states = {owner["uid"]: await self._owner_state(node, owner) for owner in node.owners}
        decision = decide_dependent(node, states, has_dependents)
        if decision.delete:
            logger.debug("collecting %s %s/%s", node.resource.plural, node.namespace, node.name)
            space = node.namespace or None
            await self.client.delete(node.resource, node.name, space, propagation=decision.delete, uid=node.uid)
        elif decision.drop_owners:
            await self._drop_owners(node, decision.drop_owners)
        # An owner may be deleted before its kind is watched, and then no event arrives.
        unwatched = any(uid not in self._graph.nodes for uid, state in states.items() if state is OwnerState.SOLID)
        return _UNSURE_SECONDS if unwatched else None

    async def _owner_state(self, node: Node, owner: KubeObject) -> OwnerState:
        known = self._graph.nodes.get(owner["uid"])
        if known is None or known.namespace not in ("", node.namespace):
            resource = self._kinds.get((owner["apiVersion"].rpartition("/")[0], owner["kind"]))
            if resource is None:
                # Perhaps the definition was just created. Never delete because something is unknown.
                return OwnerState.SOLID
            live = await self.client.find(resource, owner["name"], node.namespace if resource.namespaced else None)
            if live is None or live["metadata"]["uid"] != owner["uid"]:
                return OwnerState.GONE
            known = Node.of(resource, live)
        return OwnerState.LEAVING if known.in_foreground and owner.get("blockOwnerDeletion") else OwnerState.SOLID

    async def _live(self, node: Node) -> KubeObject | None:
        found = await self.client.find(node.resource, node.name, node.namespace)
        return found if found is not None and found["metadata"]["uid"] == node.uid else None

    async def _drop_owners(self, node: Node, uids: frozenset[str]) -> None:
        live = await self._live(node)
        owners = (live["metadata"].get("ownerReferences") or []) if live else []
        remaining = [owner for owner in owners if owner["uid"] not in uids]
        if live and len(remaining) != len(owners):
            await self._patch_metadata(node, live, {"ownerReferences": remaining or None})

    async def _remove_finalizer(self, node: Node, live: KubeObject, name: str) -> None:
        remaining = [item for item in live["metadata"].get("finalizers") or () if item != name]
        await self._patch_metadata(node, live, {"finalizers": remaining or None})

    async def _patch_metadata(self, node: Node, live: KubeObject, fields: KubeObject) -> None:
        exact = {"uid": node.uid, "resourceVersion": live["metadata"]["resourceVersion"], **fields}
        await self.client.patch(node.resource, node.name, {"metadata": exact}, node.namespace or None)


def _metadata_only(item: KubeObject) -> KubeObject:
    fields = ("namespace", "name", "uid", "resourceVersion", "ownerReferences", "finalizers", "deletionTimestamp")
    return {"metadata": {field: item["metadata"][field] for field in fields if field in item["metadata"]}}
