"""PodGroups for other schedulers: made before the pods, resized with the job, and deleted when it has no pods.

With `POD_GROUP_CRDS`, a directory with the definitions of Volcano, KAI and the coscheduling plugin, these are used.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from meshwright.api.objects import KubeObject
from meshwright.api.parsing import parse_spec
from meshwright.api.workers import PodGroupKind
from meshwright.rules.validation import check_spec
from meshwright_operator.controller.pod_groups import PodGroupError, PodGroups
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.client import ApiError
from meshwright_operator.manifests.pod_group import FORMS, group_name, members_of, pod_group
from tests.operator import role_rules
from tests.operator.agents import Kubelet, bind
from tests.operator.builders import NOW, spec
from tests.operator.conftest import Settled, StartOperator
from tests.operator.memory import MemoryCluster
from tests.operator.proxy import Proxy
from tests.operator.support import JOBS, ROOT, Api, condition, job, until, write_kubeconfig
from tests.operator.test_manifests import make

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
UID = "12345678-aaaa-bbbb"
NATIVE = PodGroupKind.KUBERNETES
KINDS = {
    PodGroupKind.VOLCANO: ("volcano", "team"),
    PodGroupKind.KAI: ("kai-scheduler", "team"),
    PodGroupKind.COSCHEDULING: ("scheduler-plugins-scheduler", None),
    PodGroupKind.KUBERNETES: ("default-scheduler", None),
}


def workers(kind: PodGroupKind) -> KubeObject:
    scheduler, queue = KINDS[kind]
    group = {"kind": kind.value, **({"queue": queue} if queue else {})}
    return {"image": "meshwright/worker", "gpusPerWorker": 2, "schedulerName": scheduler, "podGroup": group}


# What is made.


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (PodGroupKind.VOLCANO, {"minMember": 4, "queue": "team", "minResources": {"nvidia.com/gpu": "8"}}),
        (PodGroupKind.KAI, {"minMember": 4, "queue": "team"}),
        (PodGroupKind.COSCHEDULING, {"minMember": 4}),
        (PodGroupKind.KUBERNETES, {"schedulingPolicy": {"gang": {"minCount": 4}}}),
    ],
)
def test_a_group_asks_for_all_pods_and_belongs_to_the_job(kind: PodGroupKind, wanted: KubeObject) -> None:
    made = pod_group("train", "default", UID, spec(workers=workers(kind)), 4)
    assert made["apiVersion"] == f"{FORMS[kind].group}/{FORMS[kind].version}"
    assert made["spec"] == wanted
    assert members_of(made) == 4
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (UID, True)
    assert made["metadata"]["labels"].get("kai.scheduler/queue") == ("team" if kind is PodGroupKind.KAI else None)


def test_pods_carry_what_their_scheduler_reads() -> None:
    made = {kind: make(workers=workers(kind)) for kind in PodGroupKind}
    uid = made[PodGroupKind.KAI]["metadata"]["ownerReferences"][0]["uid"]
    name = group_name(made[PodGroupKind.KAI]["metadata"]["ownerReferences"][0]["name"], uid)
    annotations = {kind: pod["metadata"]["annotations"] for kind, pod in made.items()}
    labels = {kind: pod["metadata"]["labels"] for kind, pod in made.items()}
    assert annotations[PodGroupKind.VOLCANO]["scheduling.k8s.io/group-name"] == name
    assert annotations[PodGroupKind.KAI]["pod-group-name"] == name
    assert annotations[PodGroupKind.KAI]["kai.scheduler/skip-podgrouper"] == "true"
    assert labels[PodGroupKind.KAI]["kai.scheduler/queue"] == "team"
    assert labels[PodGroupKind.COSCHEDULING]["scheduling.x-k8s.io/pod-group"] == name
    assert made[PodGroupKind.KUBERNETES]["spec"]["schedulingGroup"] == {"podGroupName": name}
    for kind, (scheduler, _) in KINDS.items():
        assert made[kind]["spec"]["schedulerName"] == scheduler
        assert ("schedulingGroup" in made[kind]["spec"]) == (kind is PodGroupKind.KUBERNETES)


def test_the_name_of_a_group_is_short_and_its_own() -> None:
    assert group_name("train", UID) == "train-12345678"
    assert len(group_name("x" * 63, UID)) == 63


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "queues").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_valid_and_name_what_their_file_says(path: Path) -> None:
    body = yaml.safe_load(path.read_text(encoding="utf-8"))
    asked = parse_spec(body)
    assert check_spec(asked) == []
    group = asked.workers.pod_group
    if group is not None:
        assert group.kind.value.lower() == path.stem
        assert f"queues.podGroups: [{group.kind.value}]" in path.read_text(encoding="utf-8")
    else:
        assert path.stem in ("kueue", "autoscaler")


# How it is made.


def path_of(kind: PodGroupKind) -> str:
    form = FORMS[kind]
    return f"/apis/{form.group}/{form.version}/namespaces/default/podgroups"


@pytest.mark.parametrize("kind", list(PodGroupKind))
async def test_a_group_is_resized_and_never_taken_over(kind: PodGroupKind) -> None:
    cluster = MemoryCluster(lambda: NOW)
    groups, key, asked = PodGroups(cluster), JobKey("default", "train"), spec(workers=workers(kind))
    await groups.ensure(key, UID, asked, 4)
    path = f"{path_of(kind)}/train-12345678"
    first = cluster.objects[path]["metadata"]["uid"]
    await groups.ensure(key, UID, asked, 4)
    assert cluster.objects[path]["metadata"]["uid"] == first
    await PodGroups(cluster).ensure(key, UID, asked, 6)
    assert members_of(cluster.objects[path]) == 6
    again = cluster.objects[path]["metadata"]["uid"] != first
    assert again == (kind is PodGroupKind.KUBERNETES), "its spec is immutable in Kubernetes 1.36"
    await groups.remove(key, UID, asked)
    assert path not in cluster.objects
    cluster.put(path, {"metadata": {"name": "train-12345678"}, "spec": {"minMember": 1}})
    with pytest.raises(PodGroupError, match="does not belong to this job"):
        await groups.ensure(key, UID, asked, 4)
    await PodGroups(cluster).remove(key, UID, asked)
    assert path in cluster.objects, "nor is it deleted"


@pytest.mark.parametrize("members", [4, 6])
async def test_a_group_that_is_being_deleted_is_waited_for(members: int) -> None:
    cluster, time = MemoryCluster(lambda: NOW), [0.0]
    groups, key, asked = PodGroups(cluster, lambda: time[0]), JobKey("default", "train"), spec(workers=workers(NATIVE))
    await groups.ensure(key, UID, asked, 4)
    path = f"{path_of(NATIVE)}/train-12345678"
    kept = {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["scheduling.k8s.io/podgroup-protection"]}
    cluster.objects[path]["metadata"] |= kept
    with pytest.raises(PodGroupError, match="Kubernetes keeps it until its pods are gone") as waits:
        await groups.ensure(key, UID, asked, members)
    assert waits.value.reason == "WaitingForOldPods"
    time[0] += 601
    with pytest.raises(PodGroupError, match="has the finalizers scheduling.k8s.io/podgroup-protection"):
        await groups.ensure(key, UID, asked, members)
    del cluster.objects[path]
    await groups.ensure(key, UID, asked, members)
    assert members_of(cluster.objects[path]) == members


@pytest.mark.parametrize(
    ("code", "words"),
    [(404, "Install Volcano, or remove"), (403, "Name Volcano in `queues.podGroups`"), (422, "rejected the PodGroup")],
)
async def test_a_group_that_cannot_be_made_is_named_with_what_to_do(code: int, words: str) -> None:
    cluster = MemoryCluster(lambda: NOW)
    cluster.refuse = lambda path, body: ApiError(code, "No", "no") if "podgroups" in path else None
    with pytest.raises(PodGroupError, match=words):
        await PodGroups(cluster).ensure(JobKey("default", "train"), UID, spec(workers=workers(PodGroupKind.VOLCANO)), 4)


# On an API server.


def definition(kind: PodGroupKind) -> KubeObject:
    """The project's own definition if it was given, else one that accepts any fields."""
    form = FORMS[kind]
    given = os.environ.get("POD_GROUP_CRDS")
    for path in sorted(Path(given).glob("*.yaml")) if given else ():
        for found in yaml.safe_load_all(path.read_text()):
            if found and found["spec"]["group"] == form.group and found["spec"]["names"]["kind"] == "PodGroup":
                return dict(found)
    open_fields = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": form.version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": open_fields, "status": open_fields}}},
        "subresources": {"status": {}},
    }
    approved = {"api-approved.kubernetes.io": "unapproved, a test's"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"podgroups.{form.group}", "annotations": approved},
        "spec": {
            "group": form.group,
            "scope": "Namespaced",
            "names": {"kind": "PodGroup", "listKind": "PodGroupList", "plural": "podgroups", "singular": "podgroup"},
            "versions": [version],
        },
    }


