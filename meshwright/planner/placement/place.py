"""Placing a plan on an inventory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from meshwright.planner.inventory import Inventory
from meshwright.planner.placement.bound import lower_bound
from meshwright.planner.placement.crossings import crossings
from meshwright.planner.placement.notes import notes_on
from meshwright.planner.placement.options import PlacingOptions
from meshwright.planner.placement.packing import take
from meshwright.planner.placement.result import Placement
from meshwright.planner.placement.sites import Sites
from meshwright.planner.placement.solve import solve
from meshwright.planner.plan import Plan
from meshwright.planner.room import Room, Shape
from meshwright.planner.shortage import shortage
from meshwright.planner.topology.place import Place, unknown_place

_DEFAULT = PlacingOptions()


def place(
    plan: Plan,
    inventory: Inventory,
    keep: Mapping[int, str] | None = None,
    options: PlacingOptions = _DEFAULT,
    previous: Mapping[int, str] | None = None,
) -> Placement:
    """A node for every worker of `plan`. Deterministic: the same inventory gives the same placement.

    Args:
        plan: what runs.
        inventory: the nodes; it must not count this job's own pods (`Inventory.from_objects(without_job=)`).
        keep: workers that stay where they are, also on nodes that take nothing new; the others go as near to their
            groups as there is room.
        options: weights, tensor-parallel reach and search effort.
        previous: where every worker was before. It stays a candidate as long as it is possible, so that more nodes
            never make a placement worse.

    Raises:
        DoesNotFitError: there is no room; nothing is placed in part.
        ValueError: `options.tensor_within` is no level of the inventory.
    """
    workers = Shape(plan).workers
    kept = {worker: node for worker, node in (keep or {}).items() if 0 <= worker < workers}
    tries = [_Attempt(plan, inventory, kept, options, product) for product in _products(plan, inventory, kept, options)]
    placed = [attempt.run() for attempt in tries]
    best = min(placed, key=lambda placement: placement.cost)
    bound = min(placement.bound for placement in placed)
    if previous is not None and _possible(plan, inventory, kept, previous, options):
        old = _result(plan, inventory, {w: previous[w] for w in range(workers)}, options, bound)
        best = old if old.cost <= best.cost else best
    return best


def place_of(inventory: Inventory, node: str) -> Place:
    """Where a node is; one that is no longer known is a place of its own."""
    known = inventory.nodes.get(node)
    if known is not None and known.place.levels == inventory.levels:
        return known.place
    return unknown_place(node, inventory.levels)


class _Attempt:
    """One run: workers that stay, then those that must join them, then the search for all others."""

    def __init__(
        self, plan: Plan, inventory: Inventory, kept: Mapping[int, str], options: PlacingOptions, product: str | None
    ) -> None:
        if options.tensor_within not in inventory.levels:
            raise ValueError(
                f"`tensor_within` is {options.tensor_within!r}, which is no level of these nodes: use one of "
                f"{', '.join(inventory.levels)}"
            )
        self._plan = plan
        self._inventory = inventory
        self._kept = kept
        self._options = options
        self._shape = Shape(plan)
        self._mesh = options.mesh_of(plan.layout, plan.gpus_per_worker)
        self._room = Room(plan, inventory, kept, options.tensor_within, product)
        self._nodes = dict(kept)

    def run(self) -> Placement:
        """Places every worker, or raises DoesNotFitError."""
        if self._kept:
            self._complete_blocks()
        first = self._shape.block_workers
        stays = {
            block: place_of(self._inventory, self._nodes[block * first])
            for block in range(self._shape.blocks)
            if block * first in self._nodes
        }
        if self._shape.blocks - len(stays) > self._room.total_blocks():
            raise shortage(self._plan, self._inventory, self._kept, blocked=0)
        levels = self._inventory.levels[self._inventory.levels.index(self._options.tensor_within) :]
        sites = Sites(self._mesh, self._room, stays, levels, self._options.weights)
        bound = lower_bound(sites.problem)
        found = solve(self._mesh, sites.problem, bound, self._options.effort_for(self._shape.blocks))
        for block, domain in sorted(sites.domains_of(found.bins).items()):
            self._put(self._shape.workers_of(block), domain)
        nodes = {worker: self._nodes[worker] for worker in range(self._shape.workers)}
        return _result(self._plan, self._inventory, nodes, self._options, bound + sites.constant)

    def _complete_blocks(self) -> None:
        """Puts the workers of partly kept tensor-parallel groups beside those that stay."""
        for block in range(self._shape.blocks):
            workers = self._shape.workers_of(block)
            missing = [worker for worker in workers if worker not in self._nodes]
            if not missing or len(missing) == len(workers):
                continue
            level = self._options.tensor_within
            staying = (self._nodes[worker] for worker in workers if worker in self._nodes)
            domains = Counter(place_of(self._inventory, node).at(level) for node in staying)
            domain = min(domains, key=lambda name: (-domains[name], name))
            available = self._room.workers(domain)
            if available < len(missing):
                raise shortage(self._plan, self._inventory, self._kept, blocked=len(missing) - available)
            self._put(missing, domain)

    def _put(self, workers: Iterable[int], domain: str) -> None:
        """Puts the workers of one block onto nodes of a domain."""
        waiting = list(workers)
        for node, count in take(len(waiting), self._room.nodes_in(domain)):
            self._room.use(domain, node, count)
            self._nodes |= dict.fromkeys(waiting[:count], node)
            waiting = waiting[count:]


def _products(
    plan: Plan, inventory: Inventory, kept: Mapping[int, str], options: PlacingOptions
) -> Sequence[str | None]:
    """The kinds of GPU to place on, each alone: the slowest GPU sets the pace of all. `None`: any mix of them.

    Kinds that hold the whole job; beside workers that stay only their kind. A mix only where no kind holds it.
    """
    products = sorted({node.gpu_product for node in inventory.usable})
    if len(products) <= 1:
        return (None,)
    running = {inventory.nodes[node].gpu_product for node in kept.values() if node in inventory.nodes}
    wanted = [p for p in products if p in running] if len(running) == 1 else products if not running else []
    needed = Shape(plan).blocks - len(kept) // Shape(plan).block_workers
    within = options.tensor_within
    holding = [p for p in wanted if Room(plan, inventory, kept, within, p).total_blocks() >= needed]
    return holding or (None,)


def _possible(
    plan: Plan, inventory: Inventory, kept: Mapping[int, str], nodes: Mapping[int, str], options: PlacingOptions
) -> bool:
    """Whether these nodes hold these workers, and every tensor-parallel group stays where it must."""
    shape = Shape(plan)
    if any(worker not in nodes for worker in range(shape.workers)) or not kept.items() <= nodes.items():
        return False
    room = Room(plan, inventory, {}, options.tensor_within)
    free = {name: count for domain in room.domains for name, count in room.nodes_in(domain).items()}
    counts = Counter(nodes[worker] for worker in range(shape.workers) if worker not in kept)
    held = Counter(kept.values())
    if any(free.get(node, 0) - held[node] < count for node, count in counts.items()):
        return False
    places = [place_of(inventory, nodes[worker]).at(options.tensor_within) for worker in range(shape.workers)]
    return all(len({places[w] for w in shape.workers_of(block)}) == 1 for block in range(shape.blocks))


def _result(
    plan: Plan, inventory: Inventory, nodes: dict[int, str], options: PlacingOptions, bound: float
) -> Placement:
    places = {worker: place_of(inventory, node) for worker, node in nodes.items()}
    mesh = options.mesh_of(plan.layout, plan.gpus_per_worker)
    found = crossings(plan, places, options.weights, mesh)
    notes = notes_on(plan, inventory, nodes, found, options.tensor_within)
    return Placement(plan, nodes, places, found, min(bound, found.cost), notes)
