"""Real agents whose command reports checkpoints: only those that are verified are reported to the coordinator."""

from __future__ import annotations

import sys
from pathlib import Path

from meshwright.api.checkpoint import CheckpointSpec
from meshwright.protocol.messages import AgentState, CheckpointCommit
from tests.agent.support import Coordinator, mesh, until
from tests.agent.test_agent_commands import StartAgent, python, reported
from tests.runs import command_run

SAVES = """
import json, os, time
print("resumes from", os.environ["MESHWRIGHT_RESUME_PATH"], "at", os.environ["MESHWRIGHT_RESUME_STEP"], flush=True)
directory = DIRECTORY
report = open(os.environ["MESHWRIGHT_REPORT_FILE"], "a", buffering=1)
for step, text in ((1, "complete"), (2, "half")):
    path = f"{directory}/step-{step}"
    with open(path, "w") as file:
        file.write(text)
    report.write(json.dumps({"step": step, "loss": 2.5, "checkpoint": path}) + "\\n")
    while step == 1 and not os.path.exists(f"{directory}/seen"):
        time.sleep(0.05)
"""
VERIFY = "import os, sys; sys.exit(open(os.environ['MESHWRIGHT_CHECKPOINT_PATH']).read() != 'complete')"


async def test_a_checkpoint_counts_once_it_is_verified(
    coordinator: Coordinator, start_agent: StartAgent, tmp_path: Path
) -> None:
    agent = start_agent()
    hellos = await coordinator.gang(1, above=0)
    run = command_run(python(SAVES.replace("DIRECTORY", repr(str(tmp_path)))))
    run.checkpoint = CheckpointSpec(claim_name="c", verify=[sys.executable, "-c", VERIFY])
    document = mesh(1, run, hellos, 1)
    document.resume = CheckpointCommit(step=7, time="2026-01-01T00:00:00Z", path="/c/step-7")
    coordinator.announce(document)

    def saved() -> bool:
        report = coordinator.last(0)
        return report is not None and report.checkpoint is not None

    await until(saved, 30, lambda: agent.log)
    (tmp_path / "seen").touch()
    await reported(coordinator, AgentState.COMPLETE, 1)
    report = coordinator.last(0)
    assert report is not None
    assert report.checkpoint is not None
    assert (report.checkpoint.step, report.checkpoint.path) == (1, str(tmp_path / "step-1"))
    assert report.progress is not None
    assert report.progress.step == 2
    assert "the checkpoint of step 2 at" in agent.log
    assert "resumes from /c/step-7 at 7" in agent.log


RELATIVE = """
import json, os
print("resumes from", os.environ["MESHWRIGHT_RESUME_PATH"], flush=True)
report = open(os.environ["MESHWRIGHT_REPORT_FILE"], "a", buffering=1)
report.write(json.dumps({"step": 1, "checkpoint": "step-1"}) + "\\n")
"""


async def test_a_relative_path_is_below_the_directory_of_the_checkpoints(
    coordinator: Coordinator, start_agent: StartAgent
) -> None:
    """The next start got the path as it was reported, which led nowhere from the directory in which ranks start."""
    agent = start_agent(MESHWRIGHT_CHECKPOINT_DIR="/c/job-1")
    hellos = await coordinator.gang(1, above=0)
    run = command_run(python(RELATIVE))
    document = mesh(1, run, hellos, 1)
    document.resume = CheckpointCommit(step=7, time="2026-01-01T00:00:00Z", path="step-7")
    coordinator.announce(document)
    await reported(coordinator, AgentState.COMPLETE, 1)
    report = coordinator.last(0)
    assert report is not None
    assert report.checkpoint is not None
    assert report.checkpoint.path == "/c/job-1/step-1"
    assert "resumes from /c/job-1/step-7" in agent.log


RETAINS = """
import json, os, time
directory = os.environ["MESHWRIGHT_CHECKPOINT_DIR"]  # which the agent has created
report = open(os.environ["MESHWRIGHT_REPORT_FILE"], "a", buffering=1)
for step in (1, 2):
    open(f"{directory}/step-{step}", "w").close()
    report.write(json.dumps({"step": step, "checkpoint": f"step-{step}"}) + "\\n")
    while not os.path.exists(f"{directory}/go-{step}"):
        time.sleep(0.05)
"""


async def test_a_checkpoint_is_deleted_once_the_coordinator_knows_a_newer_one(
    coordinator: Coordinator, start_agent: StartAgent, tmp_path: Path
) -> None:
    saved = tmp_path / "checkpoints"
    agent = start_agent(MESHWRIGHT_CHECKPOINT_DIR=str(saved))
    hellos = await coordinator.gang(1, above=0)
    run = command_run(python(RETAINS))
    run.checkpoint = CheckpointSpec(claim_name="c", keep=1)
    coordinator.announce(mesh(1, run, hellos, 1))

    def known() -> bool:
        """The agent has reported it again, so it has the answer to the first such report."""
        return sum(report.checkpoint is not None for report in coordinator.reports) > 1

    await until(known, 30, lambda: agent.log)
    # The operator is away from here on: it knows step 1 only.
    coordinator.answer_all(503)
    (saved / "go-1").touch()
    await until(lambda: "checkpoint saved step=2" in agent.log, 30, lambda: agent.log)
    assert (saved / "step-1").exists(), "the next start would name it"
    coordinator.answer_all(None)
    await until(lambda: not (saved / "step-1").exists(), 30, lambda: agent.log)
    assert (saved / "step-2").exists()
    (saved / "go-2").touch()
    await reported(coordinator, AgentState.COMPLETE, 1)


async def test_a_command_starts_although_its_volume_is_not_there(
    coordinator: Coordinator, start_agent: StartAgent, tmp_path: Path
) -> None:
    agent = start_agent(MESHWRIGHT_CHECKPOINT_DIR=str(tmp_path / "volume" / "job-1"))
    hellos = await coordinator.gang(1, above=0)
    coordinator.announce(mesh(1, command_run(python("print('begins')")), hellos, 1))
    await reported(coordinator, AgentState.COMPLETE, 1)
    assert "begins" in agent.log
    assert "job-1 cannot be created for the checkpoints of the command" in agent.log
    assert not (tmp_path / "volume").exists(), "only a volume that is there gets a directory"
