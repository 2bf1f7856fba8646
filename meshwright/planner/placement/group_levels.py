"""The levels that groups of ranks must not, or should not, leave: `spec.topology` in terms of blocks.

A level that no node names is left out of a cluster's fabric. The next closer level then counts instead, because a
placement never relies on a connection that no label confirms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from meshwright.api.topology import FabricLevel
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.placement.rank_blocks import Dimension, RankBlocks
from meshwright.planner.plan import Plan
from meshwright.planner.topology.levels import DOMAIN, NODE
from meshwright.planner.topology.location import Location

TENSOR, JOB = "tensor", "job"
CLUSTER = "cluster"
"""Stands for no level in `status.placement.topology`: a group has ranks in several locations of the widest level."""
_ORDER = [level.value for level in FabricLevel]


@dataclass(frozen=True, slots=True)
class LevelRule:
    """Groups that must not, or should not, leave a location of one level.

    Attributes:
        dimension: the dimension, as in `spec.topology`.
        level: the level, one of the inventory's.
        stated: the level as in `spec.topology`. It differs if no node names it.
        groups: the blocks of each group with more than one block.
    """

    dimension: str
    level: str
    stated: str
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class GroupLevels:
    """What a plan's `topology` means for the levels of one inventory.

    Attributes:
        required: the rules that each placement must meet, the closest level first.
        preferred: the rules that as few groups as possible should break.
        base: the level that a block must not leave.
        wanted_base: the level that a block should not leave: `base` or a closer one.
    """

    required: tuple[LevelRule, ...] = ()
    preferred: tuple[LevelRule, ...] = ()
    base: str = DOMAIN
    wanted_base: str = DOMAIN

    @classmethod
    def of(cls, plan: Plan, levels: Sequence[str]) -> GroupLevels:
        """The rules of a plan.

        Args:
            plan: the plan.
            levels: the inventory's levels, closest first, with or without `node`.
        """
        if plan.topology is None:
            return cls()
        known = [NODE, *(level for level in levels if level != NODE)]
        mesh = RankBlocks.of(plan.layout, plan.gpus_per_worker)
        groups = _groups(mesh)
        required: list[LevelRule] = []
        preferred: list[LevelRule] = []
        tensor = DOMAIN, DOMAIN
        for dimension, stated in plan.topology.stated():
            for level, rules in ((stated.required, required), (stated.preferred, preferred)):
                if level is not None and groups.get(dimension):
                    rules.append(LevelRule(dimension, _known(level, known), level, groups[dimension]))
            if dimension == TENSOR:
                must = _known(stated.required, known) if stated.required is not None else DOMAIN
                tensor = must, _known(stated.preferred, known) if stated.preferred is not None else must
        closest = min((_ORDER.index(rule.level) for rule in required), default=len(_ORDER))
        if mesh.block_workers == 1:
            # A worker is on one node, so any level may be the closest one.
            finest = min([_ORDER.index(DOMAIN), closest, *(_ORDER.index(rule.level) for rule in preferred)])
            base = wanted = _ORDER[finest]
        else:
            base = _ORDER[min(_ORDER.index(tensor[0]), closest)]
            wanted = _ORDER[min(_ORDER.index(base), _ORDER.index(tensor[1]))]
        required.sort(key=lambda rule: _ORDER.index(rule.level))
        return cls(tuple(required), tuple(preferred), base, wanted)

    def reaching(self, level: str) -> GroupLevels:
        """The rules for blocks that may leave all levels below `level`: a running job keeps what it spans."""
        if level == DOMAIN or _ORDER.index(level) <= _ORDER.index(self.base):
            return self
        return replace(self, base=level, wanted_base=level)

    @property
    def names_nodes(self) -> bool:
        """Whether nodes are a level of locations for these rules."""
        return NODE in (self.wanted_base, *(rule.level for rule in (*self.required, *self.preferred)))

    def broken(self, locations: Mapping[int, Location]) -> int:
        """How many locations too many the groups of preferred levels have. `locations` are those of all blocks."""
        return sum(_excess(rule, locations) for rule in self.preferred)

    def met(self, locations: Mapping[int, Location]) -> bool:
        """Whether every required level is met by these locations of blocks."""
        return not any(_excess(rule, locations) for rule in self.required)


def base_level(plan: Plan) -> str:
    """The level that tensor-parallel groups must not leave, on a cluster with all levels."""
    return GroupLevels.of(plan, _ORDER).base


def with_nodes_as_level(inventory: Inventory) -> Inventory:
    """The inventory with `node` as the closest level of its locations."""
    if inventory.levels[:1] == (NODE,):
        return inventory
    nodes = {
        name: replace(node, place=Location((name, *node.place.names), (NODE, *node.place.levels)))
        for name, node in inventory.nodes.items()
    }
    return replace(inventory, nodes=nodes, levels=(NODE, *inventory.levels))


def achieved_levels(plan: Plan, nodes: Mapping[int, str], places: Mapping[int, Location]) -> dict[str, str]:
    """Dimension -> the closest level that none of its groups leaves, for dimensions with groups of several ranks.

    Args:
        plan: the plan.
        nodes: worker -> node.
        places: worker -> location.
    """
    mesh = RankBlocks.of(plan.layout, plan.gpus_per_worker)
    levels = [level for level in places[0].levels if level != NODE] if places else []
    size = mesh.block_workers
    names = {NODE: nodes} | {level: {w: place.at(level) for w, place in places.items()} for level in levels}
    groups: dict[str, tuple[tuple[int, ...], ...]] = {
        TENSOR: tuple((block,) for block in range(mesh.blocks)) if mesh.tensor > 1 else (),
        **_groups(mesh),
        **{dimension.value: ((0,),) for dimension in _inside_a_worker(mesh)},
    }

    def meets(members: tuple[tuple[int, ...], ...], level: str) -> bool:
        at = names[level]
        return all(
            len({at[worker] for block in blocks for worker in range(block * size, (block + 1) * size)}) == 1
            for blocks in members
        )

    return {
        dimension: next((level for level in (NODE, *levels) if meets(members, level)), CLUSTER)
        for dimension, members in sorted(groups.items())
        if members
    }


def _known(level: str, known: Sequence[str]) -> str:
    """The level, or the next closer one that the inventory has."""
    return next(name for name in reversed(known) if _ORDER.index(name) <= _ORDER.index(level))


def _groups(mesh: RankBlocks) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The blocks of each group with several blocks, by dimension, and all blocks of the job."""
    found: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
    for group in mesh.groups():
        found[group.dimension.value].append(group.blocks)
    if mesh.blocks > 1:
        found[JOB].append(tuple(range(mesh.blocks)))
    return {dimension: tuple(groups) for dimension, groups in found.items()}


