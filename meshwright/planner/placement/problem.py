"""The placement problem in numbers: blocks go into bins, and a group costs more for each further location.

Names of nodes and levels are replaced by indices, so that the search can try thousands of assignments per second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

UNPLACED = -1


@dataclass(frozen=True, slots=True)
class WeightedGroup:
    """Blocks that communicate, and what each further place costs them, by level (closest first)."""

    blocks: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Bin:
    """A location for blocks.

    Attributes:
        capacity: number of blocks that fit.
        path: its location at each level, closest first. Ids are unique within a level.
        alone: whether every block in it is a separate location at the closest level (a rack of single-block domains).
    """

    capacity: int
    path: tuple[int, ...]
    alone: bool = False


@dataclass(frozen=True)
class Problem:
    """A placement problem.

    Attributes:
        size: number of blocks.
        groups: the communication groups.
        bins: the locations for blocks.
        fixed: for each block the bin that it stays in, or `UNPLACED`.
        unit: for each bin the location that should stay free for other jobs, such as its rack.
    """

    size: int
    groups: Sequence[WeightedGroup]
    bins: Sequence[Bin]
    fixed: Sequence[int]
    unit: Sequence[int]

    @cached_property
    def levels(self) -> int:
        """Number of levels."""
        return len(self.bins[0].path) if self.bins else 0

    @cached_property
    def places(self) -> list[list[int]]:
        """Level -> bin -> place."""
        return [[b.path[level] for b in self.bins] for level in range(self.levels)]

    @cached_property
    def alone(self) -> list[bool]:
        """Bin -> whether each block in it is a separate location at the closest level."""
        return [b.alone for b in self.bins]

    @cached_property
    def open_bins(self) -> list[int]:
        """Bins that can take blocks."""
        return [j for j, b in enumerate(self.bins) if b.capacity > 0]

    @cached_property
    def unplaced(self) -> list[int]:
        """Blocks that have no place yet."""
        return [block for block, where in enumerate(self.fixed) if where == UNPLACED]

    @cached_property
    def groups_of(self) -> list[list[int]]:
        """Block -> the groups it is in."""
        groups_by_block: list[list[int]] = [[] for _ in range(self.size)]
        for index, group in enumerate(self.groups):
            for block in group.blocks:
                groups_by_block[block].append(index)
        return groups_by_block

    @cached_property
    def undecided_groups(self) -> list[WeightedGroup]:
        """Groups that an unplaced block is in: only their cost is still undecided."""
        if len(self.unplaced) == self.size:
            return list(self.groups)
        return [self.groups[i] for i in sorted({i for block in self.unplaced for i in self.groups_of[block]})]

    @cached_property
    def fixed_cost(self) -> float:
        """Cost of the groups all of whose blocks are fixed."""
        if len(self.undecided_groups) == len(self.groups):
            return 0.0
        undecided = {id(group) for group in self.undecided_groups}
        return self._cost_of((g for g in self.groups if id(g) not in undecided), self.fixed)

    def cost(self, bins: Sequence[int]) -> float:
        """What an assignment (block -> bin) costs."""
        return self.fixed_cost + self._cost_of(self.undecided_groups, bins)

    @cached_property
    def _bin_readers(self) -> dict[int, Callable[[Sequence[int]], tuple[int, ...]]]:
        """Group's id -> what reads the bins of its blocks; a C loop, since this is where a search spends its time."""
        return {id(group): itemgetter(*group.blocks) for group in self.groups}

    @cached_property
    def _bins_are_places(self) -> bool:
        """Whether every bin is a separate location at the closest level."""
        return len(set(self.places[0])) == len(self.bins)

    @cached_property
    def _has_isolating_bins(self) -> bool:
        return any(self.alone)

    def _cost_of(self, groups: Iterable[WeightedGroup], bins: Sequence[int]) -> float:
        total = 0.0
        readers, places, isolated = self._bin_readers, self.places, self._has_isolating_bins
        for group in groups:
            used = set(readers[id(group)](bins))
            if len(used) == 1 and not isolated:
                continue
            for level, weight in enumerate(group.weights):
                if not weight:
                    continue
                if level == 0:
                    total += weight * (self._closest_places(group, bins, used) - 1)
                else:
                    total += weight * (len(set(map(places[level].__getitem__, used))) - 1)
        return total

    def _closest_places(self, group: WeightedGroup, bins: Sequence[int], used: set[int]) -> int:
        """Locations of the closest level that a group has. In some bins each block is a separate location."""
        if not self._has_isolating_bins:
            return len(used) if self._bins_are_places else len({self.places[0][j] for j in used})
        alone = self.alone
        isolated = sum(1 for block in group.blocks if alone[bins[block]])
        return isolated + len({self.places[0][j] for j in used if not alone[j]})

    def tie_breaker(self, bins: Sequence[int]) -> tuple[int, int, int]:
        """The key that decides between equal costs. Lower is better.

        It has the number of units in use (so that entire racks stay free), the free capacity left in them, and their
        imbalance (the sum of squares: 16 + 16 rather than 14 + 18).
        """
        used: dict[int, int] = {}
        for block in self.unplaced:
            unit = self.unit[bins[block]]
            used[unit] = used.get(unit, 0) + 1
        capacity_left = sum(b.capacity for b, unit in zip(self.bins, self.unit, strict=True) if unit in used)
        return len(used), capacity_left - len(self.unplaced), sum(count * count for count in used.values())
