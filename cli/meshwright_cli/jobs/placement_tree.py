"""A job's workers as a tree: racks, NVLink domains, nodes, and the ranks with their coordinates. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.api.status import LayoutStatus, ParallelTrainingJobStatus, WorkerPlacement, parse_ranks
from meshwright.layout import Layout
from meshwright_cli.client.objects import WorkerPod, newest_pods
from meshwright_cli.jobs.output import table
from meshwright_cli.text import plural

MAX_WORKERS = 32
"""Workers that are listed one by one. With more, racks are summarized, except for workers that do not run."""
DIMENSIONS = (("data", "DP"), ("pipeline", "PP"), ("context", "CP"), ("tensor", "TP"))


@dataclass
class Branch:
    """A node of the tree."""

    cells: tuple[str, ...]
    children: list[Branch] = field(default_factory=list)


def placement_tree(
    status: ParallelTrainingJobStatus, pods: Sequence[WorkerPod] | None, *, every_worker: bool
) -> list[str]:
    """Lines of the tree.

    Args:
        status: the job's status.
        pods: its pods. None if they are not known: no states are shown.
        every_worker: list all workers of a large job too.
    """
    if status.placement is None:
        return []
    states = {pod.worker: pod for pod in newest_pods(pods)} if pods is not None else None
    layout = layout_of(status.plan)
    racks: dict[str, list[WorkerPlacement]] = defaultdict(list)
    for entry in status.placement.workers:
        racks[entry.rack].append(entry)
    shared = {domain for domain, nodes in _nodes_by_domain(status.placement.workers).items() if len(nodes) > 1}
    summarize = len(status.placement.workers) > MAX_WORKERS and not every_worker
    branches = []
    for rack in sorted(racks):
        workers = [_worker(entry, states, layout) for entry in racks[rack]]
        if summarize:
            branches.append(_summary(rack, racks[rack], states, workers))
            continue
        children = _by_domain(racks[rack], workers, shared)
        branches += [Branch((f"rack {rack}",), children)] if rack else children
    return _aligned(branches)


def layout_of(plan: LayoutStatus | None) -> Layout | None:
    """The layout of a plan, without experts, which have no coordinates of their own. None if it is invalid."""
    try:
        return Layout(plan.tensor, plan.pipeline, plan.data, plan.context) if plan is not None else None
    except ValueError:
        return None


def coordinates(layout: Layout | None, ranks: range | None) -> str:
    """The coordinates of ranks in the dimensions with more than one rank, such as `DP 1, TP 0-1`."""
    if layout is None or ranks is None or ranks.stop > layout.world_size:
        return ""
    all_of_them = [layout.coordinates(rank) for rank in ranks]
    parts = []
    for name, short in DIMENSIONS:
        if getattr(layout, name) > 1:
            values = sorted({getattr(one, name) for one in all_of_them})
            parts.append(f"{short} {values[0]}" if len(values) == 1 else f"{short} {values[0]}-{values[-1]}")
    return ", ".join(parts)


def _worker(entry: WorkerPlacement, states: Mapping[int, WorkerPod] | None, layout: Layout | None) -> Branch:
    pod = states.get(entry.worker) if states is not None else None
    state = _state(entry, states)
    moved = f" on {pod.node}" if pod is not None and pod.node and pod.node != entry.node else ""
    ranks = parse_ranks(entry.ranks)
    count = "rank" if ranks is not None and len(ranks) == 1 else "ranks"
    name = f"worker {entry.worker}"
    return Branch((entry.node, name, f"{count} {entry.ranks}", f"{state}{moved}", coordinates(layout, ranks)))


def _state(entry: WorkerPlacement, states: Mapping[int, WorkerPod] | None) -> str:
    if states is None:
        return ""
    return states[entry.worker].state if entry.worker in states else "no pod"


def _nodes_by_domain(workers: Sequence[WorkerPlacement]) -> dict[str, set[str]]:
    nodes: dict[str, set[str]] = defaultdict(set)
    for entry in workers:
        nodes[entry.domain].add(entry.node)
    return nodes


def _by_domain(entries: Sequence[WorkerPlacement], workers: Sequence[Branch], shared: set[str]) -> list[Branch]:
    """The workers of a rack, below their domain if that has several nodes."""
    found: list[Branch] = []
    domains: dict[str, Branch] = {}
    for entry, worker in zip(entries, workers, strict=True):
        if entry.domain not in shared:
            found.append(worker)
            continue
        if entry.domain not in domains:
            domains[entry.domain] = Branch((f"domain {entry.domain}",))
            found.append(domains[entry.domain])
        domains[entry.domain].children.append(worker)
    return found


def _summary(
    rack: str, entries: Sequence[WorkerPlacement], states: Mapping[int, WorkerPod] | None, workers: Sequence[Branch]
) -> Branch:
    """A rack in one line, and below it the workers that do not run."""
    nodes = len({entry.node for entry in entries})
    text = f"{f'rack {rack}' if rack else 'no rack'}: {plural(nodes, 'node')}, {plural(len(entries), 'worker')}"
    if states is None:
        return Branch((text,))
    now = [_state(entry, states) for entry in entries]
    counted = ", ".join(f"{count:,} {state}" for state, count in Counter(now).most_common())
    stopped = [worker for worker, state in zip(workers, now, strict=True) if state != "Running"]
    return Branch((f"{text}: {counted}",), stopped)


def _aligned(branches: Sequence[Branch]) -> list[str]:
    """The tree with branch lines, and the columns of all workers aligned."""
    drawn = list(_drawn(branches, "", root=True))
    rows = [cells for _, cells in drawn if len(cells) > 1]
    prefixed = [(prefix + cells[0], *cells[1:]) for prefix, cells in drawn if len(cells) > 1]
    lines = iter(table(("",) * len(rows[0]), prefixed)[1:] if rows else ())
    return [next(lines) if len(cells) > 1 else prefix + cells[0] for prefix, cells in drawn]


def _drawn(branches: Sequence[Branch], indent: str, *, root: bool = False) -> Iterator[tuple[str, tuple[str, ...]]]:
    for index, branch in enumerate(branches):
        last = index == len(branches) - 1
        yield ("" if root else indent + ("└─ " if last else "├─ ")), branch.cells
        yield from _drawn(branch.children, "" if root else indent + ("   " if last else "│  "))