def _inside_a_worker(mesh: RankBlocks) -> list[Dimension]:
    """The dimensions whose groups have several ranks, all of them on one worker."""
    degrees = {
        Dimension.CONTEXT: mesh.context,
        Dimension.EXPERT: mesh.expert,
        Dimension.PIPELINE: mesh.pipeline,
        Dimension.DATA: mesh.data * mesh.context,
    }
    several = {group.dimension for group in mesh.groups()}
    return [dimension for dimension, degree in degrees.items() if degree > 1 and dimension not in several]


def _excess(rule: LevelRule, locations: Mapping[int, Location]) -> int:
    """How many locations beyond the first the groups of a rule have together."""
    at = {block: place.at(rule.level) for block, place in locations.items()}
    return sum(len({at[block] for block in blocks}) - 1 for blocks in rule.groups)


def components(rules: Sequence[LevelRule], blocks: int) -> list[int]:
    """Block -> number of its component: blocks that share a group of any rule are in one, numbered in order."""
    parent = list(range(blocks))

    def root(block: int) -> int:
        while parent[block] != block:
            parent[block] = parent[parent[block]]
            block = parent[block]
        return block

    for rule in rules:
        for group in rule.groups:
            for one, other in pairwise(group):
                first, second = sorted((root(one), root(other)))
                parent[second] = first
    numbers: dict[int, int] = {}
    return [numbers.setdefault(root(block), len(numbers)) for block in range(blocks)]