class Gang:
    """A scheduler that binds all pods once as many are there as their group says.

    It lets go of groups of Kubernetes that are being deleted, as kube-controller-manager does once no pod has them.
    """

    def __init__(self, api: Api, kind: PodGroupKind) -> None:
        self.api, self.kind, self.seen = api, kind, set[int]()

    async def run(self) -> None:
        while True:
            pods = await self.api.items("/api/v1/namespaces/default/pods")
            waiting = [
                one for one in pods if not one["spec"].get("nodeName") and "deletionTimestamp" not in one["metadata"]
            ]
            groups = await self.api.items(path_of(self.kind))
            await self._let_go(groups, pods)
            if waiting and groups and len(waiting) == members_of(groups[0]):
                self.seen.add(len(waiting))
                for number, found in enumerate(waiting):
                    await bind(self.api, found["metadata"]["name"], f"n{number}")
            await asyncio.sleep(0.1)

    async def _let_go(self, groups: list[KubeObject], pods: list[KubeObject]) -> None:
        named = {(pod["spec"].get("schedulingGroup") or {}).get("podGroupName") for pod in pods}
        for metadata in (group["metadata"] for group in groups):
            if metadata.get("finalizers") and "deletionTimestamp" in metadata and metadata["name"] not in named:
                await self.api.patch(f"{path_of(self.kind)}/{metadata['name']}", {"metadata": {"finalizers": None}})


