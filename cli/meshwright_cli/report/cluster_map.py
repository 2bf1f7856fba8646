"""The cluster as a tree of racks and nodes, with every rank in its place, and the groups that leave a location."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.api.status import PlacementStatus, WorkerPlacement, parse_ranks
from meshwright.layout import Layout
from meshwright.planner.topology.levels import DOMAIN, NODE, RACK
from meshwright.planner.topology.location import Location
from meshwright_cli.report.inputs import ReportInputs

COLORS = 12
"""Number of colors. Coordinates with the same remainder have the same color."""
MAX_NUMBERED = 1024
"""Largest number of ranks whose numbers are in their cells."""
MAX_CELLS = 8192
"""Largest number of cells. Ranks of a larger job share cells."""
MAX_STRADDLES = 8
"""Largest number of groups that are named."""

_WORDS = {
    "tensor": "TP",
    "pipeline": "PP",
    "data": "DP",
    "context": "CP",
    "expert": "EP",
}
_PLACE_WORDS = {NODE: "one node", DOMAIN: "one NVLink domain", RACK: "one rack"}


@dataclass(frozen=True, slots=True)
class Dimension:
    """A dimension that can color the ranks."""

    key: str
    label: str
    degree: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One rank, or a few consecutive ones of a large job."""

    first: int
    color: int
    straddles: bool


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node with the ranks on it."""

    name: str
    workers: str
    ranks: str
    domain: str
    cells: Sequence[Cell]
    unused: int
    """GPUs of the node that the job does not use."""
    last: bool
    straddles: bool


@dataclass(frozen=True, slots=True)
class RackView:
    """A rack with its nodes."""

    name: str
    nodes: Sequence[NodeView]
    ranks: int


@dataclass(frozen=True, slots=True)
class GroupRow:
    """The groups of one dimension."""

    label: str
    groups: int
    size: int
    within: str
    """The closest location that none of the groups leaves."""
    leaving: str
    """How many of them leave a location of the widest level that any of them leaves."""


@dataclass(frozen=True, slots=True)
class ClusterMap:
    """The drawing of a placement."""

    racks: Sequence[RackView]
    dimensions: Sequence[Dimension]
    selected: str
    """Key of the dimension that colors the ranks at first."""
    cell_ranks: int
    numbered: bool
    groups: Sequence[GroupRow]
    straddles: Sequence[str]
    """Tensor groups that leave their NVLink domain, and replicas that leave their rack, in sentences."""
    degrees: Mapping[str, int]


def cluster_map(inputs: ReportInputs) -> ClusterMap | None:
    """Return the drawing, or None without a placement."""
    layout, placement = inputs.layout, inputs.placement
    if layout is None or placement is None or not placement.workers:
        return None
    per_worker = len(parse_ranks(placement.workers[0].ranks) or range(1))
    cell_ranks = _ranks_per_cell(layout, per_worker)
    dimensions = _dimensions(layout)
    selected = next((key for key in ("pipeline", "tensor", "data") if _has(dimensions, key)), dimensions[0].key)
    straddling = _straddling_groups(layout, inputs.places, per_worker)
    ranks_that_straddle = {rank for _, group, _ in straddling for rank in group}
    racks = []
    for name, nodes in _workers_by_rack(placement).items():
        views = [
            _node(
                layout,
                node,
                workers,
                inputs.gpus_by_node.get(node, 0),
                selected,
                cell_ranks,
                ranks_that_straddle,
                last=position == len(nodes) - 1,
            )
            for position, (node, workers) in enumerate(nodes.items())
        ]
        ranks = sum(len(parse_ranks(worker.ranks) or ()) for workers in nodes.values() for worker in workers)
        racks.append(RackView(name, views, ranks))
    return ClusterMap(
        racks=racks,
        dimensions=dimensions,
        selected=selected,
        cell_ranks=cell_ranks,
        numbered=layout.world_size <= MAX_NUMBERED,
        groups=_group_rows(layout, placement, inputs.places, per_worker),
        straddles=_sentences(straddling),
        degrees={
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "data": layout.data,
            "context": layout.context,
            "expert": layout.expert,
        },
    )


def _workers_by_rack(placement: PlacementStatus) -> Mapping[str, Mapping[str, list[WorkerPlacement]]]:
    """Rack -> node -> its workers, each in the order of the ranks."""
    found: defaultdict[str, defaultdict[str, list[WorkerPlacement]]] = defaultdict(lambda: defaultdict(list))
    for worker in sorted(placement.workers, key=lambda one: (parse_ranks(one.ranks) or range(0)).start):
        found[_rack_name(worker)][worker.node].append(worker)
    return found


def coordinate(layout: Layout, rank: int, dimension: str) -> int:
    """Return a rank's coordinate in a dimension. That of `expert` is its place among the ranks that share experts."""
    at = layout.coordinates(rank)
    if dimension == "expert":
        return (at.data * layout.context + at.context) % layout.expert
    return int(getattr(at, dimension))


def _dimensions(layout: Layout) -> list[Dimension]:
    found = [Dimension(key, word, int(getattr(layout, key))) for key, word in _WORDS.items()]
    return [one for one in found if one.degree > 1] or [Dimension("data", "DP", 1)]


