"""Which workers have succeeded in the current generation, as status stores it.

The proof that a worker has succeeded is its pod object, which anyone may delete, or the last report of its agent, which
is in memory only. So each decision copies what it sees to `status.mesh.succeededWorkers` before anything is done about
it, and the next generation starts with an empty list.

If no operator ran between the end of a pod and the removal of its object, nothing is stored. Ranks of the built-in
runtime end together, because their last step is collective: a worker whose pod is lost has succeeded too if another one
has. A worker of a `runtime.command` must run again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshwright.api.status import MAX_SUCCEEDED_WORKERS, MeshStatus
from meshwright.protocol.messages import AgentState
from meshwright_operator.decide.agents import Agents

MAX_TEXT = MAX_SUCCEEDED_WORKERS
MAX_INDEX = 65535
"""The highest worker index in the protocol."""


def format_workers(workers: Iterable[int]) -> str:
    """The workers as ranges, such as `0-3,7`. Ranges that exceed `MAX_TEXT` are left out."""
    text = ""
    for first, last in _ranges(sorted(set(workers))):
        part = str(first) if first == last else f"{first}-{last}"
        if len(text) + len(part) >= MAX_TEXT:
            break
        text = f"{text},{part}" if text else part
    return text


def parse_workers(text: str) -> set[int]:
    """The workers in a string of ranges. Ignores parts that are not valid."""
    return {worker for workers in disjoint_ranges(text) for worker in workers}


def disjoint_ranges(text: str) -> list[range]:
    """The ranges in a string, without parts that are not valid.

    No worker is in two of them: thousands of ranges that overlap must not take longer to read than all workers.
    """
    ranges = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if _is_index(first) and _is_index(last):
            ranges.append((int(first), min(int(last), MAX_INDEX) + 1))
    disjoint, following = [], 0
    for first_worker, end in sorted(ranges):
        if (begin := max(first_worker, following)) < end:
            disjoint.append(range(begin, end))
            following = end
    return disjoint


def stored_workers(mesh: MeshStatus | None) -> set[int]:
    """The workers that status names. Nobody while the next generation is being formed: it needs all workers."""
    if mesh is None or not mesh.generation or mesh.pending_cause:
        return set()
    return parse_workers(mesh.succeeded_workers)


def completed_in_reports(mesh: MeshStatus | None, agents: Agents) -> dict[int, int]:
    """Worker -> incarnation, of the workers whose agents report that all their ranks completed the current run."""
    if mesh is None or not mesh.generation or mesh.pending_cause:
        return {}
    return {
        worker: received.report.incarnation
        for worker, received in agents.reports.items()
        if received.report.state is AgentState.COMPLETE and received.report.generation == mesh.generation
    }


def _ranges(numbers: list[int]) -> Iterator[tuple[int, int]]:
    first = last = -1
    for number in numbers:
        if last >= 0 and number == last + 1:
            last = number
            continue
        if last >= 0:
            yield first, last
        first = last = number
    if last >= 0:
        yield first, last


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_INDEX))
