"""Users' commands that stop working: each ends in the condition Failed, which says what happened, within its bound."""

from __future__ import annotations

import asyncio
import re
import subprocess
from pathlib import Path

import pytest

from meshwright.api import conditions
from meshwright.api.objects import KubeObject
from meshwright_local.kube.resources import JOBS
from meshwright_local.nodeagent.sandbox import PodSpecError
from meshwright_local.nodeagent.volumes import claim_directory
from tests.e2e.local_stack import NAMESPACE, Stage, eventually, tiny

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
FILLS_ITS_VOLUME = """
import os, time
directory = os.environ["MESHWRIGHT_CHECKPOINT_DIR"]
os.makedirs(directory, exist_ok=True)
if os.environ["RANK"] == "1":
    for step in range(1000):
        with open(f"{directory}/step-{step}", "wb") as file:
            file.write(bytes(1 << 20))
time.sleep(600)
"""
LEAVES_EARLY = """
import os, time
print("started", flush=True)
if os.environ["RANK"] == "1":
    time.sleep(600)
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def changes_for(script: str) -> KubeObject:
    """The spec of two pods that run the script, and that are not restarted."""
    return {
        "model": None, "data": None, "training": None,
        "parallelism": {"tensor": 1, "pipeline": 1, "microBatches": None},
        "runtime": {"command": ["python", "-c", script]},
        "workers": {"gpusPerWorker": 1, "terminationGracePeriodSeconds": 2},
        "recovery": {"hangTimeoutSeconds": 6, "maxRestarts": 0},
    }  # fmt: skip


async def failure_of(stage: Stage, name: str) -> str:
    """The message of the condition Failed, once the job has failed."""

    async def failed() -> str:
        status = await stage.status(name)
        condition = conditions.find(status.conditions, conditions.FAILED)
        return condition.message if condition is not None and condition.status == "True" else ""

    return await eventually(f"{name} has failed", failed, 120)


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
    await stage.apply(tiny(name, **changes_for(script), checkpoint=None))
    found = await failure_of(stage, name)
    assert re.search(message, found), found
    assert await stage.client.find(JOBS, name, NAMESPACE) is not None
    await stage.delete(name)


async def test_a_command_that_fills_its_volume_fails_with_the_file(stage):
    """The volume of the checkpoints is a file system of its own with 8 MiB."""
    name = "full"
    claim, job = tiny(name, **changes_for(FILLS_ITS_VOLUME), checkpoint={"everySteps": None, "keep": None})
    await stage.apply([claim])

    async def directory() -> Path | None:
        try:
            return await claim_directory(stage.client, NAMESPACE, name)
        except PodSpecError:
            return None

    volume = await eventually("the claim is bound", directory)
    mounted = await asyncio.to_thread(run, "mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(volume))
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system: {mounted.stderr.strip()}")
    try:
        await stage.apply([job])
        found = await failure_of(stage, name)
        assert re.search(
            r"Worker 1: rank 1 exited with code 1: OSError: \[Errno 28\] No space left on device", found
        ), found
        assert len(list(volume.rglob("step-*"))) > 1, "the volume took files until it was full"
        await stage.delete(name)
    finally:
        await asyncio.to_thread(run, "umount", "-l", str(volume))
