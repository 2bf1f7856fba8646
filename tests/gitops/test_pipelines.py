"""Steps of pipelines: Argo Workflows and Tekton wait while a job may go on, and succeed and fail with it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from meshwright.crd.definition import custom_resource_definition
from meshwright.crd.manifest_check import check_manifest
from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.kubeconfig import write_kubeconfig
from meshwright_local.kube.resources import CRDS, JOBS
from meshwright_local.providers.embedded import EmbeddedProvider
from tests.conflicts import ROOT
from tests.gitops.stages import Stage, stages
from tests.patience import patient

Start = Callable[[Path, str, Mapping[str, Any]], "subprocess.Popen[str]"]
"""Starts a step with its directory, its time limit and its job."""
PIPELINES = ROOT / "examples" / "pipelines"


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((PIPELINES / name).read_text(encoding="utf-8")))


def template(name: str) -> Any:
    """A template of the workflow."""
    workflow = documents("argo-workflows.yaml")[0]
    return next(item for item in workflow["spec"]["templates"] if item["name"] == name)


@pytest.fixture(scope="module")
def life() -> list[Stage]:
    return asyncio.run(stages())


def holds(condition: str, obj: Mapping[str, Any]) -> bool:
    """One condition of a resource template: a label selector whose key is a path into the object."""
    path, equals, wanted = condition.partition(" == ")
    assert equals, condition
    assert not set(path) - set("abcdefghijklmnopqrstuvwxyz0123456789."), "a key of a label selector"
    value: Any = obj
    for part in path.split("."):
        if isinstance(value, list):
            value = value[int(part)] if int(part) < len(value) else None
        else:
            value = (value or {}).get(part)
    return value is not None and str(value) == wanted


def test_a_resource_step_succeeds_and_fails_with_the_job(life: list[Stage]) -> None:
    resource = template("train-resource")["resource"]
    for stage in life:
        assert holds(resource["successCondition"], stage.job) == (stage.ended is True), stage.name
        assert holds(resource["failureCondition"], stage.job) == (stage.ended is False), stage.name
    assert {stage.ended for stage in life} == {None, True, False}


def test_conditions_have_the_same_order_in_every_stage(life: list[Stage]) -> None:
    """The paths of the conditions count on it."""
    first = ["Ready", "Reconciling", "Stalled", "Placed", "Complete", "Failed", "Suspended"]
    for stage in life:
        kinds = [condition["type"] for condition in stage.job["status"].get("conditions", ())]
        assert kinds[: len(first)] in (first, []), stage.name


def test_the_job_of_the_workflow_is_valid_and_its_account_may_submit_it() -> None:
    workflow, role = documents("argo-workflows.yaml")
    (parameter,) = workflow["spec"]["arguments"]["parameters"]
    assert check_manifest(yaml.safe_load(parameter["value"])) == []
    assert workflow["spec"]["entrypoint"] in {item["name"] for item in workflow["spec"]["templates"]}
    assert workflow["spec"]["serviceAccountName"] == role["metadata"]["name"]
    assert {"get", "watch", "create", "patch"} <= set(role["rules"][0]["verbs"])
    container = template("train")["container"]
    assert [*container["command"], container["args"][0]] == ["meshwright", "submit"]
    assert template("train")["retryStrategy"]["retryPolicy"] == "OnError", "a job that failed is not submitted again"


@pytest_asyncio.fixture
async def client(tmp_path: Path) -> AsyncIterator[ApiClient]:
    """An API server that knows jobs, and no operator."""
    provider = EmbeddedProvider(tmp_path / "server", in_memory=True)
    connection = (await provider.start()).connection
    write_kubeconfig(tmp_path / "kubeconfig", connection)
    async with ApiClient(connection) as found:
        await found.wait_ready()
        await found.create(CRDS, dict(custom_resource_definition()))
        yield found
    await provider.stop()


def start(directory: Path, timeout: str, job: Mapping[str, Any]) -> subprocess.Popen[str]:
    """The task's step, as Tekton runs it: its script as a file, its parameters as variables."""
    (step,) = documents("tekton.yaml")[0]["spec"]["steps"]
    script = directory / "script"
    script.write_text(step["script"])
    script.chmod(0o700)
    (directory / "job.yaml").write_text(yaml.safe_dump(job))
    values = {"MANIFEST": "job.yaml", "TIMEOUT": timeout, "RESULT": str(directory / "result")}
    assert values.keys() == {item["name"] for item in step["env"]}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **values, "PATH": path, "KUBECONFIG": str(directory / "kubeconfig")}
    return subprocess.Popen([str(script)], cwd=directory, env=environment, stderr=subprocess.PIPE, text=True)


def start_argo(directory: Path, timeout: str, job: Mapping[str, Any]) -> subprocess.Popen[str]:
    """The container of the workflow's step, with its artifact at another path and its own time limit."""
    step = template("train")
    (artifact,) = step["inputs"]["artifacts"]
    manifest = directory / "job.yaml"
    manifest.write_text(yaml.safe_dump(job))
    command = [*step["container"]["command"], *step["container"]["args"]]
    assert command.count(artifact["path"]) == 1
    replaced = {artifact["path"]: str(manifest), command[command.index("--timeout") + 1]: timeout}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "KUBECONFIG": str(directory / "kubeconfig")}
    words = [replaced.get(word, word) for word in command]
    return subprocess.Popen(words, cwd=directory, env=environment, stderr=subprocess.PIPE, text=True)


OFTEN = {("complete", "tekton"), ("failed", "argo")}
"""What is run by default. `tests/cli/test_client.py` has every exit code, that of a time limit too."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "code", "runs"),
    [
        pytest.param(stage, code, runs, marks=() if (stage, name) in OFTEN else pytest.mark.long, id=f"{stage}-{name}")
        for stage, code in (("complete", 0), ("failed", 1), ("trains", 5))
        for name, runs in (("tekton", start), ("argo", start_argo))
    ],
)
async def test_a_step_ends_with_the_job(
    client: ApiClient, tmp_path: Path, life: list[Stage], stage: str, code: int, runs: Start
) -> None:
    reached = next(item.job for item in life if item.name == stage)
    manifest = {key: reached[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": {"name": "step"}}
    status = {**reached["status"], "checkpoint": {"step": 9, "time": "2026-01-01T00:00:00Z", "path": "/c/step-9"}}
    process = runs(tmp_path, "3s" if code == 5 else "10m", manifest)
    async with asyncio.timeout(patient(120)):
        while (job := await client.find(JOBS, "step", "default")) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    body = {"status": {**status, "observedGeneration": job["metadata"]["generation"]}}
    for condition in body["status"].get("conditions", ()):
        condition["observedGeneration"] = job["metadata"]["generation"]
    await client.patch(JOBS, "step", body, "default", subresource="status")
    _, errors = await asyncio.to_thread(process.communicate, timeout=patient(300))
    assert process.returncode == code, errors
    result = tmp_path / "result"
    tekton = code == 0 and runs is start
    assert (result.read_text() if result.exists() else "") == ("/c/step-9" if tekton else "")
