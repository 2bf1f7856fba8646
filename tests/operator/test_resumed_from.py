"""The checkpoint of another run that a job began from: what status, an event and the ledger make of the report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.api.goodput import GoodputStatus
from meshwright.api.status import ResumedFromStatus
from meshwright.protocol.messages import AgentState, Progress, ResumedFrom
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.goodput import update_goodput
from meshwright_operator.decide.observed import Observed
from tests.operator.builders import agents, ago, observed, report, running_status, spec

SOURCE = ResumedFrom(step=400, path="/meshwright/checkpoints/base-0a1b2c3d/step-00000400")
KNOWN = ResumedFromStatus(step=400, path=SOURCE.path)
CHECKPOINT = {"claimName": "c", "resumeFrom": "base-0a1b2c3d"}
REASON = "ResumedFromOtherRun"


def trains(source: ResumedFrom | None, checkpoint: dict[str, Any], step: int = 412, **status: Any) -> Observed:
    progress = Progress(step=step, loss=1.0, step_seconds=0.5)
    first = report(0, AgentState.RUNNING, progress=progress, resumed_from=source)
    others = [report(worker, AgentState.RUNNING) for worker in (1, 2, 3)]
    seen = observed(status=running_status(**status), received=agents([first, *others]))
    return replace(seen, spec=spec(checkpoint=checkpoint))


def test_status_and_one_event_say_what_the_job_began_from() -> None:
    decision = decide(trains(SOURCE, CHECKPOINT))
    assert decision.status.resumed_from == KNOWN
    (event,) = (event for event in decision.events if event.reason == REASON)
    assert event.message == f"Resumed from {SOURCE.path} step 400"
    again = decide(trains(SOURCE, CHECKPOINT, resumed_from=KNOWN))
    assert again.status.resumed_from == KNOWN
    assert REASON not in [event.reason for event in again.events]
    restarted = decide(trains(None, CHECKPOINT, resumed_from=KNOWN))
    assert restarted.status.resumed_from == KNOWN, "it is still where the job comes from"


@pytest.mark.parametrize(
    ("source", "checkpoint"),
    [
        (SOURCE, {"claimName": "c"}),
        (ResumedFrom(step=-1, path="/c"), CHECKPOINT),
        (ResumedFrom(step=1, path="/" * 1025), CHECKPOINT),
        (None, CHECKPOINT),
    ],
    ids=["field not set", "step out of range", "path too long", "own checkpoint"],
)
def test_nothing_else_a_pod_may_report_reaches_the_status(
    source: ResumedFrom | None, checkpoint: dict[str, Any]
) -> None:
    decision = decide(trains(source, checkpoint))
    assert decision.status.resumed_from is None
    assert REASON not in [event.reason for event in decision.events]


@pytest.mark.parametrize(("source", "known"), [(SOURCE, None), (None, KNOWN)], ids=["reported now", "in status"])
def test_the_steps_of_the_other_run_are_not_booked(source: ResumedFrom | None, known: ResumedFromStatus | None) -> None:
    """Of 20 s, the 12 steps of half a second since step 400 took 6 s."""
    ledger = GoodputStatus(cause="Starting", since=ago(20))
    decision = decide(trains(source, CHECKPOINT, goodput=ledger, ready_ranks="8/8", resumed_from=known))
    update_goodput(decision, None)
    assert decision.status.goodput is not None
    booked = {entry.cause: entry.milliseconds / 1000 for entry in decision.status.goodput.booked if entry.milliseconds}
    assert booked == {"Training": 6, "Starting": 14}
