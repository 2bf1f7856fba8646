"""Text of users' pods in conditions, events and log lines: no control characters, and one line each."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_operator.decide.conditions import JobState, set_job_state
from meshwright_operator.kube.job_event import JobEvent
from meshwright_operator.kube.recorder import EventRecorder
from meshwright_operator.logging_config import TextFormatter
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.timestamps import utc_now

HOSTILE = "rank 0: \x1b]0;root\x07\x1b[2J\u202eboom\nsecond line"
SHOWN = "rank 0: ?]0;root??[2J?boom\nsecond line"


def test_a_condition_has_no_control_characters() -> None:
    status = ParallelTrainingJobStatus()
    set_job_state(status, JobState("Failed", HOSTILE, stalled=True), 1, utc_now())
    assert {one.message for one in status.conditions if one.type in ("Ready", "Stalled")} == {SHOWN}


async def test_an_event_has_no_control_characters(caplog: pytest.LogCaptureFixture) -> None:
    client: Any = None
    recorder = EventRecorder(client, "operator", OperatorMetrics())
    with caplog.at_level(logging.INFO):
        recorder.post({"metadata": {"name": "a", "uid": "u"}}, JobEvent("RankFailure", HOSTILE))
    queued = recorder._backlog.take()
    assert queued is not None
    assert queued.event.message == SHOWN
    assert [record.getMessage() for record in caplog.records] == [SHOWN]


def test_a_record_is_one_line_whatever_it_repeats() -> None:
    record = logging.makeLogRecord(
        {"msg": HOSTILE, "levelno": 20, "levelname": "INFO", "error": "\x1b[2J", "job": "a/b"}
    )
    text = TextFormatter().format(record)
    assert text.isprintable()
    assert "\\x1b]0;root" in text
    assert "error='\\x1b[2J'" in text
    assert "job=a/b" in text
