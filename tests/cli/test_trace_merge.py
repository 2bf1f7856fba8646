"""Merging traces of ranks: one process for each rank, in order, on one clock. Pure."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from meshwright_cli.client.profiling import Profile
from meshwright_cli.client.trace_merge import RankTrace, clock_offsets, merge

SECOND = 1_000_000.0


def trace(
    rank: int, node: str = "n0", *, skew: float = 0.0, base: float = 100 * SECOND, late: float = 0.0, **more: Any
) -> RankTrace:
    """A trace of two steps that end at 101 s and 102 s; the clock of its node is ahead by `skew` µs."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 71, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_sort_index", "pid": 71, "tid": 0, "args": {"sort_index": 5}},
        {"ph": "M", "name": "thread_name", "pid": 71, "tid": 71, "args": {"name": "thread 71 (python)"}},
        {"ph": "M", "name": "thread_name", "pid": 71, "tid": 71, "args": {"name": "thread 71 (python)"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
        {"ph": "X", "name": "aten::mm", "pid": 71, "tid": 71, "ts": 100 * SECOND + 250 + skew - base, "dur": 10.0},
        {"ph": "X", "name": "nccl:all_reduce", "pid": 0, "tid": 7, "ts": 100 * SECOND + 500 + skew - base, "dur": 5.0},
        {"ph": "s", "name": "ac2g", "id": 3, "pid": 71, "tid": 71, "ts": 100 * SECOND + 251 + skew - base},
        {"ph": "f", "name": "ac2g", "id": 3, "pid": 0, "tid": 7, "ts": 100 * SECOND + 501 + skew - base},
    ]
    ends = [(10, (101 * SECOND + skew) * 1000), (11, (102 * SECOND + skew + late) * 1000)]
    metadata = {"rank": rank, "synchronous": True, "ends": ends, **more}
    return RankTrace(
        rank, rank // 2, node, {"traceEvents": events, "baseTimeNanoseconds": base * 1000, "meshwright": metadata}
    )


def named(merged: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for event in merged["traceEvents"] if event["name"] == name]


def at(merged: dict[str, Any], name: str) -> list[float]:
    return [event["ts"] for event in named(merged, name)]


def test_each_rank_is_a_process_in_order() -> None:
    merged = merge([trace(3), trace(0)])
    assert (merged["meshwright"]["ranks"], merged["meshwright"]["steps"]) == ([0, 3], [10, 11])
    assert {event["pid"] for event in merged["traceEvents"]} == {0, 3}
    names = [event["args"]["name"] for event in named(merged, "process_name")]
    assert names == ["rank 0 (worker 0 on n0)", "rank 3 (worker 1 on n0)"]
    assert [event["args"]["sort_index"] for event in named(merged, "process_sort_index")] == [0, 3]
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in named(merged, "thread_name")}
    assert sorted(threads.values()) == ["stream 7", "stream 7", "thread 71 (python)", "thread 71 (python)"]
    assert len(named(merged, "thread_name")) == 4, "each thread is named once"
    for event in named(merged, "nccl:all_reduce"):
        assert threads[event["pid"], event["tid"]] == "stream 7"
    assert {event["id"] for event in merged["traceEvents"] if "id" in event} == {"0:3", "3:3"}


def test_traces_with_other_bases_are_on_one_clock() -> None:
    merged = merge([trace(0, base=100 * SECOND), trace(1, base=50 * SECOND)])
    assert at(merged, "aten::mm") == [0.0, 0.0]
    assert at(merged, "nccl:all_reduce") == [250.0, 250.0]
    assert at(merged, "end of step 10") == pytest.approx([SECOND - 250] * 2)


@pytest.mark.parametrize("skew", [-3 * SECOND, 40_000.0])
def test_the_clock_of_another_node_is_aligned_by_the_ends_of_steps(skew: float) -> None:
    traces = [trace(0), trace(1), trace(2, "n1", skew=skew), trace(3, "n1", skew=skew)]
    assert clock_offsets(traces) == pytest.approx({"n0": 0.0, "n1": skew})
    merged = merge(traces)
    assert at(merged, "aten::mm") == pytest.approx([0.0] * 4)
    assert merged["meshwright"]["clockOffsets"] == {"n1": round(skew)}


def test_differences_that_cannot_be_measured_are_left_alone() -> None:
    same = {"n0": 0.0, "n1": 0.0}
    assert clock_offsets([trace(0), trace(1, "n1", skew=900.0)]) == same
    assert clock_offsets([trace(0), trace(1, "n1", skew=8_000.0, late=30_000.0)]) == same, "it varies by more"
    assert clock_offsets([trace(0), RankTrace(1, 1, "n1", {"traceEvents": []})]) == same
    apart = [trace(0, synchronous=False), trace(1, "n1", skew=SECOND, synchronous=False)]
    assert clock_offsets(apart) == same, "islands end steps at times of their own"
    assert merge([])["traceEvents"] == []


def test_merging_changes_no_trace() -> None:
    one = trace(0)
    merge([one, trace(1)])
    assert one.trace["traceEvents"][5]["ts"] == 250


def test_a_profile_is_written_as_its_file_is_named(tmp_path) -> None:
    profile = Profile("lm", range(10, 12), [trace(1), trace(0)])
    for name in ("a.json", "a.json.gz"):
        profile.write(tmp_path / name)
    plain = json.loads((tmp_path / "a.json").read_bytes())
    assert plain == json.loads(gzip.decompress((tmp_path / "a.json.gz").read_bytes()))
    assert plain == profile.merged()
