"""The cluster's nodes as all jobs with one GPU resource read them. Only nodes whose objects change are read again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from meshwright.api.objects import KubeObject
from meshwright.api.workers import Toleration
from meshwright.planner.cluster.inventory import MALFORMED, Node, ReadNode, malformed_node_warning
from meshwright.planner.topology import Location, as_tree
from meshwright.planner.topology.levels import DOMAIN, RACK
from meshwright.planner.topology.site import DEFAULT_SITE, SiteFabric


class NodeSet:
    """Nodes by name, with locations that form a tree."""

    def __init__(
        self,
        gpu_resource: str,
        interned: Callable[[Node], Node],
        site: SiteFabric = DEFAULT_SITE,
        *,
        channel: bool = True,
    ) -> None:
        """`interned` returns an equal node that others use already, if there is one. `channel`: see `locate`."""
        self._channel = channel
        self._gpu_resource = gpu_resource
        self.site = site
        self._fabric_levels = site.fabric_levels()
        self._interned = interned
        self._objects: dict[str, KubeObject] = {}
        self._read: dict[str, ReadNode] = {}
        self._labelled: dict[str, Location] = {}
        """Locations as labels say, of nodes with GPUs. They may contradict each other."""
        self._tree: dict[str, Location] = {}
        self.version = -1
        """The version of the cache's nodes."""
        self.changed_in: dict[str, int] = {}
        """Name -> version in which the node last changed or was removed."""
        self.changes_since = -1
        """The version since which `changed_in` has every change."""
        self.warnings: dict[str, str] = {}
        """Name -> warning about the node's object."""
        self.conflicts: tuple[str, ...] = ()
        """Warnings about labels that contradict each other."""
        self.levels: tuple[str, ...] = (DOMAIN, RACK)

    def update(self, objects: Mapping[str, KubeObject], version: int) -> None:
        """Read the nodes whose objects are not those of the last update."""
        if version == self.version:
            return
        if self.version < 0:
            self.changes_since = version
        gone = [name for name in self._objects if name not in objects]
        new = [name for name, obj in objects.items() if self._objects.get(name) is not obj]
        labelled = dict(self._labelled)
        for name in (*gone, *new):
            labelled.pop(name, None)
            self._read.pop(name, None)
            self.warnings.pop(name, None)
            self.changed_in[name] = version
        for name in gone:
            del self._objects[name]
        for name in new:
            self._objects[name] = objects[name]
            self._read_node(name, labelled)
        if labelled != self._labelled:
            self._labelled = labelled
            self._locate(version)
        self.version = version
        if len(self.changed_in) > 2 * len(objects) + 64:
            # Forget nodes that were removed long ago.
            self.changed_in, self.changes_since = dict.fromkeys(objects, version), version

    def node(self, name: str, selector: Mapping[str, str], tolerations: Sequence[Toleration]) -> Node | None:
        """The node for a job with this selector and these tolerations. None if it is gone, or malformed."""
        read = self._read.get(name)
        if read is None:
            return None
        place, unusable = self._tree.get(name, read.node.place), read.unusable_for(selector, tolerations)
        node = replace(read.node, place=place, unusable=sys.intern(unusable))
        # Only few jobs reject a node for the same reason, unless the reason is in the node's own state.
        return node if unusable and not read.node.unusable else self._interned(node)

    def names(self) -> Sequence[str]:
        """The names of all nodes."""
        return tuple(self._objects)

    def _read_node(self, name: str, labelled: dict[str, Location]) -> None:
        obj = self._objects[name]
        try:
            read = ReadNode.of(obj, self._gpu_resource, self._fabric_levels, channel=self._channel)
        except MALFORMED as error:
            self.warnings[name] = malformed_node_warning(obj, error)
            return
        if read.warning:
            self.warnings[name] = read.warning
        if read.node.capacity.gpus:
            labelled[name] = read.node.place
        self._read[name] = read

    def _locate(self, version: int) -> None:
        """Make a tree of the locations, and note the nodes whose location changes."""
        tree, conflicts = as_tree(self._labelled, self._fabric_levels)
        self.conflicts = tuple(conflicts)
        self.levels = next(iter(tree.values())).levels if tree else (DOMAIN, RACK)
        for name, place in tree.items():
            if self._tree.get(name) != place:
                self.changed_in[name] = version
        self._tree = tree
