"""How many more workers fit on each node and in each NVLink domain and rack."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from meshwright.planner.cluster.inventory import Inventory, Node
from meshwright.planner.cluster.limits import usable_memory
from meshwright.planner.placement.rank_blocks import RankBlocks
from meshwright.planner.plan import Plan
from meshwright.planner.topology.levels import DOMAIN, NODE
from meshwright.planner.topology.location import Location
from meshwright.planner.units import format_bytes


def name_at(node: Node, level: str) -> str:
    """The node's location at a level. Nodes are a level too."""
    return node.name if level == NODE else node.place.at(level)


class GangShape:
    """How a plan's workers form blocks and segments.

    A *block* is the smallest number of consecutive workers with complete tensor-parallel groups: it must stay in one
    NVLink domain. A *segment* is the smallest number of consecutive blocks with complete replicas: it should stay in
    one rack.
    """

    def __init__(self, plan: Plan) -> None:
        self.mesh = RankBlocks.of(plan.layout, plan.gpus_per_worker)
        self.workers = plan.layout.world_size // plan.gpus_per_worker
        self.block_workers = self.mesh.block_workers
        self.segment_blocks = self.mesh.segment_blocks
        self.blocks = self.mesh.blocks
        self.segments = self.blocks // self.segment_blocks

    def workers_of(self, block: int) -> range:
        """Worker indices of a block."""
        return range(block * self.block_workers, (block + 1) * self.block_workers)

    def blocks_of(self, segment: int) -> range:
        """Blocks of a segment."""
        return range(segment * self.segment_blocks, (segment + 1) * self.segment_blocks)


class FreeCapacity:
    """Free capacity, which decreases as workers are placed. Counts are workers unless a name says blocks.

    Here a *domain* is the location that a tensor-parallel group must not leave: an NVLink domain, or a location of the
    wider level `domain_level` if a job sets it. With `product`, only nodes with such GPUs count.
    """

    def __init__(
        self,
        plan: Plan,
        inventory: Inventory,
        kept: Mapping[int, str],
        domain_level: str = DOMAIN,
        product: str | None = None,
    ) -> None:
        self.block_workers = GangShape(plan).block_workers
        self._domain_level = domain_level
        self._by_node: dict[str, int] = {}
        self._nodes: defaultdict[str, list[str]] = defaultdict(list)
        self._free: defaultdict[str, int] = defaultdict(int)
        self._places: dict[str, Location] = {}
        self._racks: defaultdict[str, dict[str, None]] = defaultdict(dict)
        kept_by_node = Counter(kept.values())
        for node in inventory.usable:
            if product is not None and node.gpu_product != product:
                continue
            places = node.free.fits(plan.worker_request) - kept_by_node[node.name]
            if places > 0 and not why_too_small(plan, node):
                self._add(node, places)

    def _add(self, node: Node, places: int) -> None:
        domain = name_at(node, self._domain_level)
        self._places.setdefault(domain, node.place)
        self._racks[node.place.rack][domain] = None
        self._nodes[domain].append(node.name)
        self._by_node[node.name] = places
        self._free[domain] += places

    @property
    def domains(self) -> Mapping[str, Location]:
        """Every domain that had free capacity, and its location."""
        return self._places

    @property
    def all_racks(self) -> list[str]:
        """Every rack, zone by zone."""
        zones = {rack: next(iter(self._places[d].zone for d in domains)) for rack, domains in self._racks.items()}
        return sorted(zones, key=lambda rack: (zones[rack], rack))

    def domains_of(self, rack: str) -> list[str]:
        """The domains of a rack."""
        return list(self._racks.get(rack, ()))

    def nodes_in(self, domain: str) -> dict[str, int]:
        """Node -> number of workers that fit, in one domain."""
        return {name: self._by_node[name] for name in self._nodes.get(domain, ())}

    def workers(self, domain: str) -> int:
        """Number of workers that fit in a domain."""
        return self._free.get(domain, 0)

    def blocks(self, domain: str) -> int:
        """Number of complete blocks that fit in a domain."""
        return self.workers(domain) // self.block_workers

    def rack_blocks(self, rack: str) -> int:
        """Number of complete blocks that fit in a rack."""
        return sum(self.blocks(domain) for domain in self.domains_of(rack))

    def total_blocks(self) -> int:
        """Number of complete blocks that fit in all domains together: any plan with at most this many fits."""
        return sum(self.blocks(domain) for domain in self._nodes)

    def use(self, domain: str, node: str, count: int) -> None:
        """Subtract `count` workers from a node's capacity."""
        self._by_node[node] -= count
        self._free[domain] -= count


def why_too_small(plan: Plan, node: Node) -> str:
    """Why a rank of the plan does not fit on the node's GPUs. Empty if it fits or their memory is unknown."""
    if plan.memory is None or node.gpu_memory_bytes is None:
        return ""
    if plan.memory.total <= usable_memory(node.gpu_memory_bytes):
        return ""
    return f"a rank needs {format_bytes(plan.memory.total)}, its GPUs have {format_bytes(node.gpu_memory_bytes)}"
