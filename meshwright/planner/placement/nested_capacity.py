"""Counts whether groups fit into locations of the levels that they must not leave, and assigns them if so.

Groups that share a block and must not leave a level are in one location of it together. So every required level divides
the blocks into *units*, each inside one location, and each unit of a level consists of equally many units of the next
closer level. The fabric is a tree, hence it is exact to count from the closest level up:

    units that fit = (units of the closer level that fit - those bound to the location) / units of that level in one

Blocks that stay where they are bind their units: these must get their other blocks in the same location.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.planner.placement.bins import best_fit
from meshwright.planner.placement.capacity import FreeCapacity
from meshwright.planner.placement.group_levels import LevelRule, components
from meshwright.planner.topology.location import Location


@dataclass(frozen=True, slots=True)
class LevelShortage:
    """The closest required level for which a job does not fit.

    Attributes:
        rules: the rules of this level.
        units: number of units, each of which needs one location of the level.
        unit_blocks: blocks of one unit.
        fitting: number of units that fit. Units with blocks that stay count if their other blocks fit.
        largest: number of blocks that fit in the location of the level with the most.
    """

    rules: tuple[LevelRule, ...]
    units: int
    unit_blocks: int
    fitting: int
    largest: int


class _Tier:
    """One required level: its units, and where those with blocks that stay are."""

    def __init__(
        self, rules: Sequence[LevelRule], level: str, blocks: int, closer: _Tier | None, fixed: Mapping[int, Location]
    ) -> None:
        self.level = level
        self.rules = tuple(rule for rule in rules if rule.level == level)
        self.unit_of = components(rules, blocks)
        self.count = max(self.unit_of, default=-1) + 1
        self.blocks: list[list[int]] = [[] for _ in range(self.count)]
        for block, unit in enumerate(self.unit_of):
            self.blocks[unit].append(block)
        self.split = False
        self.bound: dict[int, str] = {}
        for block, place in fixed.items():
            name = place.at(level)
            self.split = self.split or self.bound.setdefault(self.unit_of[block], name) != name
        # Members: blocks, or units of the closer level.
        member_of = list(range(blocks)) if closer is None else closer.unit_of
        self.members: list[list[int]] = [list(dict.fromkeys(member_of[b] for b in unit)) for unit in self.blocks]
        self.size = max(map(len, self.members), default=1)
        """Members of one unit. All units have equally many, because the groups of a layout are regular."""

    def missing(self, unit: int, closer: _Tier | None, fixed: Mapping[int, Location]) -> list[int]:
        """The members of a unit that are not bound to a location."""
        bound = fixed if closer is None else closer.bound
        return [member for member in self.members[unit] if member not in bound]


class NestedCapacity:
    """Whether the blocks of a job fit, with all required levels met."""

    def __init__(
        self, blocks: int, rules: Sequence[LevelRule], capacity: FreeCapacity, fixed: Mapping[int, Location]
    ) -> None:
        """Count.

        Args:
            blocks: number of blocks.
            rules: the required levels, the closest first.
            capacity: free capacity of each location of the level that a block must not leave.
            fixed: block -> location, of the blocks that stay.
        """
        self._fixed = fixed
        self._capacity = capacity
        self._blocks = blocks
        self._tiers: list[_Tier] = []
        for level in dict.fromkeys(rule.level for rule in rules):
            position = next(i for i in range(len(rules), 0, -1) if rules[i - 1].level == level)
            closer = self._tiers[-1] if self._tiers else None
            self._tiers.append(_Tier(rules[:position], level, blocks, closer, fixed))
        self._fits: list[dict[str, int]] = [{name: capacity.blocks(name) for name in capacity.domains}]
        """For blocks, and then for each tier: location -> members of the next tier that fit."""
        self._parents = self._parents_of_locations()
        self.shortage: LevelShortage | None = None
        """The closest level for which the job does not fit. None if it fits, or if there are too few places anyway."""
        for index in range(len(self._tiers)):
            if not self._count(index):
                break

    @property
    def fits(self) -> bool:
        """Whether a placement exists."""
        if self.shortage is not None:
            return False
        top = self._tiers[-1].count - len(self._tiers[-1].bound) if self._tiers else self._blocks - len(self._fixed)
        return sum(self._fits[-1].values()) >= top

    def _count(self, index: int) -> bool:
        """Count the units of a tier that fit. Returns whether enough do."""
        tier, closer = self._tiers[index], self._tiers[index - 1] if index else None
        room = self._within(index)
        needed: Counter[str] = Counter()
        for unit, location in tier.bound.items():
            needed[location] += len(tier.missing(unit, closer, self._fixed))
        overfull = [location for location, count in needed.items() if count > room.get(location, 0)]
        left = {location: max(0, count - needed[location]) for location, count in room.items()}
        fits = {location: count // tier.size for location, count in left.items()}
        self._fits.append(fits)
        open_units = tier.count - len(tier.bound)
        if not tier.split and not overfull and sum(fits.values()) >= open_units:
            return True
        blocks = len(tier.blocks[0]) if tier.blocks else 0
        bound = sum(location not in overfull for location in tier.bound.values())
        most = max(self._blocks_within(tier.level).values(), default=0)
        self.shortage = LevelShortage(tier.rules, tier.count, blocks, min(tier.count, bound + sum(fits.values())), most)
        return False

    def _within(self, index: int) -> dict[str, int]:
        """Location of a tier's level -> members of its units that fit there."""
        room: dict[str, int] = defaultdict(int)
        for name, count in self._fits[index].items():
            room[self._parents[index][name]] += count
        return room

    def _blocks_within(self, level: str) -> dict[str, int]:
        room: dict[str, int] = defaultdict(int)
        for domain, place in self._capacity.domains.items():
            room[place.at(level)] += self._capacity.blocks(domain)
        return room

    def _parents_of_locations(self) -> list[dict[str, str]]:
        """For each tier: location of the closer tier, or of blocks -> location of the tier."""
        found: list[dict[str, str]] = []
        for index, tier in enumerate(self._tiers):
            closer = self._tiers[index - 1].level if index else None
            found.append(
                {
                    (name if closer is None else place.at(closer)): place.at(tier.level)
                    for name, place in self._capacity.domains.items()
                }
            )
        return found

    def assign(self) -> dict[int, str]:
        """A location for each block that does not stay, with every required level met. The tightest ones come first.

        Raises:
            ValueError: no placement exists.
        """
        if not self.fits:
            raise ValueError("no placement meets the required levels")
        where: dict[int, str] = {}
        for index in range(len(self._tiers), -1, -1):
            where = self._assign_tier(index, where)
        return where

    def _assign_tier(self, index: int, wider: Mapping[int, str]) -> dict[int, str]:
        """The location of each unit below tier `index` (of each block for 0).

        Args:
            index: number of tiers whose units are not assigned yet.
            wider: unit of the wider tier -> location. Empty for the widest.
        """
        members = self._open_members(index)
        bound = self._tiers[index - 1].bound if index else {}
        found: dict[int, str] = dict(bound)
        by_parent: defaultdict[str, list[int]] = defaultdict(list)
        if index < len(self._tiers):
            unit_of = {m: unit for unit, inside in enumerate(self._tiers[index].members) for m in inside}
            for member in members:
                by_parent[wider[unit_of[member]]].append(member)
        else:
            by_parent[""] = members
        for parent, waiting in by_parent.items():
            room = {
                name: count
                for name, count in self._fits[index].items()
                if count and (index == len(self._tiers) or self._parents[index][name] == parent)
            }
            names = (name for name, count in best_fit(len(waiting), room) for _ in range(count))
            found |= dict(zip(waiting, names, strict=True))
        return found

    def _open_members(self, index: int) -> list[int]:
        """The units of tier `index - 1` (blocks for 0) that are not bound."""
        if not index:
            return [block for block in range(self._blocks) if block not in self._fixed]
        tier = self._tiers[index - 1]
        return [unit for unit in range(tier.count) if unit not in tier.bound]
