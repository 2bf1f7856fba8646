"""The objects that a job owns: created, never taken over, and found again under their names."""

from __future__ import annotations

import asyncio
import copy

from meshwright.api.objects import KubeObject, secret_name, service_name
from meshwright_operator.kube.client import ApiError
from meshwright_operator.kube.pod_info import read_pod
from tests.operator.support import JOBS, PODS, job
from tests.operator.test_gang_races import small
from tests.operator.world import World

SERVICES = "/api/v1/namespaces/default/services"
SECRETS = "/api/v1/namespaces/default/secrets"


def foreign(kind: str, name: str) -> KubeObject:
    """An object that a user made."""
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "labels": {"app": "theirs"}}, "spec": {}}


def same_uid_prefix(world: World, kind: str, path: str) -> None:
    """An object with exactly the name that the job's own will have: its creator has seen the job's uid."""
    world.cluster.put(path, foreign(kind, path.rsplit("/", 1)[1]))


async def test_a_service_of_somebody_else_with_the_exact_name_is_reported_and_never_changed() -> None:
    world = World(6, nodes=2)
    world.submit(small("mine", 2))
    uid = world.cluster.objects[f"{JOBS}/mine"]["metadata"]["uid"]
    path = f"{SERVICES}/{service_name('mine', uid)}"
    same_uid_prefix(world, "Service", path)
    before = copy.deepcopy(world.cluster.objects[path])
    await world.run(5)
    placed = world.condition("mine", "Placed")
    assert (placed["reason"], world.true("mine", "Stalled")) == ("NameTaken", True)
    assert f"Service {service_name('mine', uid)} exists and does not belong to this job" in placed["message"]
    assert world.cluster.objects[path] == before
    assert not world.pods("mine")
    world.cluster.remove(path)
    await world.run(60)
    assert world.true("mine", "Ready")


def test_the_name_of_a_secret_states_its_contents() -> None:
    first = secret_name("mine", "0f1e2d3c-0000", {"token": "a"})
    assert first == secret_name("mine", "0f1e2d3c-0000", {"token": "a"})
    others = [{"token": "b"}, {"token": "a", "ca.crt": "c"}, {"token": "a\0ca.crt\0c"}, {"tokena": ""}]
    names = {secret_name("mine", "0f1e2d3c-0000", data) for data in others}
    assert len(names | {first}) == 5


async def test_a_secret_that_exists_under_the_jobs_name_is_the_jobs_own_and_is_not_written_again() -> None:
    world = World(7, nodes=2)
    world.submit(small("mine", 2))
    await world.run(15)
    (secret,) = [obj for path, obj in world.cluster.objects.items() if path.startswith(SECRETS)]
    before = copy.deepcopy(secret)
    world.crash("mine-w1-0")
    await world.run(20)
    assert world.true("mine", "Ready")
    assert [obj for path, obj in world.cluster.objects.items() if path.startswith(SECRETS)] == [before]
    names = [
        entry["valueFrom"]["secretKeyRef"]["name"]
        for obj in world.cluster.of("pods")
        for entry in obj["spec"]["containers"][0]["env"]
        if "secretKeyRef" in entry.get("valueFrom", {})
    ]
    assert set(names) == {before["metadata"]["name"]}


def delete_job(world: World, name: str) -> None:
    """What `kubectl delete` does: the job is gone at once, and the garbage collector deletes its pods gracefully."""
    world.cluster.remove(f"{JOBS}/{name}")


async def collect(world: World, name: str) -> None:
    for pod in world.pods(name):
        await world.evict(pod.name)


async def test_a_job_takes_no_service_or_secret_over_that_has_its_name() -> None:
    world = World(1, nodes=2)
    theirs = {
        f"{SERVICES}/mine": foreign("Service", "mine"),
        f"{SECRETS}/mine": foreign("Secret", "mine"),
        f"{SECRETS}/mine-coordinator": foreign("Secret", "mine-coordinator"),
    }
    for path, body in theirs.items():
        world.cluster.put(path, body)
    before = {path: copy.deepcopy(world.cluster.objects[path]) for path in theirs}
    world.submit(small("mine", 2))
    await world.run(15)
    assert world.true("mine", "Ready")
    assert {path: world.cluster.objects[path] for path in theirs} == before


