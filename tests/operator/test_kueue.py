"""Kueue at the level of a job, in virtual time: the Workload that is made, what is obeyed, and what is given back."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from meshwright.api import labels
from meshwright.api.objects import KubeObject
from meshwright.api.workers import Toleration
from meshwright.planner.cluster.inventory import Inventory
from meshwright.profiles.document import parse_profiles
from meshwright_operator.decide.admission import Admission, Domain
from meshwright_operator.decide.placement_outcome import WAITING_RETRY_SECONDS
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.client import ApiError
from meshwright_operator.kube.watch_liveness import WatchLiveness
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.queues import kueue_watch
from meshwright_operator.queues import workload_state as state
from meshwright_operator.queues.kueue import Kueue
from meshwright_operator.queues.kueue_watch import KueueState, KueueWatch
from meshwright_operator.queues.workload_manifest import DIGEST, Demand, Priority, workload, workload_name
from meshwright_operator.scheduling.assigned_domains import NOT_ASSIGNED, within_domains
from meshwright_operator.scheduling.job_queue import PlacementRequest
from meshwright_operator.timestamps import format_time
from tests.operator.builders import NOW, observed, spec
from tests.operator.memory import MemoryCluster
from tests.operator.support import JOBS, node, until
from tests.operator.test_drains import cordon
from tests.operator.test_elastic import edit
from tests.operator.test_gang_races import small
from tests.operator.world import Operator, World

WORKLOADS = "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads"
QUOTA = "couldn't assign flavors to pod set workers: insufficient unused quota for nvidia.com/gpu in flavor default"


class Queues(MemoryCluster):
    """An API server with Workloads, and what Kueue does with them when a test says so."""

    refuse_patch: Callable[[str, KubeObject], ApiError | None] = staticmethod(lambda path, body: None)

    async def merge_patch(self, path: str, body: KubeObject) -> KubeObject:
        if (error := self.refuse_patch(path, body)) is not None:
            raise error
        metadata = dict(body.get("metadata") or {})
        if "/workloads/" in path and (target := self.objects.get(path.removesuffix("/status"))) is not None:
            for name in ("annotations", "ownerReferences"):
                if isinstance(metadata.get(name), dict):
                    found = target["metadata"].setdefault(name, {})
                    found |= {key: value for key, value in metadata[name].items() if value is not None}
                    for key in [key for key, value in metadata[name].items() if value is None]:
                        found.pop(key, None)
                elif name in metadata:
                    target["metadata"][name] = metadata[name]
        return await super().merge_patch(path, body)

    async def get(self, path: str) -> KubeObject:
        if "/resourceflavors/" in path or "priorityclasses/" in path:
            if path not in self.objects:
                raise ApiError(404, "NotFound", path)
            return self.objects[path]
        return await super().get(path)


class QueueWorld(World):
    """A cluster with Kueue."""

    kueue_state = KueueState.WATCHED

    def operator(self) -> Operator:
        operator = super().operator()
        watch = KueueWatch(self.cluster, WatchLiveness(operator.metrics, 60), (), 60, lambda key: self._changed(key))
        watch.state = self.kueue_state
        self.watch = watch
        operator.reconciler._kueue = Kueue(self.cluster, operator.cache, watch, lambda: self.now)
        return operator

    def _changed(self, key: JobKey | None) -> None:
        for operator in getattr(self, "operators", ()):
            for one in [key] if key is not None else list(operator.cache.jobs):
                operator.queue.add(one)

    def workload(self, name: str) -> KubeObject:
        found = [one for one in self.cluster.of("workloads") if one["metadata"]["labels"][labels.LABEL_JOB] == name]
        assert len(found) <= 1
        return found[0] if found else {}

    def kueue_says(self, name: str, *conditions: tuple[str, bool, str, str], **status: Any) -> None:
        """Kueue writes to the status of a Workload."""
        found = self.workload(name)
        for kind, value, reason, message in conditions:
            new = {"type": kind, "status": str(value), "reason": reason, "message": message}
            new["lastTransitionTime"] = format_time(self.now)
            found["status"]["conditions"] = state.with_conditions(found, new)
        found["status"] |= status
        path = f"{WORKLOADS}/{found['metadata']['name']}"
        self.watch.put(self.cluster.update(path, found))

    def admit(self, name: str, count: int, **assignment: Any) -> None:
        flavors = {"nvidia.com/gpu": "default"}
        given = {"name": "workers", "flavors": flavors, "count": count, **assignment}
        yes = ("QuotaReserved", True, "QuotaReserved", "ok"), ("Admitted", True, "Admitted", "ok")
        self.kueue_says(
            name,
            *yes,
            ("Evicted", False, "QuotaReserved", ""),
            admission={"clusterQueue": "team", "podSetAssignments": [given]},
        )

    def evict(self, name: str, reason: str = "Preempted") -> None:
        self.kueue_says(name, ("Evicted", True, reason, "Preempted to accommodate a workload"))

    def flavor(self, name: str, **spec: Any) -> None:
        self.cluster.put(
            f"/apis/kueue.x-k8s.io/v1beta2/resourceflavors/{name}", {"metadata": {"name": name}, "spec": spec}
        )


def world(nodes: int = 4, work: float = 1e6) -> QueueWorld:
    made = QueueWorld(1, nodes=nodes, work=work, cluster=Queues)
    made.flavor("default")
    return made


def queued(name: str, workers: int, more: dict[str, str] | None = None, **fields: Any) -> KubeObject:
    body = small(name, workers, **fields)
    body["metadata"]["labels"] = {labels.KUEUE_QUEUE: "team", **(more or {})}
    return body


def seconds_of(found: World, name: str, cause: str) -> float:
    booked = found.status(name)["goodput"]["booked"]
    return sum(entry["milliseconds"] for entry in booked if entry["cause"] == cause) / 1000


# The life of a job in a queue.


async def test_a_job_waits_for_its_quota_without_pods_and_says_what_kueue_says() -> None:
    found = world()
    found.submit(queued("waits", 2, activeDeadlineSeconds=600))
    await found.run(5)
    made = found.workload("waits")
    (pod_set,) = made["spec"]["podSets"]
    assert (pod_set["name"], pod_set["count"], "minCount" in pod_set) == ("workers", 2, False)
    requests = pod_set["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert requests == {"nvidia.com/gpu": "2"}
    assert (made["spec"]["queueName"], made["spec"]["active"], made["spec"]["priority"]) == ("team", True, 0)
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["controller"]) == ("ParallelTrainingJob", "waits", True)
    found.kueue_says("waits", ("QuotaReserved", False, "Pending", QUOTA))
    await found.run(600, 30)
    ready, placed = found.condition("waits", "Ready"), found.condition("waits", "Placed")
    assert (ready["status"], ready["reason"], placed["reason"]) == ("False", "WaitingForQuota", "WaitingForQuota")
    assert QUOTA in ready["message"]
    assert found.condition("waits", "Stalled")["status"] == "False"
    assert not found.pods()
    writes = found.cluster.writes
    await found.run(1200, 30)
    assert found.cluster.writes == writes, "waiting writes nothing"
    found.admit("waits", 2)
    await found.run(20)
    assert found.true("waits", "Ready"), "and the wait does not count toward the deadline"
    assert seconds_of(found, "waits", "Queued") == pytest.approx(1805, abs=40)
    assert state.is_true(found.workload("waits"), "PodsReady")


@pytest.mark.parametrize(("label", "seconds"), [("600", 600), ("0", None), ("10m", None)])
async def test_the_time_limit_of_a_job_is_that_of_its_workload(label: str, seconds: int | None) -> None:
    found = world()
    found.submit(queued("limited", 1, {labels.KUEUE_MAX_SECONDS: label}))
    await found.run(5)
    assert found.workload("limited")["spec"].get("maximumExecutionTimeSeconds") == seconds


async def test_an_evicted_job_saves_gives_its_quota_back_only_without_pods_and_resumes() -> None:
    found = world()
    found.submit(queued("evicted", 2, checkpoint={"claimName": "c"}))
    await found.run(3)
    found.admit("evicted", 2)
    await found.run(60)
    assert found.true("evicted", "Ready")
    found.evict("evicted")
    for _ in range(60):
        await found.run(1)
        if found.pods():
            assert state.is_reserved(found.workload("evicted")), "pods still run"
    assert not found.pods()
    made = found.workload("evicted")
    assert not state.is_reserved(made)
    assert "admission" not in made["status"]
    assert state.condition(made, "Requeued")["status"] == "True"
    assert state.condition(made, "Admitted")["reason"] == "NoReservation"
    saved = found.status("evicted")["checkpoint"]["step"]
    assert saved > 30
    ready = found.condition("evicted", "Ready")
    assert ready["reason"] == "WaitingForQuota"
    assert f"step {saved}" in ready["message"]
    assert "Preempted" in found.operators[0].notes.reasons("evicted")
    found.admit("evicted", 2)
    await found.run(30)
    assert found.true("evicted", "Ready")
    assert found.status("evicted")["mesh"]["generation"] == 2
    assert [entry["cause"] for entry in found.status("evicted")["restarts"]] == ["JobPreempted"]
    assert not found.status("evicted").get("restartsTowardLimit")


@pytest.mark.parametrize(("fails", "reason"), [(False, "Succeeded"), (True, "Failed")])
async def test_the_workload_of_a_finished_job_is_finished(fails: bool, reason: str) -> None:
    found = world(work=20)
    limit = {"activeDeadlineSeconds": 10} if fails else {}
    found.submit(queued("ends", 2, **limit))
    await found.run(3)
    found.admit("ends", 2)
    await found.run(60)
    end = state.condition(found.workload("ends"), "Finished")
    assert (end["status"], end["reason"]) == ("True", reason)
    assert end["message"]
    writes = found.cluster.writes
    await found.run(300, 10)
    assert found.cluster.writes == writes


async def test_a_suspended_job_deactivates_its_workload_and_what_others_deactivate_stays_so() -> None:
    found = world()
    found.submit(queued("rests", 2))
    await found.run(3)
    found.admit("rests", 2)
    await found.run(10)
    edit(found, "rests", suspend=True)
    await found.run(5)
    assert found.workload("rests")["spec"]["active"] is False
    found.evict("rests", "Deactivated")
    await found.run(10)
    assert not state.is_reserved(found.workload("rests"))
    assert state.condition(found.workload("rests"), "Requeued")["status"] == "False"
    edit(found, "rests", suspend=False)
    await found.run(5)
    assert found.workload("rests")["spec"]["active"] is True

    stopped = found.workload("rests")
    stopped["spec"]["active"] = False
    found.watch.put(found.cluster.update(f"{WORKLOADS}/{stopped['metadata']['name']}", stopped))
    await found.run(30)
    assert found.workload("rests")["spec"]["active"] is False
    assert "is not active" in found.condition("rests", "Ready")["message"]


async def test_a_job_of_another_size_gives_its_quota_back_and_asks_anew() -> None:
    found = world()
    found.submit(queued("edited", 2))
    await found.run(3)
    first = found.workload("edited")["metadata"]["uid"]
    edit(found, "edited", replicas=3)
    await found.run(3)
    assert found.workload("edited")["spec"]["podSets"][0]["count"] == 3
    assert found.workload("edited")["metadata"]["uid"] == first, "without quota, it is changed"
    found.admit("edited", 3)
    await found.run(20)
    assert found.true("edited", "Ready")
    edit(found, "edited", replicas=4)
    await found.run(60)
    assert not found.pods()
    made = found.workload("edited")
    assert made["metadata"]["uid"] != first, "with quota, it is made again"
    assert made["spec"]["podSets"][0]["count"] == 4
    assert found.condition("edited", "Ready")["reason"] == "WaitingForQuota"
    found.admit("edited", 4)
    await found.run(30)
    assert found.true("edited", "Ready")
    assert found.status("edited")["replicas"] == 4


DAEMON = """
net:
  namespaces: [default]
  runtimeClassName: kata
  initContainers: [{name: setup, image: i}]
  sidecars: [{name: daemon, image: i, cpu: "2", memory: 1Gi}]
