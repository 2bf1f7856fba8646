"""The commands of docs/backup.md that give a restored job its status, with kubectl and jq, on a live API server."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.live_server import job, live_server, running
from tests.docs.blocks import ROOT, blocks

JOBS = "/apis/meshwright.dev/v1alpha1/namespaces/default/paralleltrainingjobs"
PAGE = "docs/backup.md"


@pytest.mark.skipif(not (shutil.which("kubectl") and shutil.which("jq")), reason="needs kubectl and jq")
def test_a_restored_job_gets_its_status(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    shown = [block for block in blocks((ROOT / PAGE).read_text(), PAGE) if "--subresource status" in block.text]
    read, write = shown[0].text.replace("NAME", "lm").strip().splitlines()

    with live_server(tmp_path / "server", request.config.getoption("--cluster")) as server:

        def shell(command: str) -> None:
            environment = {**os.environ, "KUBECONFIG": str(server.kubeconfig)}
            done = subprocess.run(
                ["bash", "-ec", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr

        server.apply(JOBS, {**job("lm"), "status": running(step=30)})
        shell(read)
        server.call("DELETE", f"{JOBS}/lm")
        server.apply(JOBS, job("lm"))
        assert "step" not in server.call("GET", f"{JOBS}/lm").get("status", {}), "of a new object, status is dropped"
        shell(write)
        assert server.call("GET", f"{JOBS}/lm")["status"]["step"] == 30
