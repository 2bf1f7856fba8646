"""How many workers each node, NVLink domain and rack can still take."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from math import lcm

from meshwright.planner.hardware import usable_memory
from meshwright.planner.inventory import Inventory, Node
from meshwright.planner.plan import Plan
from meshwright.planner.reasons import amount_text
from meshwright.planner.topology import Place


class Shape:
    """How a plan's workers group.

    A *block* is the fewest consecutive workers that hold whole tensor-parallel groups: it must stay in one NVLink
    domain. A *segment* is the fewest consecutive blocks that hold whole replicas: it should stay in one rack.
    """

    def __init__(self, plan: Plan) -> None:
        block_gpus = max(plan.gpus_per_worker, plan.layout.tensor)
        self.workers = plan.layout.world_size // plan.gpus_per_worker
        self.block_workers = block_gpus // plan.gpus_per_worker
        self.segment_blocks = lcm(block_gpus, plan.layout.replica_size) // block_gpus
        self.blocks = self.workers // self.block_workers
        self.segments = self.blocks // self.segment_blocks

    def workers_of(self, block: int) -> range:
        """Worker indices of a block."""
        return range(block * self.block_workers, (block + 1) * self.block_workers)

    def blocks_of(self, segment: int) -> range:
        """Blocks of a segment."""
        return range(segment * self.segment_blocks, (segment + 1) * self.segment_blocks)


class Room:
    """Free places for workers, which shrink as they are taken. Counts are workers unless a name says blocks."""

    def __init__(self, plan: Plan, inventory: Inventory, kept: Mapping[int, str]) -> None:
        self._block_workers = Shape(plan).block_workers
        self._by_node: dict[str, int] = {}
        self._nodes: defaultdict[str, list[str]] = defaultdict(list)
        self._free: defaultdict[str, int] = defaultdict(int)
        self._domains: defaultdict[str, list[Place]] = defaultdict(list)
        self._zones: dict[str, str] = {}
        held = Counter(kept.values())
        for node in inventory.usable:
            places = node.free.fits(plan.worker_request) - held[node.name]
            if places > 0 and not too_small(plan, node):
                self._add(node, places)

    def _add(self, node: Node, places: int) -> None:
        place = node.place
        if place.domain not in self._nodes:
            self._domains[place.rack].append(place)
            self._zones[place.rack] = place.zone
        self._nodes[place.domain].append(node.name)
        self._by_node[node.name] = places
        self._free[place.domain] += places

    @property
    def domains(self) -> list[Place]:
        """Every NVLink domain that had free places."""
        return [place for places in self._domains.values() for place in places]

    @property
    def racks(self) -> dict[str, list[str]]:
        """Zone -> its racks, by name."""
        zones: dict[str, list[str]] = {}
        for rack in sorted(self._zones, key=lambda rack: (self._zones[rack], rack)):
            zones.setdefault(self._zones[rack], []).append(rack)
        return zones

    @property
    def all_racks(self) -> list[str]:
        """Every rack, zone by zone."""
        return [rack for racks in self.racks.values() for rack in racks]

    def zone_of(self, rack: str) -> str:
        """The zone a rack is in."""
        return self._zones[rack]

    def domains_of(self, rack: str) -> list[str]:
        """The NVLink domains of a rack."""
        return [place.domain for place in self._domains.get(rack, ())]

    def nodes_in(self, domain: str) -> dict[str, int]:
        """Node -> free places, in one domain."""
        return {name: self._by_node[name] for name in self._nodes.get(domain, ())}

    def workers(self, domain: str) -> int:
        """Workers a domain can take."""
        return self._free.get(domain, 0)

    def blocks(self, domain: str) -> int:
        """Whole blocks a domain can take."""
        return self.workers(domain) // self._block_workers

    def rack_blocks(self, rack: str) -> int:
        """Whole blocks a rack can take."""
        return sum(self.blocks(domain) for domain in self.domains_of(rack))

    def total_blocks(self) -> int:
        """Whole blocks all domains can take together: any plan of at most so many blocks fits."""
        return sum(self.blocks(domain) for domain in self._nodes)

    def use(self, domain: str, node: str, count: int) -> None:
        """Takes places of a node."""
        self._by_node[node] -= count
        self._free[domain] -= count


def too_small(plan: Plan, node: Node) -> str:
    """Why the node's GPUs do not hold a rank of the plan; empty when they do or their memory is not known."""
    if plan.memory is None or node.gpu_memory_bytes is None:
        return ""
    if plan.memory.total <= usable_memory(node.gpu_memory_bytes):
        return ""
    return f"a rank needs {amount_text(plan.memory.total)}, its GPUs have {amount_text(node.gpu_memory_bytes)}"
