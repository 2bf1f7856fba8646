"""examples/torch-ddp.yaml: the text it ships is the script that is checked here, and the script keeps its promises."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import pytest
import yaml

from meshwright.api import labels
from meshwright.api.parsing import parse_spec
from meshwright.protocol.messages import AgentState
from tests.agent.support import ROOT, AgentProcess, Coordinator, mesh, until
from tests.runs import command_run

StartAgent = Callable[..., AgentProcess]
SCRIPT = ROOT / "examples" / "ddp_script.py"


def test_the_manifest_holds_the_script() -> None:
    objects = {item["kind"]: item for item in yaml.safe_load_all((ROOT / "examples" / "torch-ddp.yaml").read_text())}
    config, claim, job = objects["ConfigMap"], objects["PersistentVolumeClaim"], objects["ParallelTrainingJob"]
    assert config["data"] == {"train.py": SCRIPT.read_text()}
    spec = parse_spec(job)
    assert spec.runtime.scripts == config["metadata"]["name"]
    assert spec.runtime.command is not None
    assert spec.runtime.command[:2] == ["python", f"{labels.SCRIPTS_MOUNT}/train.py"]
    assert spec.checkpoint is not None
    assert spec.checkpoint.claim_name == claim["metadata"]["name"]
    assert (spec.replicas, spec.workers.gpus_per_worker) == (4, 2)


@pytest.mark.long
@pytest.mark.slow
async def test_a_drained_pod_stops_all_ranks_and_the_run_resumes(
    coordinator: Coordinator, start_agent: StartAgent
) -> None:
    command = [sys.executable, str(SCRIPT), "--steps", "400", "--save-every", "25"]
    stays, goes = start_agent(0, torch=True), start_agent(1, torch=True)
    coordinator.announce(mesh(1, command_run(command, 4), await coordinator.gang(2), 2))
    await until(lambda: "[rank 0] step 50/400" in stays.log, 60, lambda: stays.log)
    goes.terminate()
    assert await goes.exit_code() == 143
    await until(lambda: coordinator.states(0)[-1] is AgentState.IDLE, 10, lambda: f"{coordinator.states(0)}")
    assert AgentState.FAILED not in coordinator.states(0)
    stopped_after = int(stays.log.rpartition("step ")[2].partition("/")[0])
    assert 50 < stopped_after < 400

    replacement = start_agent(1, torch=True)
    coordinator.announce(mesh(2, command_run(command, 4), await coordinator.gang(2), 2))
    codes = await asyncio.gather(stays.exit_code(60), replacement.exit_code(60))
    assert codes == [0, 0]
    assert f"[rank 0] resumed after step {stopped_after}" in stays.log
    assert "[rank 0] step 400/400" in stays.log
