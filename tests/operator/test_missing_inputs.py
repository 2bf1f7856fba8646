"""Claims, Secrets and images that do not exist: the conditions name them, the field and the fix."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from meshwright.api.labels import LABEL_JOB
from meshwright_operator.controller.claim_check import ClaimCheck
from meshwright_operator.controller.pod_events import PodEvents
from meshwright_operator.decide.missing_claims import STALLED_AFTER_SECONDS, MissingClaim, claims_of
from meshwright_operator.decide.pod_problems import fix_for, problem_seconds
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.client import ApiError, KubeClient, Page
from meshwright_operator.kube.pod_info import read_pod
from tests.operator.agents import Kubelet
from tests.operator.builders import NOW, agents, observed, pod, running_status, spec
from tests.operator.conftest import Settled, StartOperator
from tests.operator.support import JOBS, Api, condition, job, until
from tests.operator.test_gang_races import small
from tests.operator.world import World

VOLUMES = [
    {"name": "models", "mountPath": "/models", "claimName": "weights"},
    {"name": "keys", "mountPath": "/keys", "secretName": "wandb"},
    {"name": "conf", "mountPath": "/conf", "configMapName": "settings"},
]
ENV = [
    {"name": "A", "value": "1"},
    {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
    {"name": "MODE", "valueFrom": {"configMapKeyRef": {"name": "modes", "key": "m"}}},
]
WORKERS = {"image": "worker:1", "gpusPerWorker": 2, "volumes": VOLUMES, "env": ENV}
FULL = spec(workers=WORKERS, checkpoint={"claimName": "ckpt"}, data={"source": "Files", "claimName": "texts"})


def test_every_claim_of_a_spec_is_known_with_its_field() -> None:
    assert list(claims_of(FULL)) == [
        ("checkpoint.claimName", "ckpt"),
        ("data.claimName", "texts"),
        ("workers.volumes[0].claimName", "weights"),
    ]


@pytest.mark.parametrize(
    ("problem", "fix"),
    [
        ("ErrImagePull: not found", "Check `spec.workers.image` and `spec.workers.imagePullSecrets`"),
        ("InvalidImageName: x", "Check `spec.workers.image`"),
        (
            'CreateContainerConfigError: secret "hub" not found',
            "Create Secret hub, or correct `spec.workers.env[1].valueFrom.secretKeyRef.name`",
        ),
        (
            'CreateContainerConfigError: configmap "modes" not found',
            "Create ConfigMap modes, or correct `spec.workers.env[2].valueFrom.configMapKeyRef.name`",
        ),
        (
            'FailedMount: MountVolume.SetUp failed for volume "keys" : secret "wandb" not found',
            "Create Secret wandb, or correct `spec.workers.volumes[1].secretName`",
        ),
        (
            'FailedMount: MountVolume.SetUp failed: configmap "default/settings" not found',
            "Create ConfigMap settings, or correct `spec.workers.volumes[2].configMapName`",
        ),
        (
            'FailedMount: MountVolume.SetUp failed: persistentvolumeclaim "texts" not found',
            "Create PersistentVolumeClaim texts, or correct `spec.data.claimName`",
        ),
        ('FailedMount: secret "unknown" not found', "Create Secret unknown"),
        ("Unschedulable: 0/4 nodes are available", ""),
    ],
)
def test_a_problem_of_a_pod_names_the_field_it_comes_from(problem: str, fix: str) -> None:
    assert fix_for(problem, FULL) == fix


LIMIT_RANGER = "kubernetes.io/limit-ranger"
LIMITED = (
    "LimitRanger plugin set: cpu, memory, ephemeral-storage request for container worker; cpu limit for container "
    "worker; memory request for init container meshwright-agent"
)


@pytest.mark.parametrize(
    ("annotation", "message", "fix"),
    [
        (
            LIMITED,
            "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) didn't match Pod's node affinity/selector.",
            "A LimitRange of the namespace has set the pod's request of cpu. Set `spec.workers.resources.cpu`",
        ),
        (
            LIMITED,
            "0/1 nodes are available: 1 Insufficient ephemeral-storage, 1 Insufficient memory.",
            "A LimitRange of the namespace has set the pod's request of memory and ephemeral-storage. Set "
            "`spec.workers.resources.memory` and `spec.workers.resources.ephemeralStorage`",
        ),
        (LIMITED, "0/1 nodes are available: 1 node(s) had untolerated taint.", ""),
        (LIMITED, "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", ""),
        ("LimitRanger plugin set: cpu request for container sidecar", "1 Insufficient cpu", ""),
        (7, "0/1 nodes are available: 1 Insufficient cpu.", ""),
        ("", "0/1 nodes are available: 1 Insufficient cpu.", ""),
    ],
)
def test_requests_that_a_limit_range_has_set_are_named_if_they_do_not_fit(
    annotation: object, message: str, fix: str
) -> None:
    """Placement counts only what the spec requests."""
    status = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}],
    }
    metadata = {"name": "job-w0-0", "uid": "p", "labels": {LABEL_JOB: "job"}}
    read = read_pod({"metadata": {**metadata, "annotations": {LIMIT_RANGER: annotation}}, "status": status})
    assert read is not None
    assert read.problem == f"Unschedulable: {message}"
    assert fix_for(read.problem, FULL, read.defaulted) == fix


def test_a_problem_that_comes_from_a_name_is_reported_within_seconds() -> None:
    assert problem_seconds("ErrImagePull: x") == problem_seconds("FailedMount: x") == 10
    assert problem_seconds("Unschedulable: x") == 60


def with_claim(name: str) -> dict[str, Any]:
    body = small("train", 2)
    body["spec"]["checkpoint"] = {"claimName": name}
    return body


def ready(world: World) -> dict[str, Any]:
    return next(c for c in world.status("train")["conditions"] if c["type"] == "Ready")


async def test_a_job_whose_claim_does_not_exist_gets_no_nodes_and_starts_once_it_does() -> None:
    world = World(3, nodes=2, work=10**6)
    world.cluster.missing_claims.add("ckpt")
    for name in ("ckpts", "other"):
        world.cluster.put(f"/api/v1/namespaces/default/persistentvolumeclaims/{name}", {"metadata": {"name": name}})
    world.submit(with_claim("ckpt"))
    await world.run(4)
    assert not world.pods()
    assert ready(world)["reason"] == "ClaimNotFound"
    assert ready(world)["message"] == (
        "PersistentVolumeClaim `ckpt` (`spec.checkpoint.claimName`, did you mean `ckpts`?) does not exist in namespace "
        "default. Create it, or correct the field"
    )
    assert not world.true("train", "Stalled"), "the claim may be in the same file"
    await world.run(STALLED_AFTER_SECONDS + 5)
    assert world.true("train", "Stalled")
    assert world.status("train")["goodput"]["cause"] == "Queued", "it has no nodes to start on"
    world.cluster.missing_claims.clear()
    await world.run(40)
    assert world.true("train", "Ready")
    assert not world.true("train", "Stalled")


async def test_the_field_can_be_corrected_at_once() -> None:
    world = World(3, nodes=2, work=10**6)
    world.cluster.missing_claims.add("ckpt")
    world.submit(with_claim("ckpt"))
    await world.run(30)
    new = copy.deepcopy(world.cluster.objects[f"{JOBS}/train"])
    new["spec"]["checkpoint"]["claimName"] = "there"
    new["metadata"]["generation"] += 1
    world.cluster.update(f"{JOBS}/train", new)
    await world.run(15)
    assert world.true("train", "Ready")


async def test_claims_are_looked_up_once_while_jobs_start() -> None:
    world = World(3, nodes=2, work=10**6)
    world.submit(with_claim("ckpt"))
    await world.run(20)
    asked = [path for verb, path in world.cluster.requests if "persistentvolumeclaims" in path]
    assert len(asked) == 1


async def test_a_volume_that_cannot_be_mounted_is_named_with_its_field(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled
) -> None:
    """Kubelets report it in events of the pod only. The operator must not read Secrets, and need not."""
    await start_operator()
    kubelet.mount_error = 'MountVolume.SetUp failed for volume "keys" : secret "wandb" not found'
    volumes = [{"name": "keys", "mountPath": "/keys", "secretName": "wandb"}]
    workers = {"image": "meshwright/worker", "gpusPerWorker": 2, "volumes": volumes}
    await api.create(JOBS, job("mount", workers=workers))

    async def named() -> dict[str, Any] | None:
        found = condition(await api.status("mount"), "Ready")
        return found if found.get("reason") == "FailedMount" else None

    message = (await until(named, "the volume is named", 60))["message"]
    assert message == (
        f"Pod mount-w0-0: FailedMount: {kubelet.mount_error}. "
        "Create Secret wandb, or correct `spec.workers.volumes[0].secretName`"
    )
    kubelet.mount_error = ""
    await settled("mount")


class Forbidden:
    """An API server on which the operator has the role of version 0.1.0."""

    async def get(self, path: str) -> dict[str, Any]:
        raise ApiError(403, "Forbidden", path)


async def test_without_the_right_to_read_claims_none_is_missing() -> None:
    assert await ClaimCheck(Forbidden()).missing("default", FULL) == []  # type: ignore[arg-type]


def test_a_missing_claim_as_text() -> None:
    assert str(MissingClaim("data.claimName", "texs", ("texts", "text"))) == (
        "`texs` (`spec.data.claimName`, did you mean `texts` or `text`?)"
    )
    assert str(MissingClaim("data.claimName", "x")) == "`x` (`spec.data.claimName`)"


class NoEvents(KubeClient):
    """An API server whose events cannot be read: clusters often store them elsewhere."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.asked = 0

    async def pages(self, path: str, **query: str) -> AsyncIterator[Page]:
        self.asked += 1
        if self.code:
            raise ApiError(self.code, "No", "no")
        yield Page([{"reason": "FailedMount", "message": "no such volume"}], "")