def _has(dimensions: Sequence[Dimension], key: str) -> bool:
    return any(one.key == key for one in dimensions)


def _ranks_per_cell(layout: Layout, per_worker: int) -> int:
    """1, or for large jobs as many as keep the page small: a tensor group, or a worker."""
    for size in (1, layout.tensor if per_worker % layout.tensor == 0 else 1, per_worker):
        if layout.world_size // size <= MAX_CELLS:
            return size
    return per_worker


def _node(
    layout: Layout,
    name: str,
    workers: Sequence[WorkerPlacement],
    gpus: int,
    selected: str,
    cell_ranks: int,
    straddling: set[int],
    *,
    last: bool,
) -> NodeView:
    ranks = [rank for worker in workers for rank in parse_ranks(worker.ranks) or ()]
    ranks = [rank for rank in ranks if rank < layout.world_size]
    cells = [
        Cell(
            first,
            coordinate(layout, first, selected) % COLORS,
            any(rank in straddling for rank in range(first, first + cell_ranks)),
        )
        for first in ranks[::cell_ranks]
    ]
    domain = workers[0].domain
    return NodeView(
        name=name,
        workers=", ".join(f"w{worker.worker}" for worker in workers),
        ranks=", ".join(worker.ranks for worker in workers),
        domain="" if domain in ("", name, f"host/{name}") else domain,
        cells=cells,
        unused=max(0, gpus - len(ranks)) if cell_ranks == 1 else 0,
        last=last,
        straddles=any(cell.straddles for cell in cells),
    )


def _rack_name(worker: WorkerPlacement) -> str:
    """The rack that a label names. A node without a rack label has a location with a `/` in its name."""
    return "" if "/" in worker.rack else worker.rack


def _groups_of(layout: Layout) -> dict[str, list[list[int]]]:
    groups = {
        "tensor": layout.tensor_groups(),
        "context": layout.context_groups(),
        "pipeline": layout.pipeline_groups(),
        "data": layout.data_groups(),
        "expert": layout.expert_groups() if layout.expert > 1 else [],
    }
    return {key: members for key, members in groups.items() if members and len(members[0]) > 1}


def _group_rows(
    layout: Layout, placement: PlacementStatus, places: Mapping[int, Location], per_worker: int
) -> list[GroupRow]:
    nodes = {number: entry.node for number, entry in enumerate(_in_order(placement))}
    levels = [level for level in (places[0].levels if places else ()) if level != NODE]
    rows = []
    for key, groups in _groups_of(layout).items():
        workers = [{rank // per_worker for rank in group} for group in groups]
        counts = {NODE: sum(len({nodes.get(one) for one in some}) > 1 for some in workers)}
        for level in levels:
            counts[level] = sum(len({places[one].at(level) for one in some if one in places}) > 1 for some in workers)
        within = next((level for level, leaving in counts.items() if not leaving), "")
        widest = next((level for level in reversed(counts) if counts[level]), "")
        leaving = f"{counts[widest]:,} of {len(groups):,} leave their {_noun(widest)}" if widest else ""
        rows.append(
            GroupRow(
                label=_WORDS[key],
                groups=len(groups),
                size=len(groups[0]),
                within=_PLACE_WORDS.get(within, f"one {within}" if within else "the cluster"),
                leaving=leaving or "none leaves its node",
            )
        )
    return rows


def _noun(level: str) -> str:
    return "NVLink domain" if level == DOMAIN else level


def _in_order(placement: PlacementStatus) -> list[WorkerPlacement]:
    return sorted(placement.workers, key=lambda one: (parse_ranks(one.ranks) or range(0)).start)


def _straddling_groups(
    layout: Layout, places: Mapping[int, Location], per_worker: int
) -> list[tuple[str, range, list[str]]]:
    """(name, ranks, places) of tensor groups in several NVLink domains, and of replicas in several racks."""
    found = []
    for noun, size, level in (("TP group", layout.tensor, DOMAIN), ("Replica", layout.replica_size, RACK)):
        if size == 1:
            continue
        for first in range(0, layout.world_size, size):
            workers = range(first // per_worker, (first + size - 1) // per_worker + 1)
            names = list(dict.fromkeys(places[one].at(level) for one in workers if one in places))
            if len(names) > 1:
                found.append((f"{noun} {first // size}", range(first, first + size), names))
    return found


def _location_name(place: str) -> str:
    """The name of a location. One without a label is named after its node."""
    return f"{place.rpartition('/')[2]} (no label)" if "/" in place else place


def _sentences(straddling: Sequence[tuple[str, range, list[str]]]) -> list[str]:
    sentences = []
    for name, ranks, places in straddling[:MAX_STRADDLES]:
        kind = "NVLink domains" if name.startswith("TP") else "racks"
        names = [_location_name(place) for place in places[:4]]
        shown = ", ".join(names) + (f" and {len(places) - 4} more" if len(places) > 4 else "")
        sentences.append(
            f"{name} (ranks {ranks.start} to {ranks.stop - 1}) is spread over {len(places)} {kind}: {shown}"
        )
    if len(straddling) > MAX_STRADDLES:
        sentences.append(f"{len(straddling) - MAX_STRADDLES} more groups are spread over several locations")
    return sentences
