"""Merges the profiles of several ranks into one Chrome trace, with one process for each rank and one clock. Pure.

torch writes times relative to a base in ns since 1970. Nodes have clocks of their own, so the traces of each node are
shifted by the median difference of the ends of steps: all ranks complete a step in the same all-reduce. A node is not
shifted by less than the difference varies from step to step. Neither are ranks that do not complete steps together,
such as the islands of local SGD.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Event = dict[str, Any]

NOISE_MICROSECONDS = 5000.0
"""A smaller difference between the clocks of two nodes cannot be measured by the ends of steps."""
NOISE_OF_ONE_STEP = 50_000.0
"""The same with a single step, which may have ended later on a busy node."""
_TIMELESS = "M"
"""Phase of events that name processes and threads."""


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The trace of one rank, as torch wrote it."""

    rank: int
    worker: int
    node: str
    trace: Mapping[str, Any]

    @property
    def ends(self) -> dict[int, float]:
        """Step -> when the rank completed it, in µs since 1970."""
        return {int(step): float(end) / 1000 for step, end in self._metadata.get("ends") or ()}

    @property
    def synchronous(self) -> bool:
        """Whether all ranks complete a step together."""
        return bool(self._metadata.get("synchronous"))

    @property
    def base(self) -> float:
        """The beginning of its clock, in µs since 1970."""
        return float(self.trace.get("baseTimeNanoseconds") or 0) / 1000

    @property
    def _metadata(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.trace.get("meshwright") or {}
        return found


def merge(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """One trace with a process for each rank, in the order of ranks. Times begin at 0."""
    ordered = sorted(traces, key=lambda trace: trace.rank)
    offsets = clock_offsets(ordered)
    events = [event for trace in ordered for event in _events(trace, offsets[trace.node])]
    begin = min((event["ts"] for event in events if event["ph"] != _TIMELESS), default=0.0)
    for event in events:
        if event["ph"] != _TIMELESS:
            event["ts"] = round(event["ts"] - begin, 3)
    metadata = {
        "ranks": [trace.rank for trace in ordered],
        "steps": sorted({step for trace in ordered for step in trace.ends}),
        "beginMicroseconds": begin,
        "clockOffsets": {node: round(offset) for node, offset in offsets.items() if offset},
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "meshwright": metadata}


def clock_offsets(traces: Sequence[RankTrace]) -> dict[str, float]:
    """Node -> µs to subtract from its times. The node of the first trace is the reference."""
    offsets = {trace.node: 0.0 for trace in traces}
    if not traces or not all(trace.synchronous for trace in traces):
        return offsets
    reference = traces[0]
    for node in offsets:
        differences = [
            end - reference.ends[step]
            for trace in traces
            if trace.node == node != reference.node
            for step, end in trace.ends.items()
            if step in reference.ends
        ]
        offsets[node] = _offset(differences)
    return offsets


def _offset(differences: Sequence[float]) -> float:
    """The difference of two clocks from those of some steps; 0 if it cannot be told from noise."""
    if not differences:
        return 0.0
    varies = max(differences) - min(differences) if len(differences) > 1 else NOISE_OF_ONE_STEP
    found = median(differences)
    return found if abs(found) > max(NOISE_MICROSECONDS, varies) else 0.0


def _events(trace: RankTrace, offset: float) -> list[Event]:
    """The events of a rank as one process. torch's own processes, such as a GPU, become threads of it."""
    rank, names = trace.rank, f"rank {trace.rank} (worker {trace.worker} on {trace.node})"
    found: list[Event] = [
        {"ph": _TIMELESS, "name": "process_name", "pid": rank, "tid": 0, "args": {"name": names}},
        {"ph": _TIMELESS, "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}},
    ]
    threads: dict[tuple[Any, Any], int] = {}
    named: set[int] = set()
    for raw in trace.trace.get("traceEvents") or ():
        phase, name = raw.get("ph"), raw.get("name")
        if phase == _TIMELESS and name != "thread_name":
            continue
        thread = threads.setdefault((raw.get("pid"), raw.get("tid")), len(threads))
        event: Event = {**raw, "pid": rank, "tid": thread}
        if phase == _TIMELESS:
            if thread in named:
                continue  # torch names a thread several times
            named.add(thread)
        else:
            event["ts"] = float(raw.get("ts") or 0.0) + trace.base - offset
        if "id" in raw:
            event["id"] = f"{rank}:{raw['id']}"
        found.append(event)
    for step, end in trace.ends.items():
        found.append({"ph": "i", "s": "p", "name": f"end of step {step}", "pid": rank, "tid": 0, "ts": end - offset})
    return found
