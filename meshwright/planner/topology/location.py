"""A node's place in the fabric, by name at each level.

A missing or meaningless value makes the node a group of its own, never a member of one large group of unlabelled
nodes: a plan must not rely on a connection nobody vouched for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.planner.topology.levels import DOMAIN, RACK, ZONE, Level

MEANINGLESS = frozenset({"", "unknown", "none", "no-imds-data", "n/a", "null"})


@dataclass(frozen=True, slots=True)
class Location:
    """Where a node sits. Names of singletons contain a `/`, which no label value can.

    Attributes:
        names: the place at each level, closest first.
        levels: the levels' names; the same for all places of one tree.
    """

    names: tuple[str, ...]
    levels: tuple[str, ...]

    def at(self, level: str) -> str:
        """The name at a level; empty when the tree has no such level, which all nodes then share."""
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
        """The zone; empty when no node names one."""
        return self.at(ZONE)


def locate(name: str, labels: Mapping[str, str], levels: Sequence[Level]) -> Location:
    """The node's place. What no label speaks of is named after the level below: it is shared with nobody else."""
    names: list[str] = []
    alone = f"host/{name}"
    for position, level in enumerate(levels):
        value = first_meaningful_value(labels, level.keys)
        names.append(value or alone)
        if value is not None or position == 0:
            alone = f"{level.name}/{names[-1]}"
    return Location(tuple(names), tuple(level.name for level in levels))


def unknown_location(node: str, levels: Sequence[str]) -> Location:
    """The place of a node nobody knows (any more): its own at every level."""
    alone = f"host/{node}"
    names = [alone, *[f"{levels[0]}/{alone}"] * (len(levels) - 1)] if levels else []
    return Location(tuple(names), tuple(levels))


def first_meaningful_value(labels: Mapping[str, str], keys: Sequence[str]) -> str | None:
    """The value of the first of `keys` that says something."""
    for key in keys:
        value = labels.get(key)
        if isinstance(value, str) and value.strip().lower() not in MEANINGLESS:
            return value
    return None
