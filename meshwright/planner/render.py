"""Renders a placement as text: racks, their nodes, and on each GPU the rank with its coordinates in the mesh."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from meshwright.api.status import PlacementStatus, PlanStatus, WorkerPlacement
from meshwright.layout import Layout

_FREE = "·"


def render_placement(
    plan: PlanStatus, placement: PlacementStatus, gpus_by_node: Mapping[str, int] | None = None
) -> list[str]:
    """Return the lines of a tree, rack -> node -> one cell per GPU, from a job's status.

    A cell is `rank d0p1t0`: data, pipeline and tensor coordinate, or `d0p1c0t0` with the context coordinate if the
    context degree is above 1. `gpus_by_node` adds the GPUs that the job does not use, as `·`.
    """
    layout = Layout(max(1, plan.tensor), max(1, plan.pipeline), max(1, plan.data), max(1, plan.context))
    width = len(str(layout.world_size - 1))
    racks: defaultdict[str, defaultdict[str, list[WorkerPlacement]]] = defaultdict(lambda: defaultdict(list))
    for worker in sorted(placement.workers, key=lambda w: w.worker):
        racks[_rack(worker)][worker.node].append(worker)
    names = [len(worker.node) for worker in placement.workers]
    lines: list[str] = []
    for rack, nodes in racks.items():
        lines.append(rack or "(no rack label)")
        for position, (node, workers) in enumerate(nodes.items()):
            branch = "└─" if position == len(nodes) - 1 else "├─"
            cells = [_cell(layout, rank, width) for worker in workers for rank in _ranks(worker)]
            unused = (gpus_by_node or {}).get(node, 0) - len(cells)
            pods = ",".join(f"w{worker.worker}" for worker in workers)
            text = " ".join(f"[{cell}]" for cell in _pad_free(cells, unused))
            lines.append(f"{branch} {node:<{max(names)}} {pods:<4} {text}{_domain(workers)}")
    return lines


def summary_line(plan: PlanStatus, placement: PlacementStatus) -> str:
    """Return a summary of the drawing in one line."""
    racks = {rack for worker in placement.workers if (rack := _rack(worker))}
    nodes = {worker.node for worker in placement.workers}
    straddling = placement.straddling_replicas
    crossing = f"replicas that leave their rack: {straddling}" if straddling else "every replica inside one rack"
    where = _plural(len(nodes), "node") + (f" in {_plural(len(racks), 'rack')}" if racks else "")
    return f"{plan.summary}: {_plural(plan.world_size, 'rank')} on {where}, {crossing}"


def _rack(worker: WorkerPlacement) -> str:
    """The rack that a label names. Empty for a node without a rack label, whose location has a `/` in its name."""
    return "" if "/" in worker.rack else worker.rack


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _cell(layout: Layout, rank: int, width: int) -> str:
    at = layout.coordinates(rank)
    context = f"c{at.context}" if layout.context > 1 else ""
    return f"{rank:>{width}} d{at.data}p{at.pipeline}{context}t{at.tensor}"


def _pad_free(cells: list[str], unused: int) -> Iterable[str]:
    return [*cells, *[_FREE] * max(0, unused)]


def _ranks(worker: WorkerPlacement) -> range:
    first, _, last = worker.ranks.partition("-")
    return range(int(first), int(last or first) + 1)


def _domain(workers: list[WorkerPlacement]) -> str:
    """The NVLink domain, if it is larger than the node."""
    domain = workers[0].domain
    node_names = ("", workers[0].node, f"host/{workers[0].node}")
    return "" if domain in node_names else f"  NVLink {domain}"