async def serves(api: Api, kind: PodGroupKind) -> bool:
    """Whether the server has PodGroups of this kind."""
    try:
        return "items" in await api.call("GET", path_of(kind), ok=False)
    except Exception:  # noqa: BLE001 - until it has a kind, a real server answers in plain text
        return False


def rules_of(kind: PodGroupKind) -> str:
    """The template of the chart with the rights for this kind."""
    return f"{kind.value.lower()}Rules"


@pytest_asyncio.fixture
async def gang(request: Any, api: Api) -> AsyncIterator[Gang]:
    kind: PodGroupKind = request.param
    if not await serves(api, kind):  # kube-apiserver 1.36 serves its own
        await api.call("POST", CRDS, definition(kind), ok=False)
        await until(lambda: serves(api, kind), "PodGroups are served")
    # A server that several tests use has nobody who deletes what belonged to a deleted job.
    for left in await api.items(path_of(kind)):
        await api.patch(f"{path_of(kind)}/{left['metadata']['name']}", {"metadata": {"finalizers": None}})
        await api.delete(f"{path_of(kind)}/{left['metadata']['name']}")
    # The operator has exactly the rights that the chart gives it with this kind in `queues.podGroups`.
    for path, body in role_rules.objects(optional=(rules_of(kind),)):
        await api.call("DELETE", f"{path}/{body['metadata']['name']}", {}, ok=False)
        await api.call("POST", path, body, ok=False)
    scheduler = Gang(api, kind)
    task = asyncio.create_task(scheduler.run())
    yield scheduler
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.parametrize("gang", list(PodGroupKind), indirect=True, ids=str)
async def test_a_group_lives_as_long_as_the_pods_with_exactly_the_rights_of_the_chart(
    api: Api,
    gang: Gang,
    kubelet: Kubelet,
    start_operator: StartOperator,
    settled: Settled,
    session: aiohttp.ClientSession,
    operators_token: str,
    tmp_path: Path,
) -> None:
    async with Proxy(api.url, session).serving() as proxy:
        operator = await start_operator(kubeconfig=write_kubeconfig(tmp_path / "behind", proxy.url, operators_token))
        await _life_of_a_group(api, gang, kubelet, settled)
        await operator.stop()
    group = FORMS[gang.kind].group
    used = {right for request in proxy.requests if (right := request.right) is not None and right[0] == group}
    assert used == role_rules.rights((rules_of(gang.kind),)) - role_rules.rights()


