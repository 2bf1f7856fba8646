"""`runtime.agent: Injected`: what the pod has, what a cluster says to it, and a job for which there is no image."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.api.labels import AGENT_MOUNT
from meshwright.api.parsing import parse_spec
from meshwright.api.status import WorkerPlacement
from meshwright.planner.cluster.pod_resources import pod_request
from meshwright.profiles.profile import Profile
from meshwright_operator.decide.pod_problems import fix_for
from meshwright_operator.kube.pod_info import read_pod
from meshwright_operator.manifests.worker_pod import PodContext, worker_pod
from tests.operator.conftest import StartOperator
from tests.operator.support import JOBS, Api, condition, job, until

UID = "0f1e2d3c-0000-4000-8000-000000000000"
IMAGE = "registry.example.com/meshwright-agent:0.1.0"


def body(name: str = "train", **workers: Any) -> dict[str, Any]:
    """A job with an image that needs nothing of Meshwright."""
    found = job(name)
    found["spec"] = {
        "replicas": 8,
        "runtime": {"command": ["/trainer"], "agent": "Injected"},
        "workers": {
            "image": "scratch-trainer:1",
            "gpusPerWorker": 8,
            "resources": {"cpu": "96", "memory": "1000Gi"},
            **workers,
        },
    }
    return found


def context(namespace: str = "team", **workers: Any) -> PodContext:
    made = PodContext("train", namespace, UID, parse_spec(body(**workers)), "2-a", "https://c:9470", "token")
    return replace(made, agent_image=IMAGE)


def pod_of(made: PodContext) -> dict[str, Any]:
    return worker_pod(made, WorkerPlacement(worker=0, incarnation=0, pod="train-w0-0", node="n0", ranks="0-7"))


def test_an_init_container_copies_the_agent_and_the_worker_runs_it() -> None:
    spec = pod_of(context())["spec"]
    (init,), (worker,) = spec["initContainers"], spec["containers"]
    assert init["image"] == IMAGE
    assert worker["image"] == "scratch-trainer:1"
    assert init["command"][0] == worker["command"][0] == f"{AGENT_MOUNT}/bin/python"
    assert "-I" in worker["command"], "the image's PYTHONPATH and PYTHONHOME must not reach the agent"
    (copied,) = init["volumeMounts"]
    (used,) = (mount for mount in worker["volumeMounts"] if mount["mountPath"] == AGENT_MOUNT)
    assert used == {"name": copied["name"], "mountPath": AGENT_MOUNT, "readOnly": True}
    assert init["command"][-1] == copied["mountPath"]
    assert any(volume["name"] == copied["name"] and "emptyDir" in volume for volume in spec["volumes"])
    assert init["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.parametrize("exclusive", [False, True])
def test_the_init_container_does_not_make_the_pod_larger(exclusive: bool) -> None:
    workers = {"resources": {"cpu": "96", "memory": "1000Gi", "exclusiveCpus": exclusive}}
    pod = pod_of(context(**workers))
    spec = pod["spec"]
    alone = {name: value for name, value in spec.items() if name != "initContainers"}
    assert pod_request(pod, "nvidia.com/gpu") == pod_request({**pod, "spec": alone}, "nvidia.com/gpu")
    (init,) = spec["initContainers"]
    assert ("cpu" in init["resources"]["limits"]) is exclusive, "otherwise the pod is not of the class Guaranteed"
    assert "nvidia.com/gpu" not in init["resources"]["limits"]


def test_containers_of_a_profile_come_after_it() -> None:
    profile = Profile.model_validate({"initContainers": [{"name": "tune", "image": "tune:1"}]})
    spec = pod_of(replace(context(), profile=profile))["spec"]
    assert [container["name"] for container in spec["initContainers"]] == ["meshwright-agent", "tune"]


def test_the_agent_of_the_image_is_the_default() -> None:
    made = body()
    del made["spec"]["runtime"]["agent"]
    spec = pod_of(replace(context(), spec=parse_spec(made)))["spec"]
    assert "initContainers" not in spec
    assert spec["containers"][0]["command"] == ["python", "-m", "meshwright_worker"]


def status_of(state: dict[str, Any], phase: str) -> dict[str, Any]:
    waiting = {"waiting": {"reason": "PodInitializing"}}
    return {
        "phase": phase,
        "containerStatuses": [{"name": "worker", "state": waiting}],
        "initContainerStatuses": [{"name": "meshwright-agent", "state": state}],
    }


def test_an_image_of_the_agent_that_cannot_be_pulled_is_a_problem_of_the_pod() -> None:
    pod = pod_of(context())
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}
    read = read_pod({**pod, "metadata": {**pod["metadata"], "uid": "p"}, "status": status_of(waiting, "Pending")})
    assert read is not None
    assert read.problem == "ImagePullBackOff: init container meshwright-agent: Back-off pulling image"
    assert "`agentImage` of the chart" in fix_for(read.problem, context().spec)
    assert "`spec.workers.image`" in fix_for("ErrImagePull: no such image", context().spec)
    assert "profile" in fix_for("ErrImagePull: init container tune: no such image", context().spec)


def test_an_init_container_that_fails_is_named() -> None:
    pod = pod_of(context())
    ended = {"terminated": {"exitCode": 1, "message": "no space left"}}
    read = read_pod({**pod, "metadata": {**pod["metadata"], "uid": "p"}, "status": status_of(ended, "Failed")})
    assert read is not None
    assert read.init_failure == "init container meshwright-agent exited with code 1: no space left"


def test_a_sidecar_that_was_stopped_is_no_failure_of_an_init_container() -> None:
    pod = pod_of(context())
    spec = {**pod["spec"], "initContainers": [{"name": "proxy", "restartPolicy": "Always"}, {"name": "tune"}]}
    states = [{"terminated": {"exitCode": 143}}, {"terminated": {"exitCode": 1}}]
    statuses = [{"name": name, "state": state} for name, state in zip(("proxy", "tune"), states, strict=True)]
    status = {**status_of({}, "Failed"), "initContainerStatuses": statuses}
    read = read_pod({"metadata": {**pod["metadata"], "uid": "p"}, "spec": spec, "status": status})
    assert read is not None
    assert read.init_failure == "init container tune exited with code 1"


async def test_a_namespace_that_enforces_the_restricted_standard_takes_the_pod(api: Api, real_server: str) -> None:
    if not real_server:
        pytest.skip("the embedded server does not check pods against the Pod Security Standards")
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"metadata": {"name": "restricted", "labels": labels}}
    await api.call("POST", "/api/v1/namespaces", namespace, ok=False)
    pods = "/api/v1/namespaces/restricted/pods?dryRun=All&fieldValidation=Strict"
    limits = {"cpu": "96", "memory": "1000Gi", "exclusiveCpus": True}
    answer = await api.create(pods, pod_of(context("restricted", resources=limits)))
    assert answer["status"]["qosClass"] == "Guaranteed"
    unsafe = pod_of(context("restricted"))
    unsafe["spec"]["initContainers"][0]["securityContext"] = {}
    refused = await api.call("POST", pods, unsafe, ok=False)
    assert refused["code"] == 403, "the check is in effect"


async def test_a_job_is_rejected_if_the_operator_has_no_image_of_the_agent(
    api: Api, start_operator: StartOperator
) -> None:
    await start_operator()
    await api.create(JOBS, body("injected", gpusPerWorker=2, resources={}))

    async def rejected() -> str:
        found = condition(await api.status("injected"), "Stalled")
        return str(found["message"]) if found.get("reason") == "NoAgentImage" else ""

    message = await until(rejected, "the condition says that there is no image")
    assert "set `agentImage.repository` of the chart" in message
    assert not await api.pods("injected")
