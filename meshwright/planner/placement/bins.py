"""Converts nodes to bins and back: the step between an inventory and the arithmetic of `problem`.

Domains of the same rack with capacity for one block each are interchangeable and become one bin. If no group has a cost
at the closest level, all domains of a rack become one bin. Levels that distinguish nothing are left out, and levels
that partition the nodes in the same way are merged. This makes the problem as small as possible.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, MutableMapping, Sequence

from meshwright.planner.placement.capacity import FreeCapacity
from meshwright.planner.placement.problem import UNPLACED, Bin, Problem, WeightedGroup
from meshwright.planner.placement.rank_blocks import RankBlocks
from meshwright.planner.placement.weights import Weights
from meshwright.planner.topology.location import Location


def best_fit(size: int, free: MutableMapping[str, int]) -> list[tuple[str, int]]:
    """Take the pieces of one group out of `free`, and return them as (bin, amount).

    The tightest bin that fits the entire group is used. If there is none, the bin with the most capacity is used, and
    then the rest is placed in the same way. Tight fits come first, so that empty bins stay empty. Bins with equal
    capacity are used in the order of their names.

    Raises:
        ValueError: all bins together have too little capacity.
    """
    if size > sum(free.values()):
        raise ValueError(f"a group of {size} does not fit")
    pieces: list[tuple[str, int]] = []
    while size:
        large_enough = [(space, name) for name, space in free.items() if space >= size]
        name = min(large_enough)[1] if large_enough else min((-space, name) for name, space in free.items())[1]
        amount = min(size, free[name])
        pieces.append((name, amount))
        free[name] -= amount
        size -= amount
    return pieces


Key = tuple[str, ...]


class DomainBins:
    """The bins of one problem, and the domains that each represents.

    Attributes:
        problem: the arithmetic.
        constant: the cost that every placement has, and that `problem` therefore leaves out.
    """

    def __init__(
        self,
        mesh: RankBlocks,
        capacity: FreeCapacity,
        stays: Mapping[int, Location],
        levels: Sequence[str],
        weights: Weights,
        extra: Sequence[WeightedGroup] = (),
    ) -> None:
        """Build the bins.

        Args:
            mesh: the communication groups.
            capacity: free capacity for workers, by domain.
            stays: block -> its location, for the blocks that are already placed.
            levels: the tree's levels, from the one that a tensor-parallel group must not leave.
            weights: cost of each further location of a group.
            extra: further groups, with their cost at each of `levels`.
        """
        self._capacity = capacity
        self._levels = levels
        self.constant = 0.0
        groups = mesh.groups()
        self._costs = [[weights.of(g.dimension, level) * g.count for level in levels] for g in groups]
        self._costs += [list(group.weights) for group in extra]
        self._members = [group.blocks for group in groups] + [group.blocks for group in extra]
        self._ignores_domains = not any(costs[0] for costs in self._costs)
        self._domains: defaultdict[Key, list[str]] = defaultdict(list)
        self._isolating: dict[Key, bool] = {}
        self._key_of: dict[str, Key] = {}
        fixed = self._collect_bins(stays)
        self._keys = list(self._isolating)
        self._number = {key: j for j, key in enumerate(self._keys)}
        self.problem = self._problem(mesh.blocks, fixed)

    def _problem(self, blocks: int, fixed: Mapping[int, Key]) -> Problem:
        """The bins and groups as numbers, for this number of blocks, of which some have a bin."""
        keys, paths = self._keys, self._paths(self._keys)
        mixed = any(self._isolating.values()) and not all(self._isolating.values())
        units: dict[str, int] = {}
        return Problem(
            size=blocks,
            groups=[
                WeightedGroup(members, tuple(costs))
                for members, costs in zip(self._members, self._costs, strict=True)
                if any(costs)
            ],
            bins=[
                Bin(sum(map(self._capacity.blocks, self._domains[key])), path, mixed and self._isolating[key])
                for key, path in zip(keys, paths, strict=True)
            ],
            fixed=[self._number[fixed[block]] if block in fixed else UNPLACED for block in range(blocks)],
            unit=[units.setdefault(key[min(1, len(key) - 1)] if key else "", len(units)) for key in keys],
        )

    def _collect_bins(self, stays: Mapping[int, Location]) -> dict[int, Key]:
        """Fill the bins, and return the bin of every block that stays."""
        blocks_held = Counter(place.at(self._levels[0]) for place in stays.values())
        keys = self._key_of
        for domain, place in self._capacity.domains.items():
            blocks = self._capacity.blocks(domain)
            if blocks:
                keys[domain] = self._bin_key(place, blocks + blocks_held[domain])
                self._domains[keys[domain]].append(domain)
        fixed: dict[int, Key] = {}
        for block, place in stays.items():
            domain = place.at(self._levels[0])
            if domain not in keys:
                keys[domain] = self._bin_key(place, blocks_held[domain])
            fixed[block] = keys[domain]
        return fixed

    def _bin_key(self, place: Location, blocks: int) -> Key:
        """The bin of a domain with capacity for, or already with, this number of blocks."""
        path = tuple(place.at(level) for level in self._levels)
        alone = blocks <= 1 and not self._ignores_domains
        key = ("", *path[1:]) if alone or self._ignores_domains else path
        self._isolating[key] = alone
        return key

    def _paths(self, keys: Sequence[Key]) -> list[tuple[int, ...]]:
        """Each bin's location at the levels that matter, as numbers. Drops and merges levels, also in `_costs`."""
        level_columns: list[list[int]] = []
        costs: list[list[float]] = [[] for _ in self._costs]
        for level in range(len(self._levels)):
            if level == 0 and (self._ignores_domains or all(self._isolating.values())):
                self.constant = sum(c[0] * (len(m) - 1) for c, m in zip(self._costs, self._members, strict=True))
                continue
            ids: dict[str, int] = {}
            column = [
                ids.setdefault(f"{j}" if level == 0 and self._isolating[key] else f"/{key[level]}", len(ids))
                for j, key in enumerate(keys)
            ]
            if len(ids) == 1 and not any(self._isolating.values()):
                continue
            above_isolating = level == 1 and bool(level_columns) and any(self._isolating.values())
            if level_columns and len(ids) == len(set(level_columns[-1])) and not above_isolating:
                for merged, group_costs in zip(costs, self._costs, strict=True):
                    merged[-1] += group_costs[level]
                continue
            level_columns.append(column)
            for level_costs, group_costs in zip(costs, self._costs, strict=True):
                level_costs.append(group_costs[level])
        self._costs = costs
        return list(zip(*level_columns, strict=True)) if level_columns else [()] * len(keys)

    def bin_at(self, place: Location) -> int:
        """The bin that contains a node's domain.

        Raises:
            KeyError: the domain has no capacity for a block.
        """
        return self._number[self._key_of[place.at(self._levels[0])]]

    def domains_of(self, bins: Sequence[int]) -> dict[int, str]:
        """The domain of every block that was not placed yet, for an assignment of blocks to bins."""
        blocks: defaultdict[int, list[int]] = defaultdict(list)
        for block in self.problem.unplaced:
            blocks[bins[block]].append(block)
        return {block: domain for j, members in blocks.items() for block, domain in self._assign_domains(j, members)}

    def _assign_domains(self, j: int, blocks: Sequence[int]) -> list[tuple[int, str]]:
        """Assign blocks to the domains of one bin. The fullest domain comes first, so that empty ones stay empty."""
        names = sorted(self._domains[self._keys[j]], key=lambda name: (self._capacity.workers(name), name))
        if len(names) == len(blocks) and all(self._capacity.blocks(name) == 1 for name in names):
            return list(zip(blocks, names, strict=True))
        if self._isolating[self._keys[j]]:
            return list(zip(blocks, names, strict=False))
        pieces = best_fit(len(blocks), {name: self._capacity.blocks(name) for name in names})
        return list(zip(blocks, (name for name, count in pieces for _ in range(count)), strict=True))