async def _life_of_a_group(api: Api, gang: Gang, kubelet: Kubelet, settled: Settled) -> None:
    """It is made with the job, resized with it, gone while the job is suspended, and gone in the end."""
    one = {"parallelism": {"tensor": 2, "pipeline": 1, "microBatches": 1}, "replicas": 2}
    training = {"steps": 50, "globalBatchSize": 24, "sequenceLength": 64}
    await api.create(JOBS, job("grouped", workers=workers(gang.kind), training=training, **one))
    await settled("grouped")
    (made,) = await api.items(path_of(gang.kind))
    assert members_of(made) == 2
    assert made["metadata"]["ownerReferences"][0]["name"] == "grouped"

    await api.patch(f"{JOBS}/grouped", {"spec": {"replicas": 3}})

    async def grown() -> bool:
        status = await api.status("grouped")
        running = condition(status, "Ready").get("reason") == "Running"
        return running and status.get("replicas") == 3 and status["mesh"]["generation"] == 2

    await until(grown, "it runs with three replicas", 60)
    assert members_of((await api.items(path_of(gang.kind)))[0]) == 3
    assert gang.seen == {2, 3}

    await api.patch(f"{JOBS}/grouped", {"spec": {"suspend": True}})

    async def gone() -> bool:
        return all("deletionTimestamp" in found["metadata"] for found in await api.items(path_of(gang.kind)))

    await until(gone, "a suspended job has no group", 60)
    await api.patch(f"{JOBS}/grouped", {"spec": {"suspend": False}})
    await until(lambda: api.items(path_of(gang.kind)), "a resumed job has one", 60)
    await settled("grouped")
    for agent in kubelet.of("grouped"):
        await agent.finish()
    await until(gone, "a job that is complete has no group", 60)


@pytest.mark.slow
async def test_a_cluster_without_the_scheduler_is_named_in_the_conditions(
    api: Api, kubelet: Kubelet, start_operator: StartOperator
) -> None:
    await start_operator()
    body = job("nowhere", workers=workers(PodGroupKind.VOLCANO))
    await api.call("DELETE", f"{CRDS}/podgroups.scheduling.volcano.sh", {}, ok=False)
    await api.create(JOBS, body)

    async def says() -> str | None:
        placed = condition(await api.status("nowhere"), "Placed")
        return str(placed["message"]) if placed.get("reason") == "PodGroupUnavailable" else None

    assert "podGroup" in await until(says, "it says what is missing", 60)
    assert condition(await api.status("nowhere"), "Stalled")["status"] == "True"
