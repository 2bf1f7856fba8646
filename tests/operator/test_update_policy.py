"""`spec.updatePolicy` in virtual time: an edit that restarts the gang waits for a checkpoint or for another restart."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.operator.support import JOBS
from tests.operator.test_elastic import FOREVER, edit, events, pods, set_ready
from tests.operator.test_replicas_continue import MemoryWorld, continuing, recovered
from tests.operator.test_settling import submitted
from tests.operator.world import World


async def training(seed: int, nodes: int = 3, **spec: Any) -> World:
    world = World(seed, nodes=nodes, work=FOREVER)
    body = submitted("job", 2)
    body["spec"] |= {"checkpoint": {"claimName": "shared"}, **spec}
    world.submit(body)
    await world.run(30)
    assert world.true("job", "Ready")
    return world


def change_image(world: World, image: str, **spec: Any) -> None:
    workers = world.cluster.objects[f"{JOBS}/job"]["spec"]["workers"]
    edit(world, "job", workers={**workers, "image": image}, **spec)


def save(world: World, step: int) -> None:
    """A checkpoint is complete, as a report of rank 0 says."""
    new = copy.deepcopy(world.cluster.objects[f"{JOBS}/job"])
    new["status"]["checkpoint"] = {"step": step, "time": "2026-01-02T03:04:05Z", "path": "/c"}
    world.cluster.update(f"{JOBS}/job", new)


def images(world: World) -> set[str]:
    bodies = [obj for obj in world.cluster.of("pods") if obj["status"]["phase"] == "Running"]
    return {container["image"] for obj in bodies for container in obj["spec"]["containers"]}


async def test_an_edit_waits_for_the_next_checkpoint() -> None:
    world = await training(1, updatePolicy="AtCheckpoint")
    save(world, 10)
    await world.run(5)
    before = pods(world, "job")
    change_image(world, "two")
    await world.run(60)
    assert pods(world, "job") == before
    waiting = world.status("job")["waitingEdit"]
    assert (waiting["waitsFor"], waiting["checkpointStep"]) == ("Checkpoint", 10)
    assert world.condition("job", "Ready")["reason"] == "EditWaits"
    assert "next checkpoint" in world.condition("job", "Ready")["message"]
    assert len(events(world, "job", "EditWaits")) == 1
    save(world, 20)
    await world.run(60)
    assert images(world) == {"two"}
    assert world.true("job", "Ready")
    assert "waitingEdit" not in world.status("job")


async def test_an_edit_that_does_not_fit_at_its_checkpoint_waits_for_nodes_and_not_for_another_checkpoint() -> None:
    world = await training(8, nodes=4, updatePolicy="AtCheckpoint")
    set_ready(world, "n3", False)
    save(world, 10)
    edit(world, "job", replicas=4)
    await world.run(10)
    waiting = world.status("job")["waitingEdit"]
    save(world, 20)
    await world.run(40)
    assert world.condition("job", "Ready")["reason"] == "EditDoesNotFit"
    assert world.status("job")["waitingEdit"] == {**waiting, "waitsFor": "Nodes"}
    assert world.status("job")["mesh"]["generation"] == 1
    assert len(events(world, "job", "EditDoesNotFit")) == 1
    set_ready(world, "n3", True)
    await world.run(60)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert len(pods(world, "job")) == 4
    assert "waitingEdit" not in world.status("job")


async def test_an_edit_waits_for_a_restart_of_another_cause() -> None:
    world = await training(2, updatePolicy="OnRestart")
    before = pods(world, "job")
    change_image(world, "two")
    save(world, 20)
    await world.run(60)
    assert pods(world, "job") == before
    assert world.status("job")["waitingEdit"]["waitsFor"] == "Restart"
    world.crash(sorted(before)[0])
    await world.run(90)
    assert images(world) == {"two"}
    assert world.true("job", "Ready"), world.condition("job", "Ready")


@pytest.mark.parametrize("policy", ["OnRestart", "AtCheckpoint"])
async def test_an_edit_that_waits_takes_no_steps_from_ranks_that_recover_in_memory(policy: str) -> None:
    world = MemoryWorld(9, nodes=5, work=FOREVER)
    body = continuing("job", 3, pauseSeconds=10)
    body["spec"]["updatePolicy"] = policy
    world.submit(body)
    await world.run(40)
    change_image(world, "two")
    await world.run(10)
    world.crash(sorted(pods(world, "job"))[1])
    await world.run(60)
    assert world.status("job")["replicas"] == 3
    assert world.condition("job", "Ready")["reason"] == "EditWaits"
    assert images(world) != {"two"}
    assert recovered(world, "job")[1] > 30, "no step is repeated"
    edit(world, "job", updatePolicy="Now")
    await world.run(60)
    assert images(world) == {"two"}
    assert world.true("job", "Ready")


async def test_an_edit_waits_for_no_recovery_that_waits_for_nodes() -> None:
    world = MemoryWorld(10, nodes=3, work=FOREVER)
    body = submitted("job", 3)
    body["spec"] |= {"checkpoint": {"claimName": "shared"}, "updatePolicy": "OnRestart"}
    body["spec"] |= {"recovery": {"inMemory": True}, "parallelism": {**body["spec"]["parallelism"], "zeroStage": 0}}
    world.submit(body)
    await world.run(40)
    assert world.status("job")["mesh"]["inMemory"]
    set_ready(world, next(pod.node for pod in world.pods("job")), False)
    await world.run(60)
    assert not world.true("job", "Placed")
    edit(world, "job", replicas=2)
    await world.run(60)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert len(pods(world, "job")) == 2


async def test_a_second_edit_replaces_the_one_that_waits_and_one_that_is_taken_back_waits_no_more() -> None:
    world = await training(3, updatePolicy="OnRestart")
    before, image = pods(world, "job"), next(iter(images(world)))
    change_image(world, "two")
    await world.run(20)
    first = world.status("job")["waitingEdit"]["revision"]
    change_image(world, "three")
    await world.run(20)
    assert world.status("job")["waitingEdit"]["revision"] != first
    change_image(world, image)
    await world.run(20)
    assert "waitingEdit" not in world.status("job")
    assert world.true("job", "Ready")
    assert pods(world, "job") == before


async def test_an_edit_of_the_policy_restarts_nothing_and_takes_effect_at_once() -> None:
    world = await training(4)
    applied = world.status("job")["plan"]["revision"]
    edit(world, "job", updatePolicy="OnRestart")
    await world.run(20)
    assert world.status("job")["mesh"]["generation"] == 1
    assert world.status("job")["plan"]["revision"] == applied
    change_image(world, "two")
    await world.run(20)
    assert world.status("job")["mesh"]["generation"] == 1
    edit(world, "job", updatePolicy="Now")
    await world.run(60)
    assert images(world) == {"two"}


async def test_a_suspended_job_takes_every_edit_at_once() -> None:
    world = await training(5, updatePolicy="OnRestart")
    edit(world, "job", suspend=True)
    await world.run(30)
    change_image(world, "two")
    await world.run(30)
    assert "waitingEdit" not in world.status("job")
    edit(world, "job", suspend=False)
    await world.run(60)
    assert images(world) == {"two"}
    assert world.true("job", "Ready")


async def test_an_invalid_edit_does_not_wait() -> None:
    world = await training(6, updatePolicy="OnRestart")
    edit(world, "job", parallelism={"tensor": 3, "pipeline": 1, "microBatches": 1})
    await world.run(30)
    assert "waitingEdit" not in world.status("job")
    assert world.true("job", "Stalled")


async def test_an_operator_that_starts_anew_leaves_the_edit_waiting() -> None:
    world = await training(7, updatePolicy="AtCheckpoint")
    before = pods(world, "job")
    change_image(world, "two")
    await world.run(20)
    waiting = world.status("job")["waitingEdit"]
    world.cluster.watchers.clear()
    world.operators = [world.operator()]
    for operator in world.operators:
        operator.begin_list()()
    await world.run(60)
    assert pods(world, "job") == before
    assert world.status("job")["waitingEdit"] == waiting