def waiting_pod(seconds: float) -> Any:
    pods = [pod(0, phase="Pending", address="", created=NOW), pod(1), pod(2), pod(3)]
    return observed(pods, running_status(), received=agents(), now=NOW + timedelta(seconds=seconds))


@pytest.mark.parametrize("code", [0, 410, 429, 500, 504])
async def test_a_job_starts_although_events_of_its_pods_cannot_be_read(code: int) -> None:
    client = NoEvents(code)
    events = PodEvents(client, lambda key: None)
    for seconds in (20, 21):
        explained, again = await events.explain(JobKey("default", "job"), waiting_pod(seconds))
        problem = explained.workers[0].pod.problem
        assert problem == ("" if code else "FailedMount: no such volume")
        assert again == pytest.approx(seconds / 2)
    assert client.asked == 1, "not at every reconcile"
    client.code = 0
    explained, _ = await events.explain(JobKey("default", "job"), waiting_pod(120))
    assert explained.workers[0].pod.problem == "FailedMount: no such volume"


async def test_where_the_operator_may_not_read_events_it_asks_once_and_elsewhere_again() -> None:
    client = NoEvents(403)
    events = PodEvents(client, lambda key: None)
    for namespace in ("a", "a", "b"):
        explained, _ = await events.explain(JobKey(namespace, "job"), waiting_pod(20))
        assert not explained.workers[0].pod.problem
    assert client.asked == 1, "the same pod was asked for a moment ago"
    client.code = 0
    seen = waiting_pod(120)
    assert (await events.explain(JobKey("b", "job"), seen))[0].workers[0].pod.problem
    assert not (await events.explain(JobKey("a", "job"), seen))[0].workers[0].pod.problem
