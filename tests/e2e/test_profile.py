"""`meshwright profile` on ranks that train: one trace of several ranks on one clock, without a restart."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from tests.e2e.local_stack import tiny
from tests.e2e.test_command_line import run

pytestmark = pytest.mark.long
NAME = "profiled"


def step_spans(trace):
    """(rank, step) -> when it began and ended."""
    return {
        (event["pid"], int(event["name"].removeprefix("step "))): (event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event["ph"] == "X" and re.fullmatch(r"step \d+", event["name"])
    }


async def test_steps_of_two_ranks_on_two_nodes_are_profiled_while_the_job_trains(stage, tmp_path):
    await stage.apply(tiny(NAME, training={"steps": 100000}))
    await stage.trained(NAME, 5)
    before = await stage.status(NAME)
    file = tmp_path / "trace.json.gz"
    done = await run(stage, "profile", NAME, "--ranks", "0,3", "--steps", "2", "-o", str(file))
    assert re.search(r"steps \d+ to \d+ of 2 ranks", done.out)
    trace = json.loads(gzip.decompress(file.read_bytes()))
    first, last = trace["meshwright"]["steps"]
    assert first > 5
    assert last == first + 1
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 3}
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    for rank, worker in ((0, 0), (3, 1)):
        assert re.fullmatch(rf"rank {rank} \(worker {worker} on rack0-node\d\)", names[rank])
    spans = step_spans(trace)
    assert set(spans) == {(rank, step) for rank in (0, 3) for step in (first, last)}
    for step in (first, last):
        # Both take part in the all-reduce of the step, so each begins before the other one can end.
        assert spans[0, step][0] < spans[3, step][1]
        assert spans[3, step][0] < spans[0, step][1]
    for rank in (0, 3):
        own = {event["name"] for event in trace["traceEvents"] if event["pid"] == rank}
        assert any("gloo:all_reduce" in name for name in own), own
        assert any("aten::mm" in name for name in own)

    over = await run(stage, "profile", NAME, "--steps", "2-3", code=1)
    assert re.search(r"step 2 is over: the next one is \d+", over.err)
    missing = await run(stage, "profile", NAME, "--ranks", "9", code=3)
    assert "profiled has no rank 9: it has ranks 0 to 3" in missing.err
    late = await run(stage, "profile", NAME, "--steps", "99998-99999", "--timeout", "2s", code=5)
    assert "profiled did not complete step 99999 within 2 s" in late.err
    ended = await run(stage, "profile", NAME, "--steps", "100000-100000", code=1)
    assert "100000 steps" in ended.err
    after = await stage.status(NAME)
    assert after.mesh.generation == before.mesh.generation, "no restart"
    assert after.restart_count == before.restart_count
