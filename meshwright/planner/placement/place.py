"""Places a plan on an inventory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cost.accelerators import accelerator
from meshwright.planner.errors import DoesNotFitError
from meshwright.planner.placement.bins import DomainBins, best_fit
from meshwright.planner.placement.capacity import FreeCapacity, GangShape
from meshwright.planner.placement.fit_error import fit_error
from meshwright.planner.placement.group_levels import GroupLevels, achieved_levels, with_nodes_as_level
from meshwright.planner.placement.level_weights import search_groups, search_weights
from meshwright.planner.placement.lower_bound import lower_bound
from meshwright.planner.placement.nested_capacity import NestedCapacity
from meshwright.planner.placement.objective import crossings, nvlink_domains
from meshwright.planner.placement.options import PlacingOptions
from meshwright.planner.placement.result import Placement, placement_notes
from meshwright.planner.placement.solver import solve
from meshwright.planner.plan import Plan
from meshwright.planner.topology.location import Location, unknown_location

_DEFAULT = PlacingOptions()


def place(
    plan: Plan,
    inventory: Inventory,
    keep: Mapping[int, str] | None = None,
    options: PlacingOptions = _DEFAULT,
    previous: Mapping[int, str] | None = None,
) -> Placement:
    """Choose a node for every worker of `plan`. Deterministic: the same inventory gives the same placement.

    Args:
        plan: the plan to place.
        inventory: the nodes. It must not count this job's own pods (`Inventory.from_objects(without_job=)`).
        keep: workers that stay on their nodes, even if these accept no new pods. The others are placed as close to
            their groups as capacity allows.
        options: weights, tensor-parallel reach and search effort.
        previous: the previous node of every worker. This placement is a candidate if it is still possible, so that
            more nodes never make a placement worse.

    Raises:
        DoesNotFitError: the job does not fit. Nothing is placed then.
        ValueError: `options.tensor_within` is not a level of the inventory.
    """
    if plan.topology is None:
        return _place(plan, inventory, keep or {}, options, previous, GroupLevels(base=options.tensor_within))
    levels = GroupLevels.of(plan, inventory.levels).reaching(options.tensor_within)
    if levels.names_nodes:
        inventory = with_nodes_as_level(inventory)
        options = replace(options, weights=options.weights.without_nodes())
    if levels.wanted_base != levels.base:
        try:
            return _place(plan, inventory, keep or {}, options, previous, replace(levels, base=levels.wanted_base))
        except DoesNotFitError:
            pass
    return _place(plan, inventory, keep or {}, options, previous, levels)


def _place(
    plan: Plan,
    inventory: Inventory,
    keep: Mapping[int, str],
    options: PlacingOptions,
    previous: Mapping[int, str] | None,
    levels: GroupLevels,
) -> Placement:
    """As `place`, for blocks that must not leave a location of `levels.base`."""
    options = replace(options, tensor_within=levels.base)
    workers = GangShape(plan).workers
    kept = {worker: node for worker, node in keep.items() if 0 <= worker < workers}
    attempts = [
        _PlacementAttempt(plan, inventory, kept, options, product, levels)
        for product in _gpu_products(plan, inventory, kept, options, levels)
    ]
    placed = [attempt.run() for attempt in attempts]
    best = min(
        placed, key=lambda placement: (placement.broken_preferences, _slowness(placement, inventory), placement.cost)
    )
    bound = min(placement.bound for placement in placed)
    if previous is not None and _is_possible(plan, inventory, kept, previous, options, levels):
        nodes = {w: previous[w] for w in range(workers)}
        previous_placement = _result(plan, inventory, nodes, options, bound, levels)
        best = previous_placement if previous_placement.order <= best.order else best
    return best


def _slowness(placement: Placement, inventory: Inventory) -> float:
    """Lower for faster GPUs. A step takes longer on slower ones than any crossing of the network adds."""
    products = {inventory.nodes[node].gpu_product for node in placement.nodes.values() if node in inventory.nodes}
    known = [gpu for product in products if (gpu := accelerator(product)) is not None]
    return -min((gpu.half for gpu in known), default=0.0) if len(known) == len(products) else 0.0


def place_of(inventory: Inventory, node: str) -> Location:
    """The location of a node. A node that is not in the inventory is a separate location."""
    known = inventory.nodes.get(node)
    if known is not None and known.place.levels == inventory.levels:
        return known.place
    return unknown_location(node, inventory.levels)


class _PlacementAttempt:
    """One placement: workers that stay, then those that must be next to them, then the search for all others."""

    def __init__(
        self,
        plan: Plan,
        inventory: Inventory,
        kept: Mapping[int, str],
        options: PlacingOptions,
        product: str | None,
        levels: GroupLevels,
    ) -> None:
        if options.tensor_within not in inventory.levels:
            raise ValueError(
                f"`tensor_within` is {options.tensor_within!r}, not a level of these nodes: use one of "
                f"{', '.join(inventory.levels)}"
            )
        self._plan = plan
        self._inventory = inventory
        self._kept = kept
        self._options = options
        self._levels = levels
        self._shape = GangShape(plan)
        self._mesh = options.mesh_of(plan.layout, plan.gpus_per_worker)
        self._capacity = FreeCapacity(plan, inventory, kept, options.tensor_within, product)
        self._nodes = dict(kept)

    def run(self) -> Placement:
        """Place every worker. Raises DoesNotFitError if the job does not fit."""
        if self._kept:
            self._complete_blocks()
        fixed_blocks = _fixed_blocks(self._shape, self._inventory, self._nodes)
        if self._shape.blocks - len(fixed_blocks) > self._capacity.total_blocks():
            raise fit_error(self._plan, self._inventory, self._kept, blocked=0, levels=self._levels)
        nested = NestedCapacity(self._shape.blocks, self._levels.required, self._capacity, fixed_blocks)
        if not nested.fits:
            raise fit_error(
                self._plan, self._inventory, self._kept, blocked=0, levels=self._levels, shortage=nested.shortage
            )
        levels = self._inventory.levels[self._inventory.levels.index(self._options.tensor_within) :]
        domain_bins = DomainBins(self._mesh, self._capacity, fixed_blocks, levels, self._options.weights)
        bound = lower_bound(domain_bins.problem)
        domains = self._search(domain_bins, bound, fixed_blocks, nested, levels)
        for block, domain in sorted(domains.items()):
            self._assign(self._shape.workers_of(block), domain)
        nodes = {worker: self._nodes[worker] for worker in range(self._shape.workers)}
        return _result(self._plan, self._inventory, nodes, self._options, bound + domain_bins.constant, self._levels)

    def _search(
        self,
        domain_bins: DomainBins,
        bound: float,
        fixed: Mapping[int, Location],
        nested: NestedCapacity,
        levels: Sequence[str],
    ) -> dict[int, str]:
        """The domain of every block that is not placed yet.

        With levels that groups should or must not leave, these crossings have a weight above all others in the search.
        If the result still leaves a required level, the one that the count of capacity proves is used.
        """
        effort = self._options.effort_for(self._shape.blocks)
        if not self._levels.required and not self._levels.preferred:
            return domain_bins.domains_of(solve(self._mesh, domain_bins.problem, bound, effort).bins)
        weights = search_weights(self._levels, self._mesh, levels, self._options.weights)
        extra = search_groups(self._levels, self._mesh, levels, self._options.weights)
        weighted = DomainBins(self._mesh, self._capacity, fixed, levels, weights, extra)
        solved = solve(self._mesh, weighted.problem, lower_bound(weighted.problem), effort)
        domains = weighted.domains_of(solved.bins)
        places = {block: self._capacity.domains[domain] for block, domain in domains.items()} | dict(fixed)
        return domains if self._levels.met(places) else nested.assign()

    def _complete_blocks(self) -> None:
        """Place the missing workers of tensor-parallel groups next to those that stay."""
        for block in range(self._shape.blocks):
            workers = self._shape.workers_of(block)
            missing = [worker for worker in workers if worker not in self._nodes]
            if not missing or len(missing) == len(workers):
                continue
            level = self._options.tensor_within
            kept_nodes = (self._nodes[worker] for worker in workers if worker in self._nodes)
            domains = Counter(place_of(self._inventory, node).at(level) for node in kept_nodes)
            domain = min(domains, key=lambda name: (-domains[name], name))
            available = self._capacity.workers(domain)
            if available < len(missing):
                raise fit_error(
                    self._plan, self._inventory, self._kept, blocked=len(missing) - available, levels=self._levels
                )
            self._assign(missing, domain)

    def _assign(self, workers: Iterable[int], domain: str) -> None:
        """Assign the workers of one block to nodes of a domain."""
        waiting = list(workers)
        for node, count in best_fit(len(waiting), self._capacity.nodes_in(domain)):
            self._capacity.use(domain, node, count)
            self._nodes |= dict.fromkeys(waiting[:count], node)
            waiting = waiting[count:]


def _fixed_blocks(shape: GangShape, inventory: Inventory, nodes: Mapping[int, str]) -> dict[int, Location]:
    """The location of each block whose first worker has a node."""
    first = shape.block_workers
    return {block: place_of(inventory, nodes[block * first]) for block in range(shape.blocks) if block * first in nodes}


def _gpu_products(
    plan: Plan, inventory: Inventory, kept: Mapping[int, str], options: PlacingOptions, levels: GroupLevels
) -> Sequence[str | None]:
    """The GPU products to place on, one at a time, because the slowest GPU sets the pace of all. `None` means any mix.

    These are the products on which the entire job fits, or that of the workers that stay. A mix is used only if the job
    fits on no single product.
    """
    products = sorted({node.gpu_product for node in inventory.usable})
    if len(products) <= 1:
        return (None,)
    running = {inventory.nodes[node].gpu_product for node in kept.values() if node in inventory.nodes}
    candidate_products = [p for p in products if p in running] if len(running) == 1 else products if not running else []
    shape = GangShape(plan)
    needed = shape.blocks - len(kept) // shape.block_workers

    def fits(product: str) -> bool:
        capacity = FreeCapacity(plan, inventory, kept, options.tensor_within, product)
        if capacity.total_blocks() < needed:
            return False
        fixed = _fixed_blocks(shape, inventory, kept)
        return not levels.required or NestedCapacity(shape.blocks, levels.required, capacity, fixed).fits

    return [product for product in candidate_products if fits(product)] or (None,)


def _is_possible(
    plan: Plan,
    inventory: Inventory,
    kept: Mapping[int, str],
    nodes: Mapping[int, str],
    options: PlacingOptions,
    levels: GroupLevels,
) -> bool:
    """Whether the workers fit on these nodes, and every group stays within the level that it must not leave."""
    shape = GangShape(plan)
    if any(worker not in nodes for worker in range(shape.workers)) or not kept.items() <= nodes.items():
        return False
    capacity = FreeCapacity(plan, inventory, {}, options.tensor_within)
    free = {name: count for domain in capacity.domains for name, count in capacity.nodes_in(domain).items()}
    counts = Counter(nodes[worker] for worker in range(shape.workers) if worker not in kept)
    kept_by_node = Counter(kept.values())
    if any(free.get(node, 0) - kept_by_node[node] < count for node, count in counts.items()):
        return False
    if not levels.met(_fixed_blocks(shape, inventory, nodes)):
        return False
    places = [place_of(inventory, nodes[worker]).at(options.tensor_within) for worker in range(shape.workers)]
    return all(len({places[w] for w in shape.workers_of(block)}) == 1 for block in range(shape.blocks))


def _result(
    plan: Plan,
    inventory: Inventory,
    nodes: dict[int, str],
    options: PlacingOptions,
    bound: float,
    levels: GroupLevels,
) -> Placement:
    places = {worker: place_of(inventory, node) for worker, node in nodes.items()}
    mesh = options.mesh_of(plan.layout, plan.gpus_per_worker)
    domains = nvlink_domains(nodes, places, joined=inventory.pods_joined)
    crossing_costs = crossings(plan, places, options.weights, mesh, domains)
    notes = placement_notes(plan, inventory, nodes, crossing_costs, options.tensor_within)
    blocks = _fixed_blocks(GangShape(plan), inventory, nodes)
    return Placement(
        plan,
        nodes,
        places,
        crossing_costs,
        min(bound, crossing_costs.cost),
        notes,
        topology=achieved_levels(plan, nodes, places) if plan.topology is not None else {},
        broken_preferences=levels.broken(blocks) if levels.preferred else 0,
        joined=inventory.pods_joined,
    )
