"""A preemptible job with real ranks saves and stops for a job of higher priority, and later repeats no step."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from meshwright.api.conditions import PLACED, find
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_local.cluster import LEAF_LABEL
from meshwright_local.kube.resources import EVENTS
from tests.e2e.local_stack import NAMESPACE, Stage, tiny

RACK = {LEAF_LABEL: "rack1"}
"""Two nodes: one job of two workers."""


def job(name: str, steps: int, **fields: Any) -> list[dict[str, Any]]:
    """A job that needs both nodes."""
    return tiny(name, workers={"nodeSelector": RACK}, training={"steps": steps}, **fields)


def trains(status: ParallelTrainingJobStatus) -> bool:
    return status.ready_ranks == "4/4"


@pytest.mark.long
async def test_a_preemptible_job_saves_and_stops_for_another_and_repeats_no_step(stage: Stage) -> None:
    steps = 600
    # No periodic checkpoint: only the one before the stop can be the one that it resumes from.
    rare = {"claimName": "patient", "everySteps": 100_000}
    await stage.apply(job("patient", steps, preemptible=True, checkpoint=rare))
    await stage.until("patient", trains, "4/4 ranks")
    reached = await stage.trained("patient", 100)
    await stage.apply(job("urgent", 100_000, priority=10))

    with_pods = await stage.status("patient")
    while await stage.pods("patient"):
        with_pods = await stage.status("patient")
        await asyncio.sleep(0.05)
    assert with_pods.checkpoint is not None, "status has the checkpoint before the pods go"
    stopped = await stage.until("patient", lambda s: find(s.conditions, PLACED) is not None, "stopped")
    placed = find(stopped.conditions, PLACED)
    assert placed is not None
    assert (placed.status, placed.reason) == ("False", "Preempted")
    assert stopped.checkpoint is not None
    assert stopped.step is not None
    assert stopped.checkpoint.step >= max(reached, stopped.step)
    assert with_pods.checkpoint.step == stopped.checkpoint.step
    await stage.until("urgent", trains, "4/4 ranks")

    await stage.delete("urgent")
    await stage.complete("patient", 300)
    status = await stage.status("patient")
    saved = await stage.saved("patient")
    assert (saved["step"], saved["samples"]) == (steps, steps * 8)
    assert [(entry.cause, entry.count) for entry in status.restarts] == [("JobPreempted", 1)]
    assert status.goodput is not None
    booked = {entry.cause: entry.milliseconds for entry in status.goodput.booked}
    assert "RedoneSteps" not in booked
    assert booked["Queued"] > 0
    events = [e for e in (await stage.client.list(EVENTS, NAMESPACE)).items if e["reason"] == "Preempted"]
    (message,) = {e["message"] for e in events}
    assert "job patient" in message
    assert "default/urgent" in message
    await stage.delete("patient")
