"""`kubectl wait` agrees with kstatus about a job at every stage of its life: with kubectl, on the embedded server.

They differ only for a job that is being deleted: `kubectl wait` looks at conditions alone, which are the last ones, and
kstatus at `deletionTimestamp` first.
"""

from __future__ import annotations

import asyncio
import copy
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from meshwright.crd.definition import custom_resource_definition
from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.kubeconfig import write_kubeconfig
from meshwright_local.kube.resources import CRDS, JOBS
from meshwright_local.providers.embedded import EmbeddedProvider
from tests.gitops.stages import Stage, stages
from tests.operator.kstatus import CURRENT, FAILED, TERMINATING, kstatus
from tests.patience import patient

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")]
SPEC = {
    "model": {"preset": "llama3-8b"},
    "data": {"source": "PythonStdlib"},
    "training": {"steps": 10, "globalBatchSize": 8, "sequenceLength": 128},
    "workers": {"image": "worker", "gpusPerWorker": 8},
}


def stored_status(job: Mapping[str, Any]) -> dict[str, Any]:
    """The status for an object that the server has just created, of generation 1, as many edits behind as it was."""
    behind = job["metadata"]["generation"] - 1
    status = copy.deepcopy(dict(job["status"]))
    status["observedGeneration"] = max(-1, status["observedGeneration"] - behind)
    for condition in status.get("conditions", ()):
        condition["observedGeneration"] = max(0, condition["observedGeneration"] - behind)
    return status


async def met(kubeconfig: Path, condition: str) -> set[str]:
    """The jobs for which `kubectl wait` returns at once."""
    words = ("wait", "ptj", "--all", f"--for=condition={condition}", "--timeout=0s")
    process = await asyncio.create_subprocess_exec(
        "kubectl", "--kubeconfig", str(kubeconfig), *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), patient(120))
    return set(re.findall(r"/(\S+) condition met", out.decode()))


async def test_kubectl_wait_agrees_with_kstatus(tmp_path: Path) -> None:
    life = {re.sub(r"\W+", "-", stage.name): stage for stage in await stages()}
    leaving = {name for name, stage in life.items() if kstatus(stage.job) == TERMINATING}
    assert leaving == {"being-deleted"}
    provider = EmbeddedProvider(tmp_path / "server", in_memory=True)
    connection = (await provider.start()).connection
    write_kubeconfig(tmp_path / "kubeconfig", connection)
    async with ApiClient(connection) as client:
        await client.wait_ready()
        await client.create(CRDS, dict(custom_resource_definition()))
        for name, stage in life.items():
            kept = {"finalizers": ["example.com/kept"]} if name in leaving else {}
            await client.create(JOBS, {"metadata": {"name": name, **kept}, "spec": SPEC}, "default")
            await client.patch(
                JOBS, name, {"status": stored_status(stage.job)}, "default", subresource="status"
            )  # fmt: skip
        for name in leaving:
            await client.delete(JOBS, name, "default")
        kubeconfig = tmp_path / "kubeconfig"
        found = await asyncio.gather(*(met(kubeconfig, condition) for condition in ("Complete", "Stalled", "Ready")))
        complete, stalled, ready = found
        assert complete == {name for name, stage in life.items() if stage.ended is True}
        assert stalled == named(life, FAILED)
        last = {name for name in leaving if _is_ready(life[name].job)}
        assert ready == named(life, CURRENT) | last
    await provider.stop()


def _is_ready(job: Mapping[str, Any]) -> bool:
    """What the last conditions of a job say."""
    return any((one["type"], one["status"]) == ("Ready", "True") for one in job["status"]["conditions"])


def named(life: Mapping[str, Stage], status: str) -> set[str]:
    """The stages of which kstatus says this."""
    return {name for name, stage in life.items() if kstatus(stage.job) == status}
