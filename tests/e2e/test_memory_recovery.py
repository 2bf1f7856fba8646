"""Recovery in memory, with everything real: ranks and pods are lost, the other ranks keep their processes and state."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest

from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_local.kube.resources import EVENTS
from tests.e2e.local_stack import NAMESPACE, Stage, eventually, tiny
from tests.e2e.test_elastic import elastic, finish, runs, same_run, uids
from tests.e2e.test_recovery import same, uid_of

NAME = "inmemory"

pytestmark = pytest.mark.long


async def rank_pids(stage: Stage, pod: str, generation: int) -> dict[int, int]:
    """The processes of a pod's ranks in a generation, by rank; empty while they have not all begun."""
    found = re.findall(rf"rank (?:started|goes on) rank=(\d+) generation={generation} pid=(\d+)", await stage.log(pod))
    return {int(rank): int(pid) for rank, pid in found} if len(found) == 2 else {}


async def trains_in(stage: Stage, pod: str, generation: int) -> dict[int, int]:
    async def trains() -> dict[int, int]:
        text = await stage.log(pod)
        trained = re.findall(rf"rank trains rank=\d+ generation={generation} ", text)
        return await rank_pids(stage, pod, generation) if len(trained) == 2 else {}

    return await eventually(f"{pod} trains in generation {generation}", trains)


async def events_of(stage: Stage, uid: str) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = {}
    for event in (await stage.client.list(EVENTS, NAMESPACE)).items:
        if event["involvedObject"].get("uid") == uid:
            texts.setdefault(event["reason"], []).append(event["message"])
    return texts


async def test_a_killed_rank_and_lost_pods_cost_no_other_process_and_no_step(
    stage: Stage, reference: dict[str, Any]
) -> None:
    await stage.apply(tiny(NAME, recovery={"inMemory": True}, checkpoint={"everySteps": 1000}))
    uid = await uid_of(stage, NAME)
    await stage.trained(NAME, 8)
    first = await trains_in(stage, f"{NAME}-w0-0", 1)
    second = await trains_in(stage, f"{NAME}-w1-0", 1)

    os.kill(second[3], signal.SIGKILL)
    assert await trains_in(stage, f"{NAME}-w0-0", 2) == first
    after_kill = await trains_in(stage, f"{NAME}-w1-0", 2)
    assert after_kill[2] == second[2]
    assert after_kill[3] != second[3]

    before = await stage.trained(NAME, 20)
    await stage.delete_pod(NAME, 0, 0)
    assert await trains_in(stage, f"{NAME}-w1-0", 3) == after_kill, "also if the pod of rank 0 and the store is lost"
    await trains_in(stage, f"{NAME}-w0-1", 3)
    status = await stage.status(NAME)
    assert status.mesh is not None
    assert status.mesh.recovery is not None
    assert status.mesh.recovery.step >= before - 1
    assert status.mesh.recovery.ranks == "2-3"

    status = await stage.complete(NAME)
    assert {r.cause: r.count for r in status.restarts} == {"RankFailure": 1, "PodLost": 1}
    same(await stage.saved(NAME), reference)
    told = await events_of(stage, uid)
    assert len(told["RecoveringInMemory"]) == 2
    assert "RestartingFromCheckpoint" not in told
    assert "MemoryLost" not in told
    await stage.delete(NAME)


async def test_a_lost_pod_of_sharded_state_gets_it_from_copies_in_host_memory(stage: Stage) -> None:
    name = "copies"
    recovery = {"inMemory": True, "copyEverySteps": 4}
    await stage.apply(tiny(name, recovery=recovery, checkpoint={"everySteps": 1000}, parallelism={"zeroStage": 3}))
    uid = await uid_of(stage, name)
    await stage.trained(name, 10)
    first = await trains_in(stage, f"{name}-w0-0", 1)
    status = await stage.status(name)
    assert status.mesh is not None
    assert status.mesh.copies is not None
    assert (status.mesh.copies.every_steps, status.mesh.copies.shift) == (4, 2)
    assert status.mesh.copies.survives.startswith("the loss of any rank, worker")

    await stage.delete_pod(name, 1, 0)
    assert await trains_in(stage, f"{name}-w0-0", 2) == first
    await trains_in(stage, f"{name}-w1-1", 2)
    status = await stage.status(name)
    assert status.mesh is not None
    assert status.mesh.recovery is not None
    assert (status.mesh.recovery.ranks, status.mesh.recovery.holders) == ("0-1", "2:0,3:1")
    assert status.mesh.recovery.step % 4 == 0

    await stage.complete(name)
    told = await events_of(stage, uid)
    assert len(told["RecoveringInMemory"]) == 1
    assert "RestartingFromCheckpoint" not in told
    assert "MemoryLost" not in told
    await stage.delete(name)


@pytest.mark.parametrize("grace", [0, None], ids=["killed at once", "deleted"])
async def test_a_replica_trains_on_without_a_lost_one_which_joins_it_again(stage: Stage, grace: int | None) -> None:
    """With `onReplicaLoss: Continue`. The replica that is left takes over the numbers of the lost one's ranks."""
    name = f"continues{grace}".lower()
    claim, job = elastic(name, 2, replacementSeconds=600)
    job["spec"]["recovery"] = {"inMemory": True, "onReplicaLoss": "Continue"}
    job["spec"]["checkpoint"]["everySteps"] = 1_000_000
    await stage.apply([claim, job])
    uid = await uid_of(stage, name)
    await runs(stage, name, 2)
    first = await trains_in(stage, f"{name}-w1-0", 1)
    survivor = await uids(stage, name)
    del survivor[await stage.delete_pod(name, 0, grace)]

    def half(status: ParallelTrainingJobStatus) -> bool:
        return (status.replicas, status.ready_ranks) == (1, "2/2")  # it has begun to grow again

    status = await stage.until(name, half, "training with the replica that is left")
    assert status.mesh is not None
    assert status.mesh.recovery is not None
    assert (status.mesh.generation, status.mesh.cause, status.mesh.recovery.ranks) == (2, "PodLost", "0-1")
    alone = await trains_in(stage, f"{name}-w1-0", 2)
    assert alone == {rank - 2: pid for rank, pid in first.items()}, "its processes go on as ranks 0 and 1"

    status = await runs(stage, name, 2)
    assert status.mesh is not None
    assert status.mesh.recovery is not None
    assert (status.mesh.generation, status.mesh.cause, status.mesh.recovery.ranks) == (3, "Rescaled", "0-1")
    assert await trains_in(stage, f"{name}-w1-0", 3) == alone
    assert survivor.items() < (await uids(stage, name)).items()
    told = await events_of(stage, uid)
    assert len(told["RecoveringInMemory"]) == 2
    assert not {"MemoryLost", "RestartingFromCheckpoint"} & told.keys()
    if grace == 0:
        assert status.checkpoint is None, "nothing was saved, so nothing was read"
    await same_run(stage, await finish(stage, name))
