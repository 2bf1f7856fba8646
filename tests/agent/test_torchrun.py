"""The environment of a command's ranks is that of torchrun in the same world."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.api import labels
from meshwright.protocol.messages import MeshRequest
from meshwright_local.nodeagent.network.ports import free_port
from meshwright_worker.agent.launcher import TORCHRUN
from meshwright_worker.agent.rank_environment import rank_environment
from tests.agent.support import mesh
from tests.agent.test_parts import settings
from tests.runs import command_run

DUMP = """
import json, os, sys
names = {name: value for name, value in os.environ.items() if name not in json.loads(sys.argv[2])}
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump(names, file)
"""
NOT_OURS = {
    "OMP_NUM_THREADS": "the agent sets it for every process of the pod",
    "TORCHELASTIC_ERROR_FILE": "the launcher sets it: each process has another",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "a setting of torchrun's own agent",
}
DIFFERENT = {
    "MASTER_ADDR": "the pod of rank 0",
    "MASTER_PORT": "a free port of that pod",
    "ROLE_NAME": "",
    "TORCHELASTIC_USE_AGENT_STORE": "rank 0 hosts the store here",
}
ADDED = {"NODE_RANK", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
"""What we set in addition, apart from our own variables."""


def test_a_framework_that_numbers_stages_first_gets_ranks_with_the_coordinates_of_the_mesh() -> None:
    degrees = {"tensor": 2, "pipeline": 2, "data_parallel": 2, "stages_outermost": True}
    run = command_run(["x"]).model_copy(update=degrees)
    hellos = [
        MeshRequest(worker=worker, incarnation=0, pod_uid="uid", address=f"10.0.0.{worker}", store_port=21000)
        for worker in range(2)
    ]
    document = mesh(1, run, hellos, 4)
    found = [rank_environment(document, document.members[rank // 4], rank, settings()) for rank in range(8)]
    assert [int(one["RANK"]) for one in found] == [0, 1, 4, 5, 2, 3, 6, 7]
    for one in found:
        assert one["ROLE_RANK"] == one["RANK"]
        stage, replica = divmod(int(one["RANK"]) // 2, 2)
        assert (one[labels.ENV_PIPELINE_RANK], one[labels.ENV_DATA_RANK]) == (str(stage), str(replica))
    assert [one["LOCAL_RANK"] for one in found] == [*"01230123"]


@pytest.mark.long
def test_ranks_have_the_variables_that_torchrun_sets(tmp_path: Path) -> None:
    nodes, each, restarts, run_id = 2, 2, 3, settings().uid
    script = tmp_path / "dump.py"
    script.write_text(DUMP)
    before = json.dumps(sorted({*os.environ, "LC_CTYPE", "PWD", "SHLVL", "_", "LINES", "COLUMNS"}))
    port = free_port()
    launchers = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={each}"),
                *(f"--node-rank={node}", f"--max-restarts={restarts}", f"--rdzv-id={run_id}", "--rdzv-backend=static"),
                *("--master-addr=127.0.0.1", f"--master-port={port}", str(script), str(tmp_path), before),
            ]
        )
        for node in range(nodes)
    ]
    assert [launcher.wait() for launcher in launchers] == [0] * nodes
    hellos = [
        MeshRequest(worker=worker, incarnation=0, pod_uid="uid", address=f"10.0.0.{worker}", store_port=21000)
        for worker in range(nodes)
    ]
    document = mesh(1, command_run(["x"], nodes * each), hellos, each)
    document = document.model_copy(update={"max_restarts": restarts})
    for rank in range(nodes * each):
        theirs = json.loads((tmp_path / str(rank)).read_text())
        ours = {**TORCHRUN, **rank_environment(document, document.members[rank // each], rank, settings())}
        missing = set(theirs) - set(ours) - set(NOT_OURS)
        assert not missing, f"torchrun sets {missing} too"
        for name in set(theirs) - set(NOT_OURS) - set(DIFFERENT):
            assert ours[name] == theirs[name], name
        own = {name for name in set(ours) - set(theirs) if not name.startswith("MESHWRIGHT_")}
        assert own == ADDED
    assert labels.ENV_GENERATION in ours