async def test_a_job_that_is_applied_at_once_after_its_deletion_waits_for_the_old_pods_and_then_runs() -> None:
    world = World(2, nodes=4)
    world.submit(small("again", 2))
    await world.run(15)
    assert world.true("again", "Ready")
    old = {pod.uid for pod in world.pods("again")}
    delete_job(world, "again")
    world.submit(small("again", 2))
    await world.run(5)
    ready = world.condition("again", "Ready")
    assert ready["reason"] == "WaitingForOldPods", ready
    assert "pod again-w0-0 (and 1 more) of the deleted job with the same name" in ready["message"]
    assert {pod.uid for pod in world.pods("again")} == old, "nothing is created beside them"
    await collect(world, "again")
    await world.run(20)
    assert world.true("again", "Ready")
    pods = world.pods("again")
    assert [pod.name for pod in sorted(pods, key=lambda pod: pod.name)] == ["again-w0-0", "again-w1-0"]
    assert not old & {pod.uid for pod in pods}
    assert "RequestRejected" not in world.operators[0].notes.reasons("again")


async def test_old_pods_that_never_go_are_reported_and_the_job_runs_when_they_have_gone() -> None:
    world = World(3, nodes=4)
    world.submit(small("again", 2))
    await world.run(15)
    delete_job(world, "again")
    world.submit(small("again", 2))
    await world.run(400)
    ready, placed = world.condition("again", "Ready"), world.condition("again", "Placed")
    assert placed["reason"] == "NameTaken", placed
    assert "again-w0-0" in ready["message"]
    assert world.true("again", "Stalled")
    for pod in world.pods("again"):
        world.crash(pod.name)
    await world.run(600)
    assert world.true("again", "Ready")


async def test_a_pod_of_somebody_else_is_reported_and_never_changed() -> None:
    world = World(4, nodes=2)
    body = foreign("Pod", "mine-w1-0")
    before = copy.deepcopy(world.cluster.put(f"{PODS}/mine-w1-0", body))
    world.submit(small("mine", 2))
    await world.run(3)
    placed = world.condition("mine", "Placed")
    assert (placed["status"], placed["reason"]) == ("False", "NameTaken")
    assert "Pod mine-w1-0 exists and does not belong to this job" in placed["message"]
    assert world.true("mine", "Stalled")
    assert world.cluster.objects[f"{PODS}/mine-w1-0"] == before
    assert all(pod.gates for pod in world.pods("mine")), "nothing was started"


async def test_the_name_of_a_labeled_pod_of_somebody_else_is_passed_over() -> None:
    world = World(5, nodes=2)
    labeled = foreign("Pod", "mine-w1-0")
    labeled["metadata"]["labels"] = {"meshwright.dev/job-name": "mine"}
    assert read_pod({**labeled, "metadata": {**labeled["metadata"], "uid": "x"}}) is not None
    world.cluster.put(f"{PODS}/mine-w1-0", labeled)
    world.submit(small("mine", 2))
    await world.run(15)
    assert world.true("mine", "Ready")
    assert {pod.name for pod in world.pods("mine") if pod.owner} == {"mine-w0-0", "mine-w1-1"}


async def test_the_service_and_the_secret_are_created_while_the_status_is_written_and_pods_only_after_it() -> None:
    world = World(seed=1, nodes=6)
    merge_patch, during = world.cluster.merge_patch, list[list[str]]()

    async def slow(path: str, body: KubeObject) -> KubeObject:
        if path.endswith("/status") and "placement" in body["status"] and len(during) < 2:
            for _ in range(10):
                await asyncio.sleep(0)
            during.append([kind for kind in ("services", "secrets", "pods") if any(world.cluster.of(kind))])
            if len(during) == 1:
                raise ApiError(0, "Unreachable", "connection reset")
        return await merge_patch(path, body)

    world.cluster.merge_patch = slow  # type: ignore[method-assign]
    world.submit(job("train"))
    await world.run(60)
    assert during == [["services", "secrets"]] * 2, "also after a write that failed"
    assert world.true("train", "Ready")
