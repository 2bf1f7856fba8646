"""A node's location in the fabric, by name at each level.

A node with a missing or meaningless label is a separate location, and not a member of one large group of unlabeled
nodes: a plan must not rely on a connection that no label confirms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.planner.topology.levels import CLIQUE, DOMAIN, RACK, ZONE, Level

MEANINGLESS = frozenset({"", "unknown", "none", "no-imds-data", "n/a", "null"})


@dataclass(frozen=True, slots=True)
class Location:
    """Location of a node. Names of unlabeled locations contain a `/`, which label values cannot contain.

    Attributes:
        names: the name at each level, closest first.
        levels: the levels' names. The same for all locations of one tree.
    """

    names: tuple[str, ...]
    levels: tuple[str, ...]

    def at(self, level: str) -> str:
        """The name at a level. Empty if the tree does not have this level: then it is the same for all nodes."""
        return self.names[self.levels.index(level)] if level in self.levels else ""

    @property
    def domain(self) -> str:
        """The NVLink domain."""
        return self.at(DOMAIN)

    @property
    def rack(self) -> str:
        """The rack."""
        return self.at(RACK)

    @property
    def zone(self) -> str:
        """The zone. Empty if no node names one."""
        return self.at(ZONE)


def needs_channel(labels: Mapping[str, str]) -> bool:
    """Return whether pods on this node use NVLink to other nodes only with an IMEX channel."""
    return first_meaningful_value(labels, (CLIQUE,)) is not None


def locate(name: str, labels: Mapping[str, str], levels: Sequence[Level], *, channel: bool = True) -> Location:
    """Return the node's location.

    A level without a label is named after the level below: no other location shares it.

    Args:
        name: the node.
        labels: its labels.
        levels: the levels of the fabric, closest first.
        channel: whether pods have an IMEX channel. Without one, a node of a clique is an NVLink domain of its own, and
            the clique is the rack unless another label names that.
    """
    clique = None if channel else first_meaningful_value(labels, (CLIQUE,))
    names: list[str] = []
    alone = f"host/{name}"
    for position, level in enumerate(levels):
        value = first_meaningful_value(labels, level.keys)
        if clique is not None and level.name in (DOMAIN, RACK):
            value = None if level.name == DOMAIN else value or clique
        names.append(value or alone)
        if value is not None or position == 0:
            alone = f"{level.name}/{names[-1]}"
    return Location(tuple(names), tuple(level.name for level in levels))


def unknown_location(node: str, levels: Sequence[str]) -> Location:
    """Return the location of a node that is not in the inventory: a separate one at every level."""
    alone = f"host/{node}"
    names = [alone, *[f"{levels[0]}/{alone}"] * (len(levels) - 1)] if levels else []
    return Location(tuple(names), tuple(levels))


def first_meaningful_value(labels: Mapping[str, str], keys: Sequence[str]) -> str | None:
    """Return the value of the first of `keys` with a meaningful value."""
    for key in keys:
        value = labels.get(key)
        if isinstance(value, str) and value.strip().lower() not in MEANINGLESS:
            return value
    return None
