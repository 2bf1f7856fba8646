"""Users' commands that stop working: each ends in the condition Failed, which says what happened, within its bound."""

from __future__ import annotations

import re

import pytest

from meshwright.api import conditions
from meshwright_local.kube.resources import JOBS
from tests.e2e.local_stack import NAMESPACE, eventually, tiny

pytestmark = pytest.mark.long

HANGS = """
import json, os, time
report = open(os.environ["MESHWRIGHT_REPORT_FILE"], "a", buffering=1)
for step in range(1, 6):
    report.write(json.dumps({"step": step, "loss": 1.0}) + "\\n")
    time.sleep(0.1)
while os.environ["RANK"] == "1":
    time.sleep(1)
for step in range(6, 9):
    report.write(json.dumps({"step": step, "loss": 1.0}) + "\\n")
    time.sleep(0.1)
time.sleep(600)
"""
STOPS_PRINTING = """
import time
for step in range(1, 6):
    print("step", step, "loss", 1.0, flush=True)
    time.sleep(0.1)
time.sleep(600)
"""
FILLS_THE_DISK = """
import os, time
if os.environ["RANK"] == "1":
    with open("/dev/full", "w") as file:
        file.write("checkpoint" * 100000)
time.sleep(600)
"""
LEAVES_EARLY = """
import os, time
print("started", flush=True)
if os.environ["RANK"] == "1":
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("name", "script", "message"),
    [
        ("hangs", HANGS, r"Rank 1 \(worker 1 on \S+, pid \d+\) has made no progress for \d+ s. Last completed step: 5"),
        ("silent", STOPS_PRINTING, r"No rank has written output for \d+ s"),
        ("disk", FILLS_THE_DISK, r"Worker 1: rank 1 exited with code 1: OSError: \[Errno 28\] No space left on device"),
        (
            "leaves",
            LEAVES_EARLY,
            r"Rank 1 \(worker 1 on \S+\) has not written output for \d+ s. Rank 0 has exited with code 0 already",
        ),
    ],
)
async def test_a_command_that_stops_working_fails_with_the_reason(stage, name, script, message):
    changes = {
        "model": None, "data": None, "training": None, "checkpoint": None,
        "parallelism": {"tensor": 1, "pipeline": 1, "microBatches": None},
        "runtime": {"command": ["python", "-c", script]},
        "workers": {"gpusPerWorker": 1, "terminationGracePeriodSeconds": 2},
        "recovery": {"hangTimeoutSeconds": 6, "maxRestarts": 0},
    }  # fmt: skip
    await stage.apply(tiny(name, **changes))

    async def failed() -> str:
        status = await stage.status(name)
        condition = conditions.find(status.conditions, conditions.FAILED)
        return condition.message if condition is not None and condition.status == "True" else ""

    found = await eventually(f"{name} has failed", failed, 120)
    assert re.search(message, found), found
    assert await stage.client.find(JOBS, name, NAMESPACE) is not None
    await stage.delete(name)
