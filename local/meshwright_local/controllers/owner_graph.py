"""The graph of owners and dependents for garbage collection, and its decisions (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from meshwright.api.objects import KubeObject
from meshwright_local.kube.resources import Resource

FOREGROUND = "foregroundDeletion"
ORPHAN = "orphan"


class OwnerState(Enum):
    """The state of an owner."""

    SOLID = 0
    """It exists."""
    LEAVING = 1
    """It waits in foreground deletion for the dependents that block it."""
    GONE = 2
    """No object has that uid."""


@dataclass(frozen=True, slots=True)
class Node:
    """One object of the cluster, reduced to the fields that ownership needs."""

    resource: Resource
    namespace: str
    name: str
    uid: str
    owners: tuple[KubeObject, ...]
    finalizers: frozenset[str]
    deleting: bool

    @classmethod
    def of(cls, resource: Resource, item: KubeObject) -> Node:
        """Return the reduced form of an object."""
        metadata = item["metadata"]
        owners, finalizers = metadata.get("ownerReferences") or (), metadata.get("finalizers") or ()
        space, deleting = metadata.get("namespace") or "", bool(metadata.get("deletionTimestamp"))
        return cls(resource, space, metadata["name"], metadata["uid"], tuple(owners), frozenset(finalizers), deleting)

    @property
    def in_foreground(self) -> bool:
        """Whether it is in foreground deletion: its dependents are deleted first."""
        return self.deleting and FOREGROUND in self.finalizers

    @property
    def orphaning(self) -> bool:
        """Whether it is being deleted and its dependents are orphaned."""
        return self.deleting and ORPHAN in self.finalizers


class Graph:
    """Objects by uid and dependents by owner's uid."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._dependents: dict[str, set[str]] = defaultdict(set)

    def put(self, node: Node) -> Node | None:
        """Store an object as it is now; returns what was known before."""
        old = self.remove(node.uid)
        self.nodes[node.uid] = node
        for owner in node.owners:
            self._dependents[owner["uid"]].add(node.uid)
        return old

    def remove(self, uid: str) -> Node | None:
        """Forget an object; returns what was known."""
        old = self.nodes.pop(uid, None)
        for owner in old.owners if old else ():
            self._dependents[owner["uid"]].discard(uid)
            if not self._dependents[owner["uid"]]:
                del self._dependents[owner["uid"]]
        return old

    def dependents(self, uid: str) -> list[Node]:
        """Return the objects with this uid in their owner references."""
        return [self.nodes[dependent] for dependent in self._dependents.get(uid, ())]

    def blockers(self, uid: str) -> list[Node]:
        """Return the dependents that block their owner's foreground deletion."""

        def blocks(node: Node) -> bool:
            return any(owner["uid"] == uid and owner.get("blockOwnerDeletion") for owner in node.owners)

        return [node for node in self.dependents(uid) if blocks(node)]


@dataclass(frozen=True, slots=True)
class DependentDecision:
    """What to do with a dependent: delete it with a policy, remove some references, or nothing."""

    delete: str | None = None
    drop_owners: frozenset[str] = frozenset()


def decide_dependent(node: Node, states: Mapping[str, OwnerState], has_dependents: bool) -> DependentDecision:
    """Decide by Kubernetes' rule: an object stays while one owner is solid; only references to others are removed.

    Args:
        node: The dependent.
        states: State of each owner, by uid.
        has_dependents: Whether it owns objects itself.
    """
    if not node.owners or (node.deleting and not node.in_foreground):
        return DependentDecision()
    not_solid = frozenset(uid for uid, state in states.items() if state is not OwnerState.SOLID)
    if len(not_solid) < len(states):
        return DependentDecision(drop_owners=not_solid)
    if node.deleting:
        return DependentDecision()
    if OwnerState.LEAVING in states.values() and has_dependents:
        return DependentDecision(delete="Foreground")
    if ORPHAN in node.finalizers:
        return DependentDecision(delete="Orphan")
    return DependentDecision(delete="Foreground" if FOREGROUND in node.finalizers else "Background")
