"""Assigning workers to nodes, from what must hold to what is free to choose.

1. Workers whose tensor-parallel group partly stays join it in its NVLink domain.
2. Blocks whose replica partly stays go as near to it as there is room.
3. Whole replicas go into racks that hold them whole; the few that no rack holds are split over the fewest racks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from meshwright.planner.inventory import Inventory
from meshwright.planner.packing import share_whole, take
from meshwright.planner.plan import Plan
from meshwright.planner.room import Room, Shape
from meshwright.planner.shortage import shortage
from meshwright.planner.topology import Place


class Assignment:
    """One run of the algorithm. `nodes` grows from the workers that stay to all of them."""

    def __init__(self, plan: Plan, inventory: Inventory, kept: Mapping[int, str]) -> None:
        self._plan = plan
        self._inventory = inventory
        self._kept = kept
        self._shape = Shape(plan)
        self._room = Room(plan, inventory, kept)
        self.nodes = dict(kept)

    def run(self, racks: Sequence[str], whole_domains: bool) -> dict[int, str]:
        """Places every worker; whole replicas into `racks`, which must have room for them.

        With `whole_domains` racks count first for the replicas that one NVLink domain of theirs holds.

        Raises:
            DoesNotFitError: there is no room.
        """
        for block in range(self._shape.blocks):
            self._complete_block(block)
        if sum(len(self._missing(s)) for s in range(self._shape.segments)) > self._room.total_blocks():
            raise shortage(self._plan, self._inventory, self._kept, blocked=0)
        untouched: list[int] = []
        for segment in range(self._shape.segments):
            missing = self._missing(segment)
            if len(missing) == self._shape.segment_blocks:
                untouched.append(segment)
            elif missing:
                self._complete_segment(segment, missing)
        for tier in self._tiers(racks):
            if whole_domains:
                untouched = self._place_whole(untouched, {rack: self._in_domains(rack) for rack in tier})
            untouched = self._place_whole(untouched, {rack: self._in_rack(rack) for rack in tier})
        for segment in untouched:
            self._place_split(segment, racks)
        return self.nodes

    def _missing(self, segment: int) -> list[int]:
        blocks = self._shape.blocks_of(segment)
        return [block for block in blocks if self._shape.workers_of(block).start not in self.nodes]

    def _complete_block(self, block: int) -> None:
        """Puts the workers of a partly kept tensor-parallel group beside those that stay."""
        workers = self._shape.workers_of(block)
        missing = [worker for worker in workers if worker not in self.nodes]
        if not missing or len(missing) == len(workers):
            return
        domains = Counter(self._place_of(worker).domain for worker in workers if worker in self.nodes)
        domain = min(domains, key=lambda name: (-domains[name], name))
        available = self._room.workers(domain)
        if available < len(missing):
            raise shortage(self._plan, self._inventory, self._kept, blocked=len(missing) - available)
        self._put(missing, domain)

    def _complete_segment(self, segment: int, missing: Sequence[int]) -> None:
        """Puts the missing blocks of a partly kept replica as near to the kept ones as there is room."""
        for position, block in enumerate(missing):
            near = [
                self._place_of(worker)
                for other in self._shape.blocks_of(segment)
                for worker in self._shape.workers_of(other)
                if worker in self.nodes
            ]
            self._put(self._shape.workers_of(block), self._nearest(near, len(missing) - position))

    def _nearest(self, near: Sequence[Place], wanted: int) -> str:
        """The domain with room for a block that shares most with `near`; rather one in a rack with room for all."""
        domains, racks, zones = {p.domain for p in near}, {p.rack for p in near}, {p.zone for p in near}

        def distance(place: Place) -> tuple[int, bool, int, str]:
            level = 3 - (place.zone in zones) - (place.rack in racks) - (place.domain in domains)
            tight = self._room.rack_blocks(place.rack) < wanted
            return level, tight, self._room.blocks(place.domain), place.domain

        return min((p for p in self._room.domains if self._room.blocks(p.domain)), key=distance).domain

    def _tiers(self, racks: Sequence[str]) -> list[Sequence[str]]:
        """Racks by nearness to the workers that stay: the ones they are in, those of the same zones, the others."""
        if not self._kept:
            return [racks]
        places = [self._place_of(worker) for worker in self._kept]
        used, zones = {p.rack for p in places}, {p.zone for p in places}
        same = [rack for rack in racks if rack in used]
        near = [rack for rack in racks if rack not in used and self._room.zone_of(rack) in zones]
        return [same, near, [rack for rack in racks if rack not in same and rack not in near]]

    def _in_rack(self, rack: str) -> int:
        """Replicas that a rack holds whole."""
        return self._room.rack_blocks(rack) // self._shape.segment_blocks

    def _in_domains(self, rack: str) -> int:
        """Replicas that single NVLink domains of a rack hold whole."""
        return sum(self._room.blocks(d) // self._shape.segment_blocks for d in self._room.domains_of(rack))

    def _place_whole(self, segments: Sequence[int], capacity: Mapping[str, int]) -> list[int]:
        """Puts replicas into racks that hold so many of them; returns the ones left over."""
        left = list(segments)
        for rack, count in share_whole(len(segments), capacity).items():
            for _ in range(count):
                self._put_in_rack(self._shape.blocks_of(left.pop(0)), rack)
        return left

    def _place_split(self, segment: int, racks: Sequence[str]) -> None:
        """Splits a replica over the fewest racks, of one zone where a zone holds it."""
        blocks, size = self._shape.blocks_of(segment), self._shape.segment_blocks
        by_zone: dict[str, dict[str, int]] = {}
        for rack in racks:
            by_zone.setdefault(self._room.zone_of(rack), {})[rack] = self._room.rack_blocks(rack)
        holding = [(sum(room.values()), zone) for zone, room in by_zone.items() if sum(room.values()) >= size]
        everywhere = {rack: count for room in by_zone.values() for rack, count in room.items()}
        room = by_zone[min(holding)[1]] if holding else everywhere
        first = blocks.start
        for rack, count in take(size, room):
            self._put_in_rack(range(first, first + count), rack)
            first += count

    def _put_in_rack(self, blocks: range, rack: str) -> None:
        """Puts consecutive blocks into the NVLink domains of a rack."""
        room = {domain: self._room.blocks(domain) for domain in self._room.domains_of(rack)}
        first = blocks.start
        for domain, count in take(len(blocks), room):
            for block in range(first, first + count):
                self._put(self._shape.workers_of(block), domain)
            first += count

    def _put(self, workers: Iterable[int], domain: str) -> None:
        """Puts the workers of one block onto nodes of a domain."""
        waiting = list(workers)
        for node, count in take(len(waiting), self._room.nodes_in(domain)):
            self._room.use(domain, node, count)
            self.nodes |= dict.fromkeys(waiting[:count], node)
            waiting = waiting[count:]

    def _place_of(self, worker: int) -> Place:
        return place_of(self._inventory, self.nodes[worker])


def place_of(inventory: Inventory, node: str) -> Place:
    """Where a node is; one that is no longer known is a place of its own."""
    known = inventory.nodes.get(node)
    return known.place if known else Place(f"host/{node}", f"domain/host/{node}", "")
