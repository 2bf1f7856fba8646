"""The administrator's profiles: what the document may say, who may use one, and what a job keeps of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.api.status import ParallelTrainingJobStatus
from meshwright.profiles.document import Profiles, ProfilesError, parse_profiles
from meshwright_operator.administrator_files import policy_file, profiles_file
from meshwright_operator.coordinator.tokens import Tokens
from meshwright_operator.documents import DocumentError
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.profiles.applied import AppliedProfile, choose_profile
from tests.operator.support import JOBS, PODS
from tests.operator.test_gang_races import small
from tests.operator.world import Operator, World

RDMA = """
rdma:
  namespaces: [default, research-*]
  runAsRoot: true
  capabilities: [IPC_LOCK]
  env: [{name: NCCL_IB_HCA, value: mlx5}]
  sidecars:
  - {name: daemon, image: daemon:1, cpu: 500m, memory: 1Gi}
other:
  namespaces: [other]
"""
LONG = ", ".join(f"{{name: V{number}, value: {'x' * 4000}}}" for number in range(9))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: {hostPid: true}", "unknown field `a.hostPid`"),
        ("A: {}", "`A.[key]`"),
        ("a: {labels: {meshwright.dev/job-uid: x}}", "`meshwright.dev/job-uid` is reserved for the operator"),
        ("a: {annotations: {prometheus.io/port: '1'}}", "`prometheus.io/port` is reserved"),
        ("a: {env: [{name: MESHWRIGHT_TOKEN, value: x}]}", "`MESHWRIGHT_TOKEN` is set by the operator"),
        ("a: {env: [{name: RANK, value: '0'}]}", "`RANK` is set by the operator or the agent"),
        ("a: {volumes: [{name: shm, hostPath: /x}]}", "`name` is shm, which is reserved"),
        ("a: {volumes: [{name: x, hostPath: /x, mountPath: /dev/shm/x}]}", "`mountPath` is /dev/shm/x"),
        ("a: {volumes: [{name: x, hostPath: /x, mountPath: /meshwright/data}]}", "reserved for the operator"),
        ("a: {volumes: [{name: x, hostPath: /x, scratch: 1Gi}]}", "exactly one of `hostPath` and `scratch`"),
        ("a: {sidecars: [{name: worker, image: x}]}", "two containers are named `worker`"),
        ("a: {sidecars: [{name: s, image: x, mounts: [{volume: v, mountPath: /v}]}]}", "mounts `v`: add it to"),
        ("a: {capabilities: [ipc_lock]}", "`a.capabilities[0]`"),
        (f"a: {{env: [{LONG}]}}", "at most 24576 bytes"),
        ("- a", "must be a mapping from names to profiles"),
    ],
)
def test_an_invalid_document_names_the_field_and_the_fix(text: str, problem: str) -> None:
    with pytest.raises(ProfilesError) as error:
        parse_profiles(text)
    assert problem in str(error.value)


def test_only_the_namespaces_of_a_profile_may_use_it() -> None:
    profiles = parse_profiles(RDMA)
    assert not isinstance(profiles.find("rdma", "research-llm"), str)
    refused = profiles.find("rdma", "other")
    assert "does not allow in namespace other. Use one of `other`" in str(refused)
    assert "`profiles.rdma.namespaces`" in str(refused)
    assert "Did you mean `rdma`?" in str(profiles.find("rdmaa", "default"))
    assert "no such profile. Remove the field" in str(Profiles().find("rdma", "default"))


def test_both_documents_must_be_valid(tmp_path: Path) -> None:
    metrics = OperatorMetrics()
    path = tmp_path / "profiles.yaml"
    path.write_text("a: {hostPid: true}")
    policy_file(None, metrics, lambda policy: None).load()
    file = profiles_file(path, metrics, lambda profiles: None)
    with pytest.raises(DocumentError, match=r"profiles\.yaml: unknown field"):
        file.load()


async def test_a_broken_document_leaves_the_last_in_effect(tmp_path: Path) -> None:
    metrics, applied, path = OperatorMetrics(), list[Profiles](), tmp_path / "profiles.yaml"
    path.write_text("a: {}")
    policy, file = policy_file(None, metrics, lambda policy: None), profiles_file(path, metrics, applied.append)
    policy.load()
    file.load()
    path.write_text("a: {hostPid: true}")
    await file.check()
    await policy.check()
    assert len(applied) == 1
    assert metrics.registry.get_sample_value("ptj_policy_valid") == 0
    path.write_text("a: {}\nb: {}")
    await file.check()
    assert [len(one) for one in applied] == [1, 2]
    assert metrics.registry.get_sample_value("ptj_policy_valid") == 1


def chosen(document: str, record: str, *, revision: str = "2-a", has_pods: bool, key: bytes = b"k") -> Any:
    status = ParallelTrainingJobStatus(applied_profile=record)
    tokens = Tokens(key * 32)
    profiles = parse_profiles(document)

    def seal(text: str) -> str:
        return tokens.seal("default", "job", "uid", text)

    return choose_profile("rdma", "default", revision, status, profiles, seal, has_pods=has_pods)


def test_pods_keep_the_profile_of_their_revision_until_none_is_left() -> None:
    first = chosen(RDMA, "", has_pods=False)
    assert isinstance(first, AppliedProfile)
    changed = RDMA.replace("IPC_LOCK", "SYS_ADMIN")
    assert chosen(changed, first.record, has_pods=True).profile.capabilities == ["IPC_LOCK"]
    assert chosen("", first.record, has_pods=True).record == first.record
    assert chosen(changed, first.record, has_pods=False).profile.capabilities == ["SYS_ADMIN"]
    assert chosen(changed, first.record, has_pods=True, revision="2-b").profile.capabilities == ["SYS_ADMIN"]
    assert "no such profile" in chosen("", first.record, has_pods=False)


def test_a_copy_in_status_that_the_operator_has_not_written_grants_nothing() -> None:
    first = chosen(RDMA, "", has_pods=False)
    forged = json.loads(first.record)
    forged["profile"]["privileged"] = True
    for record in (json.dumps(forged), first.record[:-5], "{}", "[]", "3", '{"seal": "x"}'):
        found = chosen(RDMA, record, has_pods=True)
        assert found.record == first.record
        assert not found.profile.privileged
    assert chosen(RDMA, first.record, has_pods=True, key=b"o").record != first.record, "another key, another seal"


async def test_a_job_without_the_right_to_its_profile_says_so_and_starts_when_it_is_allowed() -> None:
    world = World(31, nodes=4, work=10**6)
    operator = world.operators[0]
    operator.profiles.use(parse_profiles("rdma: {namespaces: [research]}"))
    world.submit(with_profile("job"))
    await world.run(5)
    stalled = world.condition("job", "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "ProfileNotAllowed")
    assert "`spec.workers.profile` is `rdma`, which the administrator does not allow in namespace" in stalled["message"]
    assert operator.notes.reasons("job") == ["ProfileNotAllowed"]
    assert not world.pods()
    operator.profiles.use(parse_profiles(RDMA))
    touch(operator, "job")
    await world.run(20)
    assert world.true("job", "Ready")
    (used,) = [note.message for _, note in operator.notes.notes if note.reason == "ProfileUsed"]
    assert "capabilities IPC_LOCK; root in worker; sidecars daemon" in used


async def test_a_lost_pod_is_replaced_with_the_profile_of_the_others_and_a_restart_takes_the_new_one() -> None:
    world = World(32, nodes=4, work=10**6)
    operator = world.operators[0]
    operator.profiles.use(parse_profiles(RDMA))
    world.submit(with_profile("job"))
    await world.run(20)
    revision = world.status("job")["plan"]["revision"]
    operator.profiles.use(parse_profiles(RDMA.replace("IPC_LOCK", "SYS_ADMIN")))
    touch(operator, "job")
    await world.run(20)
    assert world.status("job")["mesh"]["generation"] == 1, "nothing restarts"
    world.crash("job-w0-0")
    await world.run(40)
    assert world.true("job", "Ready")
    assert {pod: capabilities(world, pod) for pod in names(world)} == {
        "job-w0-1": ["IPC_LOCK"],
        "job-w1-0": ["IPC_LOCK"],
    }
    for suspend in (True, False):
        job = world.cluster.objects[f"{JOBS}/job"]
        job["spec"]["suspend"] = suspend
        job["metadata"]["generation"] += 1
        world.cluster.update(f"{JOBS}/job", job)
        await world.run(60)
    assert world.true("job", "Ready")
    assert {tuple(capabilities(world, pod)) for pod in names(world)} == {("SYS_ADMIN",)}
    assert world.status("job")["plan"]["revision"] == revision
    assert operator.notes.reasons("job").count("ProfileUsed") == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"volumes": [{"name": "v", "mountPath": "/x", "scratch": "1Gi"}]}, "`spec.workers.volumes[0].name` is v"),
        ({"volumes": [{"name": "w", "mountPath": "/v", "scratch": "1Gi"}]}, "volumes[0].mountPath` is /v"),
        ({"nodeSelector": {"a": "c"}}, "`spec.workers.nodeSelector` has a: c, and profile `rdma` b"),
        ({"resources": {}}, "adds huge pages"),
    ],
)
async def test_a_job_that_contradicts_its_profile_names_the_field(fields: dict[str, Any], words: str) -> None:
    world = World(33, nodes=4, work=10**6)
    document = """
    rdma:
      namespaces: [default]
      nodeSelector: {a: b}
      hugePages: {2Mi: 4Mi}
      volumes: [{name: v, hostPath: /v, mountPath: /v}]
    """
    world.operators[0].profiles.use(parse_profiles(document))
    world.submit(with_profile("job", **fields))
    await world.run(5)
    stalled = world.condition("job", "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "ProfileConflict")
    assert words in stalled["message"]


async def test_placement_counts_what_the_profile_requests() -> None:
    world = World(34, nodes=3, work=10**6)
    world.operators[0].profiles.use(parse_profiles("rdma: {namespaces: [default], devices: {rdma/ib: 1}}"))
    world.submit(with_profile("job"))
    await world.run(5)
    assert "too little rdma/ib" in world.condition("job", "Placed")["message"]


async def test_workers_in_the_nodes_network_do_not_share_a_node() -> None:
    world = World(35, nodes=2, gpus=4, work=10**6)
    world.operators[0].profiles.use(parse_profiles("rdma: {namespaces: [default], hostNetwork: true}"))
    for name in ("first", "second"):
        world.submit(with_profile(name))
    await world.run(20)
    assert world.true("first", "Ready")
    assert sorted(pod.node for pod in world.pods("first")) == sorted(world.nodes)
    assert "too little host-port/9464" in world.condition("second", "Placed")["message"]


def with_profile(name: str, **workers: Any) -> dict[str, Any]:
    job = small(name, 2)
    job["spec"]["workers"] |= {"profile": "rdma", "resources": {"memory": "1Gi"}, **workers}
    return job


def touch(operator: Operator, name: str) -> None:
    """What the operator does with all jobs after a change of the profiles."""
    operator.queue.add(JobKey("default", name))


def names(world: World) -> list[str]:
    return sorted(pod.name for pod in world.pods() if pod.phase == "Running")


def capabilities(world: World, name: str) -> list[str]:
    pod = world.cluster.objects[f"{PODS}/{name}"]
    return list(pod["spec"]["containers"][0]["securityContext"]["capabilities"]["add"])
