"""A user's command that reports its progress in its file or only in its log: what the status, list and metrics say."""

from __future__ import annotations

import pytest

from tests.e2e.test_command_line import manifest, run

pytestmark = pytest.mark.long

REPORTS = """
import json, os, time
if os.environ["RANK"] != "0":
    time.sleep(600)
report = open(os.environ["MESHWRIGHT_REPORT_FILE"], "a", buffering=1)
report.write("no JSON\\n")
for step in range(1, 40):
    report.write(json.dumps({"step": step, "total_steps": 1000, "loss": 2.5, "tokens": 4096}) + "\\n")
    time.sleep(0.1)
report.write(json.dumps({"step": 40, "loss": 2.25, "checkpoint": "/c/step-40"}) + "\\n")
time.sleep(600)
"""
LOGS = """
import os, time
for step in range(1, 41):
    if os.environ["RANK"] == "0":
        print(f"epoch 0 step {step}/500 loss: {3 - step / 40:.3f}", flush=True)
    time.sleep(0.1)
time.sleep(600)
"""


def command(script, **changes):
    return {
        "model": None, "data": None, "training": None, "checkpoint": None, "parallelism": {"microBatches": None},
        "runtime": {"command": ["python", "-c", script]}, "workers": {"terminationGracePeriodSeconds": 2}, **changes,
    }  # fmt: skip


async def test_progress_is_read_from_the_file_or_from_the_log(stage, tmp_path):
    await run(stage, "submit", manifest(tmp_path / "reports.yaml", "reports", **command(REPORTS)))
    status = await stage.until("reports", lambda s: s.step == 40, "at step 40", 150)
    assert (status.total_steps, status.loss) == (1000, "2.25")
    assert status.tokens_per_second > 0
    assert status.eta_seconds > 0
    assert (status.checkpoint.step, status.checkpoint.path) == (40, "/c/step-40")
    listed = " ".join((await run(stage, "list")).out.split())
    assert "reports" in listed
    assert "40" in listed
    assert "step 40 of 1,000" in (await run(stage, "status", "reports")).out
    log = await stage.log("reports-w0-0")
    assert log.count("invalid line to its report file") == 1
    await stage.delete("reports")

    await run(stage, "submit", manifest(tmp_path / "logs.yaml", "logs", **command(LOGS)))
    status = await stage.until("logs", lambda s: s.step == 40, "at step 40", 150)
    assert (status.total_steps, status.loss, status.tokens_per_second) == (500, "2", None)
    assert status.eta_seconds > 0
    await stage.delete("logs")
