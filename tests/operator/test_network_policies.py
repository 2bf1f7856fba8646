"""The NetworkPolicies of jobs: which pods they select, what they allow, and when they are created."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from meshwright.api import labels
from meshwright.api.objects import KubeObject, service_name
from meshwright.api.status import WorkerPlacement
from meshwright_operator import settings
from meshwright_operator.manifests.network_policy import NetworkPolicyOptions, network_policy
from meshwright_operator.manifests.worker_pod import PodContext, worker_pod
from tests.operator.builders import spec
from tests.operator.memory import MemoryCluster
from tests.operator.support import JOBS, PODS
from tests.operator.test_gang_races import small
from tests.operator.test_owned_objects import foreign
from tests.operator.world import World

POLICIES = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"
MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
COORDINATOR = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "meshwright"}}}
STORE = {"to": [{"ipBlock": {"cidr": "10.20.0.0/16"}}], "ports": [{"protocol": "TCP", "port": 443}]}


class Guarded(World):
    """A cluster whose administrator wants NetworkPolicies."""

    network_policies = NetworkPolicyOptions()


class Recorded(MemoryCluster):
    """Remembers what was created, in order."""

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(now)
        self.created: list[KubeObject] = []

    async def create(self, path: str, body: KubeObject) -> KubeObject:
        self.created.append(body)
        return await super().create(path, body)


def policies(world: World) -> dict[str, KubeObject]:
    return {path: obj for path, obj in world.cluster.objects.items() if path.startswith(POLICIES)}


def selects(selector: KubeObject, pod: KubeObject) -> bool:
    """Whether a label selector that has only `matchLabels` selects a pod."""
    assert set(selector) == {"matchLabels"}
    return bool(selector["matchLabels"].items() <= pod["metadata"]["labels"].items())


def pods_of(name: str, uid: str, **workers: Any) -> list[KubeObject]:
    fields = spec(workers={"image": "i", "gpusPerWorker": 1, **workers})
    context = PodContext(name, "default", uid, fields, "r", "http://coordinator:9470", "secret")
    return [
        worker_pod(context, WorkerPlacement(worker=n, incarnation=n, pod=f"{name}-w{n}-{n}", node="n", ranks=str(n)))
        for n in range(3)
    ]


def test_the_selectors_match_exactly_the_pods_of_the_job() -> None:
    first, again, longer = "0f1e2d3c-0000-4000", "0f1e2d3c-1111-4000", "99999999-0000-4000"
    mine = pods_of("train", first)
    # The job of the same name that was deleted, one whose name begins as this one's, and one that copies its labels.
    copied = {labels.LABEL_JOB: "train", labels.LABEL_JOB_UID: first}
    others = [*pods_of("train", again), *pods_of("train-2", longer), *pods_of("copies", longer, labels={"team": "a"})]
    others.append({"metadata": {"labels": {"app": "web"}}})
    body = network_policy("train", "default", first, NetworkPolicyOptions())
    peer = body["spec"]["ingress"][0]["from"][0]["podSelector"]
    for selector in (body["spec"]["podSelector"], peer, body["spec"]["egress"][0]["to"][0]["podSelector"]):
        assert [pod for pod in [*mine, *others] if selects(selector, pod)] == mine
        assert selector["matchLabels"] == copied


def test_what_is_allowed() -> None:
    options = NetworkPolicyOptions((MONITORING,), (COORDINATOR,), 9470, (STORE,))
    allowed = network_policy("train", "default", "uid", options)["spec"]
    assert allowed["policyTypes"] == ["Ingress", "Egress"]
    peers, metrics = allowed["ingress"]
    assert "ports" not in peers, "rendezvous, NCCL and Gloo choose their ports"
    assert metrics == {"from": [MONITORING], "ports": [{"protocol": "TCP", "port": labels.METRICS_PORT}]}
    same, coordinator, dns, store = allowed["egress"]
    assert (same["to"], "ports" in same) == (peers["from"], False)
    assert coordinator == {"to": [COORDINATOR], "ports": [{"protocol": "TCP", "port": 9470}]}
    assert dns == {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}
    assert store == STORE
    default = network_policy("train", "default", "uid", NetworkPolicyOptions())["spec"]
    assert "from" not in default["ingress"][1], "everyone may scrape"
    assert "to" not in default["egress"][1], "the coordinator may be outside of the cluster"


async def test_each_job_gets_one_before_its_pods_and_owns_it() -> None:
    world = Guarded(1, nodes=4, cluster=Recorded)
    assert isinstance(world.cluster, Recorded)
    world.submit(small("one", 2))
    world.submit(small("two", 2))
    await world.run(30)
    assert world.true("one", "Ready")
    assert world.true("two", "Ready")
    found = policies(world)
    for name in ("one", "two"):
        uid = world.cluster.objects[f"{JOBS}/{name}"]["metadata"]["uid"]
        metadata = found[f"{POLICIES}/{service_name(name, uid)}"]["metadata"]
        (owner,) = metadata["ownerReferences"]
        assert (owner["name"], owner["uid"], owner["controller"]) == (name, uid, True)
    assert len(found) == 2
    kinds = [body["kind"] for body in world.cluster.created if body["kind"] in ("Pod", "NetworkPolicy")]
    assert kinds == ["NetworkPolicy", "Pod", "Pod"] * 2
    before = copy.deepcopy(found)
    await world.evict(world.pods("one")[0].name)
    await world.run(60)
    assert policies(world) == before, "created once, and never written again"


async def test_without_the_option_or_with_the_annotation_there_is_none() -> None:
    plain, guarded = World(1, nodes=2), Guarded(1, nodes=2)
    plain.submit(small("job", 2))
    body = small("job", 2)
    body["metadata"]["annotations"] = {labels.ANNOTATION_NETWORK_POLICY: "None"}
    guarded.submit(body)
    for world in (plain, guarded):
        await world.run(30)
        assert world.true("job", "Ready")
        assert policies(world) == {}


async def test_a_policy_of_somebody_else_with_the_exact_name_is_reported_and_never_changed() -> None:
    world = Guarded(6, nodes=2)
    world.submit(small("mine", 2))
    uid = world.cluster.objects[f"{JOBS}/mine"]["metadata"]["uid"]
    path = f"{POLICIES}/{service_name('mine', uid)}"
    before = copy.deepcopy(world.cluster.put(path, foreign("NetworkPolicy", path.rsplit("/", 1)[1])))
    await world.run(5)
    placed = world.condition("mine", "Placed")
    assert placed["reason"] == "NameTaken"
    assert f"NetworkPolicy {service_name('mine', uid)} exists and does not belong" in placed["message"]
    assert world.cluster.objects[path] == before
    assert [path for path in world.cluster.objects if path.startswith(PODS)] == []


def test_the_options_of_the_flag() -> None:
    given = {"metricsFrom": [MONITORING], "coordinator": [COORDINATOR], "coordinatorPort": 7000, "egress": [STORE]}
    arguments = ["--coordinator-url=https://c:1", f"--job-network-policies={json.dumps(given)}"]
    options = settings.parse(arguments, {}).job_network_policies
    assert options == NetworkPolicyOptions((MONITORING,), (COORDINATOR,), 7000, (STORE,))
    assert settings.parse(["--coordinator-url=https://c:1"], {}).job_network_policies is None
    named = {"MESHWRIGHT_OPERATOR_JOB_NETWORK_POLICIES": "{}"}
    assert settings.parse(["--coordinator-url=https://c:1"], named).job_network_policies == NetworkPolicyOptions()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("yes", "must be a JSON object"),
        ("[]", "must be a JSON object"),
        ('{"metricFrom": []}', "unknown field `metricFrom`: use metricsFrom"),
        ('{"egress": {}}', "`egress` must be a list of objects"),
        ('{"coordinator": ["all"]}', "`coordinator` must be a list of objects"),
        ('{"coordinatorPort": 0}', "`coordinatorPort` must be a port, got 0"),
        ('{"coordinatorPort": true}', "`coordinatorPort` must be a port, got True"),
    ],
)
def test_wrong_options_are_refused_by_name(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.parse(["--coordinator-url=https://c:1", f"--job-network-policies={text}"], {})
    assert message in capsys.readouterr().err
