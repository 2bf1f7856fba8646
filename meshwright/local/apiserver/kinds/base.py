"""The general rules of a kind, and what a rule may see of the rest of the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from meshwright.local.apiserver.errors import Cause
from meshwright.local.apiserver.objectmeta import NameForm
from meshwright.local.apiserver.store import ResourceKey

JsonObject = dict[str, Any]


class ClusterView(Protocol):
    """Read access to other objects, for rules that depend on them."""

    def find(self, key: ResourceKey, namespace: str, name: str) -> JsonObject | None:
        """One object; nobody may change it."""

    def all_of(self, key: ResourceKey, namespace: str = "") -> Iterator[JsonObject]:
        """All objects of a resource; nobody may change them."""


class Kind:
    """What every kind does; kinds with a life of their own override parts of it."""

    name_form = NameForm.SUBDOMAIN
    graceful = False
    """Whether deletion waits for an agent to stop something."""
    returns_deleted = False
    """Whether a delete answers with the object rather than with a Status."""

    def set_defaults(self, obj: JsonObject) -> None:
        """Fill in, in place, defaults that the schema does not state."""

    def on_create(self, obj: JsonObject, view: ClusterView) -> None:
        """Set in place what the server alone decides: first status, finalizers, allocations.

        Raises:
            ApiError: admission refuses the object.
        """

    def on_update(self, new: JsonObject, old: JsonObject, subresource: str) -> None:
        """Carry over in place what an update through `subresource` may not change."""

    def validate(self, obj: JsonObject, old: JsonObject | None, subresource: str) -> list[Cause]:
        """What is wrong beyond the schema; `old` is None on a create."""
        return []

    def on_delete(self, obj: JsonObject) -> None:
        """Mark in place the begin of a deletion that takes time.

        Raises:
            ApiError: the object may not be deleted.
        """

    def lingers(self, obj: JsonObject) -> bool:
        """Whether something besides `metadata.finalizers` keeps an object whose deletion has begun."""
        return False

    def grace_seconds(self, obj: JsonObject, asked: int | None) -> int:
        """How long a graceful deletion may take; 0 removes at once."""
        return 0