"""


def with_daemon(name: str, workers: int, **fields: Any) -> KubeObject:
    body = queued(name, workers, **fields)
    body["spec"]["workers"] |= {"profile": "net"}
    return body


def ask_as_an_earlier_build(found: QueueWorld, name: str) -> str:
    """Change the Workload to what earlier builds made, without what a profile adds. Return its digest."""
    made = found.workload(name)
    (pod_set,) = made["spec"]["podSets"]
    for field in ("initContainers", "runtimeClassName"):
        del pod_set["template"]["spec"][field]
    one_size = {field: value for field, value in pod_set.items() if field not in ("count", "minCount")}
    texts = (json.dumps(["team", None, one], sort_keys=True, separators=(",", ":")) for one in (pod_set, one_size))
    digest = ".".join(hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts)
    made["metadata"]["annotations"][DIGEST] = digest
    found.watch.put(found.cluster.update(f"{WORKLOADS}/{made['metadata']['name']}", made))
    return digest


async def test_quota_is_asked_for_what_the_containers_of_a_profile_request() -> None:
    found = world()
    found.operators[0].profiles.use(parse_profiles(DAEMON))
    found.submit(with_daemon("job", 2))
    await found.run(3)
    (pod_set,) = found.workload("job")["spec"]["podSets"]
    pod = pod_set["template"]["spec"]
    asked = {"cpu": "2", "memory": "1Gi"}
    assert pod["initContainers"] == [
        {"name": "setup", "resources": {}},
        {"name": "daemon", "resources": {"requests": asked, "limits": asked}, "restartPolicy": "Always"},
    ]
    assert pod["runtimeClassName"] == "kata"
    found.admit("job", 2)
    await found.run(20)
    assert found.true("job", "Ready")
    assert found.status("job")["mesh"]["generation"] == 1


@pytest.mark.parametrize("elastic", [None, {"minReplicas": 1}])
async def test_a_job_that_runs_keeps_the_quota_of_an_earlier_build(elastic: dict[str, int] | None) -> None:
    found = world()
    found.operators[0].profiles.use(parse_profiles(DAEMON))
    found.submit(with_daemon("job", 2, elastic=elastic))
    await found.run(3)
    found.admit("job", 2)
    await found.run(20)
    assert found.true("job", "Ready")
    digest = ask_as_an_earlier_build(found, "job")
    if elastic:
        edit(found, "job", replicas=1)
    await found.run(60)
    assert found.true("job", "Ready")
    assert len(found.pods("job")) == (1 if elastic else 2)
    assert state.is_reserved(found.workload("job"))
    assert found.workload("job")["metadata"]["annotations"][DIGEST] == digest, "nothing else is asked for"
    found.evict("job")
    await found.run(60)
    assert not state.is_reserved(found.workload("job"))
    assert found.workload("job")["metadata"]["annotations"][DIGEST] != digest
    assert "initContainers" in found.workload("job")["spec"]["podSets"][0]["template"]["spec"]


async def test_a_job_that_gets_a_profile_asks_for_its_containers_too() -> None:
    found = world()
    found.operators[0].profiles.use(parse_profiles(DAEMON))
    found.submit(queued("job", 2))
    await found.run(3)
    found.admit("job", 2)
    await found.run(20)
    assert found.true("job", "Ready")
    edit(found, "job", workers={**found.cluster.objects[f"{JOBS}/job"]["spec"]["workers"], "profile": "net"})
    await found.run(60)
    assert not found.pods()
    assert found.condition("job", "Ready")["reason"] == "WaitingForQuota"
    assert "initContainers" in found.workload("job")["spec"]["podSets"][0]["template"]["spec"]
    found.admit("job", 2)
    await found.run(30)
    assert found.true("job", "Ready")


async def test_an_elastic_job_leaves_a_draining_node_with_no_more_pods_than_were_admitted() -> None:
    found = world()
    found.submit(queued("job", 2, elastic={}, checkpoint={"claimName": "shared"}))
    await found.run(10)
    found.admit("job", 2)
    await found.run(30)
    assert found.true("job", "Ready")
    leaving = found.pods("job")[0].node
    cordon(found, leaving, cordoned=True)
    held = 0
    for _ in range(90):
        await found.run(1)
        held = max(held, sum(not pod.terminal for pod in found.pods("job")))
    assert held == 2
    assert leaving not in {pod.node for pod in found.pods("job")}
    assert found.true("job", "Ready"), found.condition("job", "Ready")
    assert found.status("job")["replicas"] == 2


async def test_an_elastic_job_runs_with_the_workers_that_were_admitted() -> None:
    found = world(nodes=6)
    found.submit(queued("part", 4, elastic={"minReplicas": 1}))
    await found.run(3)
    (pod_set,) = found.workload("part")["spec"]["podSets"]
    assert (pod_set["count"], pod_set["minCount"]) == (4, 1)
    found.admit("part", 2)
    await found.run(400, 2)
    assert found.true("part", "Ready")
    assert found.status("part")["replicas"] == 2, "nodes for more are free, and no quota"
    edit(found, "part", replicas=1)
    await found.run(60)
    assert found.status("part")["replicas"] == 1
    assert found.workload("part")["status"]["reclaimablePods"] == [{"name": "workers", "count": 1}]
    assert state.is_reserved(found.workload("part"))


async def test_ranks_run_on_the_nodes_that_kueue_assigned_with_labels_and_tolerations_of_the_flavor() -> None:
    found = world(nodes=6)
    found.flavor("default", nodeLabels={"pool": "b"}, tolerations=[{"key": "team", "operator": "Exists"}])
    for name in ("n2", "n4", "n5"):
        found.nodes[name]["metadata"]["labels"]["pool"] = "b"
        found.nodes[name]["spec"] = {"taints": [{"key": "team", "value": "x", "effect": "NoSchedule"}]}
        found.cluster.stamp(found.nodes[name])
    found.operators[0].relist()
    found.submit(queued("assigned", 2))
    await found.run(3)
    slices = [
        {
            "domainCount": 2,
            "valuesPerLevel": [{"individual": {"prefix": "n", "roots": ["5", "2"]}}],
            "podCounts": {"universal": 1},
        }
    ]
    found.admit("assigned", 2, topologyAssignment={"levels": ["kubernetes.io/hostname"], "slices": slices})
    await found.run(30)
    assert found.true("assigned", "Ready")
    assert {entry["node"] for entry in found.status("assigned")["placement"]["workers"]} == {"n2", "n5"}
    for obj in found.cluster.of("pods"):
        assert obj["spec"]["nodeSelector"] == {"pool": "b"}
        assert {"key": "team", "operator": "Exists"} in obj["spec"]["tolerations"]
        assert obj["metadata"]["annotations"]["kueue.x-k8s.io/podset-unconstrained-topology"] == "true"
        assert (
            obj["metadata"]["annotations"]["kueue.x-k8s.io/workload"] == found.workload("assigned")["metadata"]["name"]
        )
    revision = found.status("assigned")["plan"]["revision"]
    await found.run(60)
    assert found.status("assigned")["plan"]["revision"] == revision
    assert found.status("assigned")["mesh"]["generation"] == 1, "what Kueue adds is no edit"


async def test_pods_get_what_admission_checks_require_of_them() -> None:
    """The check ProvisioningRequest names the request whose nodes the pods use, in annotations."""
    found = world()
    for one in found.nodes.values():
        one["metadata"]["labels"]["provisioned"] = "yes"
        found.cluster.stamp(one)
    found.operators[0].relist()
    found.submit(queued("provisioned", 2))
    await found.run(3)
    consumes = {"autoscaling.x-k8s.io/consume-provisioning-request": "ptj-provisioned-check-1"}
    update = {
        "name": "workers",
        "nodeSelector": {"provisioned": "yes"},
        "labels": {"team": "a"},
        "annotations": consumes,
    }
    check = {"name": "check", "state": "Ready", "message": "", "podSetUpdates": [update]}
    found.kueue_says("provisioned", admissionChecks=[check])
    found.admit("provisioned", 2)
    await found.run(30)
    assert found.true("provisioned", "Ready")
    for obj in found.cluster.of("pods"):
        assert obj["metadata"]["annotations"].items() >= consumes.items()
        assert obj["metadata"]["labels"]["team"] == "a"
        assert obj["metadata"]["labels"][labels.LABEL_JOB] == "provisioned"
        assert obj["spec"]["nodeSelector"] == {"provisioned": "yes"}
    await found.run(60)
    assert found.status("provisioned")["mesh"]["generation"] == 1, "what a check adds is no edit"


FLAVORS = "/apis/kueue.x-k8s.io/v1beta2/resourceflavors"


async def test_a_flavor_that_does_not_exist_is_named_with_what_to_do() -> None:
    found = world()
    del found.cluster.objects[f"{FLAVORS}/default"]
    found.submit(queued("lost", 2))
    await found.run(3)
    found.admit("lost", 2)
    await found.run(10)
    for kind in ("Ready", "Placed"):
        one = found.condition("lost", kind)
        assert one["reason"] == "QueueUnavailable"
        assert "Queue team admitted the job with ResourceFlavor default, which does not exist" in one["message"]
        assert "Create it, or remove it from the ClusterQueue" in one["message"]
    assert not found.pods()
    found.flavor("default")
    await found.run(120)
    assert found.true("lost", "Ready")


async def test_a_job_that_runs_goes_on_without_its_flavor_and_gives_its_quota_back_at_the_end() -> None:
    found = world(work=300)
    found.flavor("default", nodeLabels={"pool": "a"})
    for one in found.nodes.values():
        one["metadata"]["labels"]["pool"] = "a"
        found.cluster.stamp(one)
    found.operators[0].relist()
    found.submit(queued("runs", 2))
    await found.run(3)
    found.admit("runs", 2)
    await found.run(30)
    assert found.true("runs", "Ready")
    del found.cluster.objects[f"{FLAVORS}/default"]
    queues = found.operators[0].reconciler._kueue
    assert queues is not None
    queues._flavors = {name: (-1e9, flavor) for name, (_, flavor) in queues._flavors.items()}
    found.crash("runs-w0-0")
    await found.run(60)
    assert found.true("runs", "Ready"), "the lost worker is replaced"
    assert {obj["spec"]["nodeSelector"]["pool"] for obj in found.cluster.of("pods")} == {"a"}
    await found.run(600)
    assert found.true("runs", "Complete")
    assert state.is_true(found.workload("runs"), state.FINISHED)


# Clusters without Kueue, and jobs without a queue.


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (KueueState.ABSENT, "does not have Kueue. Install it"),
        (KueueState.DENIED, "Set `queues.kueue.enabled`"),
        (KueueState.OFF, "Set `featureGates.KueueQueues: true`"),
    ],
)
async def test_a_queue_that_nobody_can_ask_is_named_with_what_to_do(known: KueueState, words: str) -> None:
    found = world()
    found.watch.state = known
    found.submit(queued("lost", 2))
    await found.run(10)
    for kind in ("Ready", "Placed"):
        assert found.condition("lost", kind)["reason"] == "QueueUnavailable"
    assert words in found.condition("lost", "Ready")["message"]
    assert "`kueue.x-k8s.io/queue-name` names queue team" in found.condition("lost", "Ready")["message"]
    assert found.true("lost", "Stalled")
    assert not found.pods()


async def test_jobs_without_a_queue_run_as_always_and_nothing_is_asked() -> None:
    found = world()
    found.submit(small("free", 2))
    await found.run(20)
    assert found.true("free", "Ready")
    assert not [path for _, path in found.cluster.requests if "kueue" in path]
    assert not found.watch.named


async def test_a_job_that_runs_goes_on_while_kueue_is_away() -> None:
    found = world()
    found.submit(queued("goes-on", 2))
    await found.run(3)
    found.admit("goes-on", 2)
    await found.run(20)
    found.watch.state = KueueState.ABSENT
    await found.run(60)
    assert found.true("goes-on", "Ready")
    assert found.status("goes-on")["mesh"]["generation"] == 1


async def test_a_job_that_leaves_its_queue_runs_without_a_workload() -> None:
    found = world()
    found.submit(queued("leaves", 2))
    await found.run(3)
    assert found.workload("leaves")
    path = f"{JOBS}/leaves"
    found.cluster.objects[path]["metadata"]["labels"] = {}
    found.cluster.update(path, found.cluster.objects[path])
    await found.run(20)
    assert found.true("leaves", "Ready")
    assert not list(found.cluster.of("workloads"))


# What the API server refuses.


async def test_a_job_that_runs_recovers_while_a_change_of_its_workload_is_refused() -> None:
    """Kueue lets nobody replace the class of a Workload that has quota by one of another kind."""
    found = world()
    found.submit(queued("goes-on", 2))
    await found.run(3)
    found.admit("goes-on", 2)
    await found.run(20)
    refused: list[str] = []

    def refuse(path: str, body: KubeObject) -> ApiError | None:
        if "priorityClassRef" not in (body.get("spec") or {}):
            return None
        refused.append(path)
        return ApiError(422, "Invalid", "priorityClassRef is immutable while workload quota reserved")

    found.cluster.refuse_patch = refuse
    classes = "/apis/kueue.x-k8s.io/v1beta2/workloadpriorityclasses"
    found.cluster.put(f"{classes}/high", {"metadata": {"name": "high"}, "value": 100})
    path = f"{JOBS}/goes-on"
    found.cluster.objects[path]["metadata"]["labels"][labels.KUEUE_PRIORITY] = "high"
    found.cluster.update(path, found.cluster.objects[path])
    await found.run(10)
    found.crash("goes-on-w0-0")
    await found.run(60)
    assert found.true("goes-on", "Ready")
    assert found.status("goes-on")["mesh"]["generation"] == 2
    (note,) = [note for _, note in found.operators[0].notes.notes if note.reason == "RequestRejected"]
    assert note.message.startswith("The API server rejected the Workload of queue team: priorityClassRef is immutable")
    assert len(refused) == 1, "it is not tried again at every look"


async def test_a_refused_workload_is_named_in_the_status_and_a_job_that_runs_goes_on() -> None:
    found = world()
    found.cluster.refuse = lambda path, body: (
        ApiError(403, "Forbidden", "exceeded quota: few, requested: count/workloads.kueue.x-k8s.io=1")
        if path.endswith("/workloads")
        else None
    )
    found.submit(queued("refused", 2))
    await found.run(10)
    ready = found.condition("refused", "Ready")
    assert ready["reason"] == "QueueUnavailable"
    assert "The API server rejected the Workload of queue team: exceeded quota" in ready["message"]
    assert not found.pods()
    refuse, found.cluster.refuse = found.cluster.refuse, lambda path, body: None
    await found.run(WAITING_RETRY_SECONDS + 5, 5)
    found.admit("refused", 2)
    await found.run(20)
    assert found.true("refused", "Ready")

    found.cluster.refuse = refuse
    made = found.workload("refused")
    del found.cluster.objects[f"{WORKLOADS}/{made['metadata']['name']}"]
    found.watch.remove(made)
    found.crash("refused-w0-0")
    await found.run(60)
    assert found.true("refused", "Ready")
    assert found.status("refused")["mesh"]["generation"] == 2


async def test_a_job_that_runs_goes_on_when_kueue_is_uninstalled() -> None:
    found = world()
    found.submit(queued("goes-on", 2))
    await found.run(3)
    found.admit("goes-on", 2)
    await found.run(20)
    made = found.workload("goes-on")
    del found.cluster.objects[f"{WORKLOADS}/{made['metadata']['name']}"]
    found.cluster.refuse = lambda path, body: (
        ApiError(404, "NotFound", "the server could not find the requested resource")
        if path.endswith("/workloads")
        else None
    )
    found.watch.remove(made)
    await found.run(5)
    assert found.watch.doubted, "the watch looks whether Kueue is still there"
    found.watch.state = KueueState.ABSENT
    found.crash("goes-on-w0-0")
    await found.run(60)
    assert found.true("goes-on", "Ready")
    assert found.status("goes-on")["mesh"]["generation"] == 2


class Discovery(Queues):
    """An API server that serves a version of Kueue, or none."""

    served = ""

    async def get(self, path: str) -> KubeObject:
        if path == "/apis/kueue.x-k8s.io" and self.served:
            return {"versions": [{"version": self.served}]}
        if path == f"/apis/kueue.x-k8s.io/{self.served}":
            return {"resources": [{"name": "workloads"}, {"name": "workloads/status"}]}
        return await super().get(path)

    @asynccontextmanager
    async def stream(self, path: str, query: Mapping[str, str], idle: float) -> AsyncIterator[asyncio.StreamReader]:
        if f"/{self.served}/" not in path:
            raise ApiError(404, "NotFound", path)
        await asyncio.sleep(3600)
        yield asyncio.StreamReader()


async def test_a_cluster_that_loses_kueue_or_gets_another_version_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ABSENT_SECONDS", "ERROR_SECONDS", "SERVED_SECONDS"):
        monkeypatch.setattr(kueue_watch, name, 0.01)
    cluster, seen = Discovery(lambda: NOW), list[KueueState]()
    cluster.served = "v1beta1"
    watch = KueueWatch(cluster, WatchLiveness(OperatorMetrics(), 60), (), 60, lambda key: seen.append(watch.state))
    running = asyncio.create_task(watch.run())
    try:
        watch.want()
        for served, known in (("v1beta1", "Watched"), ("", "Absent"), ("v1beta2", "Watched"), ("v1beta1", "v1beta1")):
            cluster.served = served

            async def noticed(known: str = known) -> bool:
                return known in (watch.state, watch.version)

            await until(noticed, f"{known} is noticed")
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert seen[:3] == [KueueState.WATCHED, KueueState.ABSENT, KueueState.WATCHED]


# MultiKueue.


async def test_a_job_for_another_cluster_gets_a_workload_and_no_pods() -> None:
    found = world()
    found.submit(queued("away", 2, managedBy=labels.MULTIKUEUE))
    await found.run(10)
    assert found.workload("away")["spec"]["podSets"][0]["count"] == 2
    found.admit("away", 2)
    await found.run(10)
    assert not found.pods()
    assert not found.status("away").get("conditions"), "its status is that of the other cluster"


def sent_workload(count: int, gpus: int) -> KubeObject:
    """The Workload that MultiKueue sends with a job."""
    amounts = {"limits": {labels.GPU_RESOURCE: str(gpus)}}
    template = {"spec": {"containers": [{"name": "worker", "resources": amounts}]}}
    pod_set = {"name": "workers", "count": count, "template": template}
    return {"metadata": {"name": "sent-by-manager"}, "spec": {"queueName": "team", "podSets": [pod_set]}}


@pytest.mark.parametrize(
    ("count", "gpus", "text"),
    [(1, 2, "asks for 1 pod, and the job needs 2"), (2, 0, "asks for 0 GPUs per pod, and the job needs 2")],
)
async def test_a_job_runs_with_no_smaller_quota_than_it_needs(count: int, gpus: int, text: str) -> None:
    found = world()
    body = queued("sent", 2)
    body["metadata"]["annotations"] = {labels.KUEUE_PREBUILT: "sent-by-manager"}
    found.cluster.put(f"{WORKLOADS}/sent-by-manager", sent_workload(count, gpus))
    found.submit(body)
    await found.run(180, 5)
    assert text in found.condition("sent", "Ready")["message"]
    assert not found.pods()
    assert "ownerReferences" not in found.cluster.objects[f"{WORKLOADS}/sent-by-manager"]["metadata"]


async def test_a_job_takes_no_workload_that_came_with_another_job() -> None:
    """MultiKueue copies the labels of the Workload that the operator of the manager cluster has made."""
    found = world()
    sent = sent_workload(2, 2)
    sent["metadata"]["labels"] = {labels.LABEL_JOB: "sent"}
    found.cluster.put(f"{WORKLOADS}/sent-by-manager", sent)
    for name in ("thief", "sent"):
        body = queued(name, 2)
        body["metadata"]["annotations"] = {labels.KUEUE_PREBUILT: "sent-by-manager"}
        found.submit(body)
        await found.run(30)
    text = "Workload sent-by-manager came with job sent, and not with this one"
    assert text in found.condition("thief", "Ready")["message"]
    assert found.workload("sent")["metadata"]["ownerReferences"][0]["name"] == "sent"


async def test_a_workload_of_somebody_else_with_the_jobs_name_for_it_is_named() -> None:
    found = world()
    body = queued("job", 2)
    found.submit(body)
    uid = found.cluster.objects[f"{JOBS}/job"]["metadata"]["uid"]
    name = workload_name("job", uid)
    found.cluster.put(f"{WORKLOADS}/{name}", {"metadata": {"name": name}, "spec": {"podSets": []}})
    await found.run(60, 5)
    assert f"Workload {name} exists and does not belong to this job" in found.condition("job", "Ready")["message"]
    assert not found.pods()


@pytest.mark.parametrize("where", ["labels", "annotations"], ids=["Kueue before 0.18", "Kueue 0.18"])
async def test_a_job_from_another_cluster_takes_the_workload_that_came_with_it(where: str) -> None:
    found = world()
    body = queued("sent", 2)
    body["metadata"].setdefault(where, {})[labels.KUEUE_PREBUILT] = "sent-by-manager"
    found.submit(body)
    await found.run(10)
    assert "Waiting for Workload sent-by-manager" in found.condition("sent", "Ready")["message"]
    found.cluster.put(f"{WORKLOADS}/sent-by-manager", sent_workload(2, 2))
    await found.run(180, 5)
    assert found.workload("sent")["metadata"]["ownerReferences"][0]["name"] == "sent"
    found.admit("sent", 2)
    await found.run(20)
    assert found.true("sent", "Ready")
    assert len(list(found.cluster.of("workloads"))) == 1


@pytest.mark.parametrize(
    "change",
    [{"namespace": "other"}, {"ownerReferences": []}, {"ownerReferences": [{"uid": "somebody", "controller": True}]}],
    ids=["of another namespace", "without an owner", "of another owner"],
)
async def test_a_workload_that_only_has_the_label_of_a_job_does_not_stop_it(change: dict[str, Any]) -> None:
    found = world()
    found.submit(queued("job", 2))
    await found.run(10)
    found.admit("job", 2)
    await found.run(20)
    assert found.true("job", "Ready")
    own = found.workload("job")
    forged = {**own, "metadata": {**own["metadata"], "name": "forged", "uid": "forged", **change}, "status": {}}
    found.watch.put(forged)
    await found.run(20)
    assert found.true("job", "Ready"), found.condition("job", "Ready")
    found.watch.remove(forged)
    await found.run(20)
    assert found.true("job", "Ready")
    assert found.status("job")["mesh"]["generation"] == 1


# The forms of the API.


def demand(**fields: Any) -> Demand:
    return Demand("team", 4, None, 2, spec(**fields))


def test_the_workload_has_the_fields_of_each_version() -> None:
    class_of_kueue = Priority(7, "kueue.x-k8s.io", "prod")
    new = workload("j", "default", "u" * 36, demand(), class_of_kueue, "v1beta2", suspended=False)
    reference = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "prod"}
    assert new["spec"]["priorityClassRef"] == reference
    old = workload("j", "default", "u" * 36, demand(), class_of_kueue, "v1beta1", suspended=True)
    assert (old["apiVersion"], old["spec"]["active"]) == ("kueue.x-k8s.io/v1beta1", False)
    assert old["spec"]["priorityClassName"] == "prod"
    assert old["spec"]["priorityClassSource"] == "kueue.x-k8s.io/workloadpriorityclass"
    of_pods = Priority(7, "scheduling.k8s.io", "prod").fields("v1beta1")
    assert of_pods["priorityClassSource"] == "scheduling.k8s.io/priorityclass"


def test_a_topology_is_asked_for_as_by_the_pods_of_other_jobs() -> None:
    asked = {"kueue.x-k8s.io/podset-required-topology": "rack"}
    made = demand(workers={"image": "i", "gpusPerWorker": 2, "annotations": asked}).pod_set
    assert made["topologyRequest"] == {"required": "rack"}
    assert "topologyRequest" not in demand().pod_set


def test_the_name_of_a_workload_is_short_and_its_own() -> None:
    assert workload_name("train", "12345678-aaaa") == "ptj-train-12345678"
    assert len(workload_name("x" * 63, "12345678-aaaa")) == 63


def test_domains_are_read_in_both_forms() -> None:
    nodes = {
        name: {"metadata": {"name": name, "labels": {"block": block, "rack": rack}}}
        for name, block, rack in (("a", "b1", "r1"), ("b", "b1", "r2"), ("c", "b1", "r2"), ("d", "b2", "r1"))
    }
    levels = ["block", "rack"]
    old = {"levels": levels, "domains": [{"values": ["b1", "r2"], "count": 3}, {"values": ["b2", "r1"], "count": 1}]}
    values = [
        {"individual": {"roots": ["1", "2"], "prefix": "b"}},
        {"individual": {"roots": ["r2", "r1"]}},
    ]
    part = {"domainCount": 2, "valuesPerLevel": values, "podCounts": {"individual": [3, 1]}}
    new = {"levels": levels, "slices": [part]}
    for form in (old, new):
        found = list(state.domains_of(form, nodes))
        assert [(one.name, set(one.nodes), one.workers) for one in found] == [
            ("b1/r2", {"b", "c"}, 3),
            ("b2/r1", {"d"}, 1),
        ]


def test_a_domain_of_several_nodes_gives_each_job_exactly_its_workers() -> None:
    inventory = Inventory.from_objects([node(f"n{n}", f"r{n // 2}", 4) for n in range(6)], [])

    seen = replace(
        observed([]),
        admission=Admission(
            admitted=True,
            domains=(Domain("r0", frozenset({"n0", "n1"}), 3), Domain("r2", frozenset({"n4", "n5"}), 1)),
        ),
    )
    request = PlacementRequest.of(JobKey("default", "train"), small("train", 4), seen, since=NOW, restarts=False)
    left = within_domains(request, inventory.nodes, {})
    assert {name: one.free.gpus for name, one in left.items() if not one.unusable} == {"n0": 4, "n1": 2, "n4": 2}
    assert left["n2"].unusable == NOT_ASSIGNED
    with_kept = replace(request, assigned_nodes={0: "n0", 1: "n0", 2: "n4"})
    left = within_domains(with_kept, inventory.nodes, {})
    assert {name: one.free.gpus for name, one in left.items() if not one.unusable} == {"n0": 2}, "one worker is left"


def test_what_a_queue_requires_of_nodes_is_added_once() -> None:
    toleration = Toleration(key="team", operator="Exists")
    admission = Admission(admitted=True, node_labels={"pool": "b"}, tolerations=(toleration, toleration))
    placed = admission.placed(spec(workers={"image": "i", "gpusPerWorker": 2, "nodeSelector": {"a": "b"}}))
    assert placed.workers.node_selector == {"a": "b", "pool": "b"}
    assert toleration in placed.workers.tolerations
    plain = spec()
    assert Admission(admitted=True).placed(plain) is plain


@pytest.mark.parametrize(
    ("before", "ready", "reason"),
    [
        (None, False, "WaitForStart"),
        (None, True, "Started"),
        (("True", "Started"), False, "WaitForRecovery"),
        (("False", "WaitForRecovery"), True, "Recovered"),
        (("True", "Started"), True, None),
    ],
)
def test_whether_pods_are_ready_is_reported_as_by_kueues_own_integrations(
    before: tuple[str, str] | None, ready: bool, reason: str | None
) -> None:
    old = [{"type": "PodsReady", "status": before[0], "reason": before[1]}] if before else []
    found = state.pods_ready({"metadata": {}, "status": {"conditions": old}}, ready, NOW + timedelta(seconds=1))
    assert (found["reason"] if found else None) == reason
