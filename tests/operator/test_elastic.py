"""Elastic jobs in virtual time: they shrink when nodes go, grow when nodes come, and follow `spec.replicas`."""

from __future__ import annotations

import copy
from datetime import datetime, timedelta
from typing import Any
from unittest.mock import patch

import pytest

from meshwright.protocol.messages import AgentState, FailureKind
from meshwright.protocol.run_config import NativeRun
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.parsed_jobs import ParsedJobs
from meshwright_operator.scheduling.preemption import holder_of
from meshwright_operator.timestamps import parse_time
from tests.operator.support import JOBS
from tests.operator.test_settling import submitted
from tests.operator.world import World
from tests.tiers import mostly_long

FOREVER = 1e9


def elastic(name: str, replicas: int, **fields: Any) -> dict[str, Any]:
    """A job whose replicas take a whole node each."""
    body = submitted(name, replicas)
    body["spec"] |= {"elastic": {"pauseSeconds": 30, **fields}, "checkpoint": {"claimName": "shared"}}
    return body


def edit(world: World, name: str, **spec: Any) -> None:
    new = copy.deepcopy(world.cluster.objects[f"{JOBS}/{name}"])
    new["spec"] |= spec
    new["metadata"]["generation"] += 1
    world.cluster.update(f"{JOBS}/{name}", new)


def label(world: World, node: str, key: str, value: str) -> None:
    obj = copy.deepcopy(world.nodes[node])
    obj["metadata"]["labels"][key] = value
    world.cluster.stamp(obj)
    world.nodes[node] = obj
    for operator in world.operators:
        operator.cache.put_node(obj)
        operator.nodes_changed()


def set_ready(world: World, node: str, ready: bool) -> None:
    """A node goes down with its pods, or comes back."""
    obj = copy.deepcopy(world.nodes[node])
    obj["status"]["conditions"][0]["status"] = str(ready)
    world.cluster.stamp(obj)
    world.nodes[node] = obj
    for operator in world.operators:
        operator.cache.put_node(obj)
        operator.nodes_changed()
    for pod in world.pods():
        if not ready and pod.node == node:
            world.crash(pod.name)


def size(world: World, name: str) -> int:
    replicas: int = world.status(name)["replicas"]
    return replicas


def pods(world: World, name: str) -> set[str]:
    return {pod.name for pod in world.pods(name) if not pod.terminal}


async def test_a_job_shrinks_without_its_node_and_grows_when_the_node_returns() -> None:
    world = World(1, nodes=2, work=FOREVER)
    world.submit(elastic("job", 2))
    await world.run(20)
    assert world.true("job", "Ready")
    before = pods(world, "job")
    victim = next(pod for pod in world.pods("job") if pod.worker == 0)
    set_ready(world, victim.node, ready=False)
    await world.run(20)
    assert size(world, "job") == 2, "it waits for a replacement first"
    await world.run(60)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert size(world, "job") == 1
    assert pods(world, "job") == before - {victim.name}
    assert world.status("job")["placement"]["workers"][0]["ranks"] == "0-1"
    assert world.condition("job", "Placed")["message"].startswith("1 worker on 1 node")
    set_ready(world, victim.node, ready=True)
    await world.run(240)
    assert size(world, "job") == 2, world.status("job")
    assert world.true("job", "Ready")
    assert before - {victim.name} < pods(world, "job")
    assert world.status("job")["mesh"]["cause"] == "Rescaled"
    assert not world.true("job", "Rescaling")


async def test_scale_up_and_down() -> None:
    world = World(2, nodes=4, work=FOREVER)
    world.submit(elastic("job", 1))
    await world.run(20)
    seen = []
    for replicas in (4, 2, 3, 1):
        edit(world, "job", replicas=replicas)
        await world.run(240)
        assert world.true("job", "Ready"), world.condition("job", "Ready")
        workers = f"{replicas} worker{'' if replicas == 1 else 's'} on "
        assert world.condition("job", "Placed")["message"].startswith(workers)
        seen.append((size(world, "job"), len(pods(world, "job"))))
    assert seen == [(4, 4), (2, 2), (3, 3), (1, 1)]
    assert "job-w0-0" in pods(world, "job"), "the first worker was never replaced"


async def test_a_job_starts_with_what_is_there_and_fills_the_cluster() -> None:
    world = World(3, nodes=3, work=FOREVER)
    world.submit(elastic("job", 2, maxReplicas=4, fill=True, minReplicas=1))
    await world.run(60)
    assert world.true("job", "Ready")
    assert size(world, "job") == 3


async def test_a_job_grows_onto_a_node_that_rejected_its_pod_before() -> None:
    """It avoids the node for a while. When that ends, nothing else need have changed in the cluster."""
    world = World(1, nodes=2, work=1e6)
    world.rejecting = {"n1": "OutOfcpu"}
    world.submit(elastic("job", 2, minReplicas=1))
    await world.run(90)
    assert world.status("job")["readyRanks"] == "2/2"
    world.rejecting = {}
    await world.run(120)
    assert world.status("job")["readyRanks"] == "4/4"


async def test_a_job_of_higher_priority_takes_a_replica_and_gives_it_back() -> None:
    world = World(4, nodes=3, work=FOREVER)
    world.submit(elastic("low", 3))
    await world.run(20)
    assert size(world, "low") == 3
    urgent = submitted("urgent", 1)
    urgent["spec"]["priority"] = 10
    world.submit(urgent)
    await world.run(90)
    assert world.true("urgent", "Ready"), world.condition("urgent", "Placed")
    assert size(world, "low") == 2
    assert world.true("low", "Ready"), world.condition("low", "Ready")
    assert any("default/urgent" in note.message for note in events(world, "low", "Rescaled"))
    world.cluster.remove(f"{JOBS}/urgent")
    for pod in world.pods("urgent"):
        world.crash(pod.name)
    await world.run(240)
    assert size(world, "low") == 3
    assert world.true("low", "Ready")


async def test_a_job_that_fills_the_cluster_gives_up_replicas_to_its_own_priority_after_its_pause() -> None:
    """Only those above `replicas`: a second job of the same priority waits for these."""
    world = World(8, nodes=4, work=FOREVER)
    world.submit(elastic("fills", 2, maxReplicas=4, fill=True, pauseSeconds=300))
    await world.run(20)
    assert size(world, "fills") == 4
    for name in ("second", "third", "fourth"):
        world.submit(submitted(name, 1))
    seen = await sizes_of(world, "fills", 600)
    assert [count for _, count in seen] == [3, 2], seen
    assert 300 <= (seen[1][0] - seen[0][0]).total_seconds() <= 330
    assert [world.true(name, "Ready") for name in ("second", "third", "fourth")] == [True, True, False]
    assert world.true("fills", "Ready")


async def test_a_job_of_higher_priority_does_not_wait_for_the_pause() -> None:
    world = World(9, nodes=4, work=FOREVER)
    world.submit(elastic("fills", 2, maxReplicas=4, fill=True, pauseSeconds=3600))
    await world.run(20)
    for name in ("urgent", "more-urgent"):
        body = submitted(name, 1)
        body["spec"]["priority"] = 10
        world.submit(body)
        await world.run(90)
        assert world.true(name, "Ready")
    assert size(world, "fills") == 2


@pytest.mark.parametrize("delay", mostly_long(range(2, 14), lambda delay: delay % 4 == 2))
async def test_a_second_shrink_while_the_first_one_is_under_way(delay: int) -> None:
    """Whenever it comes: the next generation has the size in status, and every worker has one pod."""
    world = World(10, nodes=4, work=FOREVER)
    world.submit(elastic("low", 4, pauseSeconds=30))
    await world.run(20)
    for name in ("urgent", "more-urgent"):
        body = submitted(name, 1)
        body["spec"]["priority"] = 10
        world.submit(body)
        await world.run(delay)
    await world.run(60)
    assert world.true("urgent", "Ready")
    assert world.true("more-urgent", "Ready")
    assert size(world, "low") == 2
    assert {entry["pod"] for entry in world.status("low")["placement"]["workers"]} == pods(world, "low")
    assert world.true("low", "Ready")


async def test_only_as_many_jobs_of_the_same_priority_shrink_as_are_needed() -> None:
    """While the pods of the first ones end, one after the other, no other job gives up replicas too."""
    world = World(11, nodes=10, work=FOREVER)
    for name, most in (("one", 4), ("two", 4), ("three", 2)):
        world.submit(elastic(name, 1, maxReplicas=most, fill=True, pauseSeconds=300))
        await world.run(20)
        assert size(world, name) == most
    world.stuck = pods(world, "one")
    world.submit(submitted("waits", 2))
    await world.run(40)
    world.stuck.clear()
    await world.run(60)
    assert world.true("waits", "Ready")
    assert [size(world, name) for name in ("one", "two", "three")] == [3, 3, 2]


async def test_the_pause_counts_for_requests_that_are_older_than_the_resize() -> None:
    """A waiting job is tried again with its last request. A clock that was set back must not extend the pause."""
    world = World(12, nodes=3, work=FOREVER)
    world.submit(elastic("fills", 1, maxReplicas=3, fill=True, pauseSeconds=300))
    await world.run(20)
    world.submit(submitted("second", 1))
    await world.run(30)
    resized = parse_time(world.status("fills")["elastic"]["resizedTime"])
    assert resized is not None

    def rests(seconds: float) -> bool:
        job, now = world.cluster.objects[f"{JOBS}/fills"], resized + timedelta(seconds=seconds)
        holder = holder_of(JobKey("default", "fills"), job, ParsedJobs(), lambda priority: priority, now)
        assert holder is not None
        return holder.rests_until is not None

    assert [rests(seconds) for seconds in (-120, 0, 299, 301, -86400)] == [True, True, True, False, False]


async def test_a_growth_waits_until_the_pods_of_the_former_one_have_ended() -> None:
    """Two pods of one worker never live at once, which the world checks."""
    world = World(13, nodes=3, work=FOREVER)
    world.submit(elastic("job", 2, pauseSeconds=10, maxReplicas=3))
    await world.run(20)
    world.unprepared = True
    edit(world, "job", replicas=3)
    await world.run(10)
    assert len(pods(world, "job")) == 3
    agent = world.agents["job-w0-0"]
    agent.state, agent.failure = AgentState.FAILED, FailureKind.ERROR
    world.unprepared = False
    await world.run(120)
    assert size(world, "job") == 3
    assert world.true("job", "Ready")


async def test_a_job_that_loses_all_workers_while_it_grows_waits_until_the_new_ones_have_ended() -> None:
    """Two pods of one worker never live at once, which the world checks."""
    world = World(13, nodes=3, work=FOREVER)
    world.submit(elastic("job", 1, pauseSeconds=10, maxReplicas=2))
    await world.run(20)
    world.unprepared = True
    edit(world, "job", replicas=2)
    await world.run(10)
    assert pods(world, "job") == {"job-w0-0", "job-w1-1"}
    world.crash("job-w0-0")
    world.unprepared = False
    await world.run(120)
    assert size(world, "job") == 2
    assert world.true("job", "Ready")


async def sizes_of(world: World, name: str, seconds: int) -> list[tuple[datetime, int]]:
    """The sizes that a job has in this time, and when each began."""
    seen: list[tuple[datetime, int]] = []
    for _ in range(seconds):
        await world.tick()
        if not seen or seen[-1][1] != size(world, name):
            seen.append((world.now, size(world, name)))
    return seen


async def test_nothing_is_taken_below_the_minimum() -> None:
    world = World(5, nodes=3, work=FOREVER)
    world.submit(elastic("low", 3, minReplicas=3))
    await world.run(20)
    urgent = submitted("urgent", 1)
    urgent["spec"]["priority"] = 10
    world.submit(urgent)
    await world.run(120)
    assert not world.true("urgent", "Ready")
    assert size(world, "low") == 3
    assert world.true("low", "Ready")


def gauge(world: World, name: str) -> float:
    """The value of a metric of the only job."""
    (family,) = [family for family in world.operators[0].jobs.collect() if family.name == name]
    (sample,) = family.samples
    value: float = sample.value
    return value


def events(world: World, job: str, reason: str) -> list[Any]:
    return [note for name, note in world.operators[0].notes.notes if name == job and note.reason == reason]


async def test_an_edit_does_not_wait_for_the_pause_after_a_resize() -> None:
    world = World(6, nodes=3, work=FOREVER)
    world.submit(elastic("job", 1, pauseSeconds=3600))
    await world.run(20)
    for replicas in (2, 3):
        edit(world, "job", replicas=replicas)
        await world.run(90)
        assert size(world, "job") == replicas
        assert world.true("job", "Ready"), world.condition("job", "Ready")
        assert world.status("job")["elastic"]["wantedReplicas"] == replicas
    set_ready(world, world.pods("job")[0].node, ready=False)
    await world.run(90)
    assert (gauge(world, "ptj_job_replicas"), gauge(world, "ptj_job_replicas_wanted")) == (2, 3)


async def test_a_job_trains_on_until_the_new_workers_can_start_ranks_at_once() -> None:
    world = World(7, nodes=2, work=FOREVER)
    world.submit(elastic("job", 1))
    await world.run(20)
    world.unprepared = True
    edit(world, "job", replicas=2)
    await world.run(90)
    assert len(pods(world, "job")) == 2
    assert size(world, "job") == 1
    assert world.true("job", "Ready"), "the first worker trains meanwhile"
    assert world.true("job", "Rescaling")
    for agent in world.agents.values():
        agent.preparing = False
    await world.run(20)
    assert size(world, "job") == 2
    assert world.true("job", "Ready")


@pytest.mark.parametrize("seed", range(4))
async def test_a_run_that_ends_when_the_new_workers_are_ready_is_complete(seed: int) -> None:
    """The ranks cannot join a larger mesh any more. A generation with them was formed, and never trained."""
    world = World(seed, nodes=2, work=FOREVER)
    world.submit(elastic("job", 1))
    await world.run(20)
    world.unprepared = True
    edit(world, "job", replicas=2)
    await world.run(90)
    assert len(pods(world, "job")) == 2
    generation = world.status("job")["mesh"]["generation"]
    for agent in world.agents.values():
        agent.preparing = False
        if agent.state is AgentState.RUNNING:
            agent.state = AgentState.COMPLETE
    with patch.object(world, "_finish", lambda *_: None):  # the agents have not exited yet
        await world.run(20)
    await world.run(60)
    assert world.true("job", "Complete"), world.condition("job", "Ready")
    assert world.status("job")["mesh"]["generation"] == generation
    assert size(world, "job") == 1
    assert not world.true("job", "Rescaling")


async def test_the_workers_that_stay_are_kept_however_long_the_job_waits_for_a_replacement() -> None:
    world = World(6, nodes=2, work=FOREVER)
    world.submit(elastic("job", 2, replacementSeconds=90))
    await world.run(20)
    victim = next(pod for pod in world.pods("job") if pod.worker == 0)
    survivors = pods(world, "job") - {victim.name}
    set_ready(world, victim.node, ready=False)
    await world.run(150)
    assert size(world, "job") == 1
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert pods(world, "job") == survivors


async def test_with_shrink_on_loss_the_replicas_that_are_left_train_while_the_replacement_starts() -> None:
    world = World(6, nodes=3, work=FOREVER)
    world.submit(elastic("job", 2, onLoss="Shrink", pauseSeconds=300))
    await world.run(20)
    victim = next(pod for pod in world.pods("job") if pod.worker == 0)
    survivors = pods(world, "job") - {victim.name}
    world.unprepared = True
    set_ready(world, victim.node, ready=False)
    await world.run(25)
    assert size(world, "job") == 1, "it does not wait, though a node is free"
    assert world.true("job", "Ready")
    assert survivors < pods(world, "job"), "the replacement starts beside it"
    for agent in world.agents.values():
        agent.preparing = False
    await world.run(20)
    assert size(world, "job") == 2
    assert world.true("job", "Ready")
    assert survivors < pods(world, "job")
    restarts = {entry["cause"]: entry["count"] for entry in world.status("job")["restarts"]}
    assert restarts == {"NodeLost": 1, "Rescaled": 1}


async def test_a_job_whose_last_replica_lost_a_worker_waits_for_the_replacement_also_with_shrink_on_loss() -> None:
    world = World(6, nodes=3, work=FOREVER)
    world.submit(elastic("job", 2, onLoss="Shrink", minReplicas=2))
    await world.run(20)
    victim = next(pod for pod in world.pods("job") if pod.worker == 0)
    set_ready(world, victim.node, ready=False)
    await world.run(60)
    assert size(world, "job") == 2
    assert world.true("job", "Ready")
    assert victim.node not in {pod.node for pod in world.pods("job") if not pod.terminal}


async def test_an_edit_during_a_growth_restarts_the_gang_once() -> None:
    """The pods of the growth are of the old revision. They were created and deleted without end."""
    world = World(8, nodes=3, work=FOREVER)
    world.submit(elastic("job", 1))
    await world.run(20)
    world.unprepared = True
    edit(world, "job", replicas=2)
    await world.run(60)
    assert world.true("job", "Rescaling")
    world.unprepared = False
    workers = world.cluster.objects[f"{JOBS}/job"]["spec"]["workers"]
    edit(world, "job", workers={**workers, "image": "meshwright/worker:2"})
    await world.run(300)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert size(world, "job") == 2
    restarts = {entry["cause"]: entry["count"] for entry in world.status("job")["restarts"]}
    assert restarts == {"SpecChanged": 1}


async def test_an_edit_of_a_job_that_does_not_fit_at_its_full_size_restarts_it_smaller() -> None:
    """The edit was blocked with `EditDoesNotFit` until the full size fitted."""
    world = World(9, nodes=3, work=FOREVER)
    world.submit(elastic("job", 3))
    await world.run(20)
    set_ready(world, next(pod.node for pod in world.pods("job") if pod.worker == 1), ready=False)
    await world.run(90)
    assert size(world, "job") == 2
    workers = world.cluster.objects[f"{JOBS}/job"]["spec"]["workers"]
    edit(world, "job", workers={**workers, "image": "meshwright/worker:2"})
    await world.run(120)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert size(world, "job") == 2
    assert world.status("job")["observedGeneration"] == 2


async def test_a_scaled_batch_and_its_rate_reach_the_ranks_at_every_size() -> None:
    world = World(7, nodes=3, work=FOREVER)
    body = elastic("job", 1, maxReplicas=3, scaledBatch={"replicas": 2, "learningRate": "Linear"})
    body["spec"]["training"] |= {"globalBatchSize": 8, "optimizer": {"learningRate": 0.01}}
    world.submit(body)
    await world.run(20)
    seen = []
    for replicas in (3, 2, 1):
        edit(world, "job", replicas=replicas)
        await world.run(60)
        assert world.true("job", "Ready")
        runs = [agent.document.run for agent in world.agents.values() if agent.document is not None]
        assert len({run.model_dump_json() for run in runs}) == 1
        run = runs[0]
        assert isinstance(run, NativeRun)
        training = run.training
        seen.append((run.data_parallel, run.micro_batches, training.global_batch_size))
        assert training.optimizer.learning_rate == pytest.approx(0.005 * replicas)
    # Three replicas do not divide 8 sequences: each has the four that it has with two.
    assert seen == [(3, 1, 12), (2, 1, 8), (1, 1, 4)]


def grouped(world: World, replicas: int) -> dict[str, Any]:
    """A job whose tensor-parallel groups have two workers, on nodes of one NVLink domain."""
    for name in world.nodes:
        label(world, name, "network.topology.nvidia.com/accelerator", "one")
    body = elastic("job", replicas)
    body["spec"]["parallelism"]["tensor"] = 4
    body["spec"]["model"]["kvHeads"] = 4
    return body


async def test_a_lost_worker_of_a_tensor_group_is_replaced_and_the_other_stays() -> None:
    world = World(31, nodes=4, work=FOREVER)
    world.submit(grouped(world, 1))
    await world.run(30)
    before = pods(world, "job")
    assert len(before) == 2
    (lost,) = {pod.name for pod in world.pods("job") if pod.worker == 1}
    world.crash(lost)
    await world.run(60)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert before - {lost} < pods(world, "job")


async def test_what_is_left_of_a_tensor_group_ends_before_all_of_it_starts_in_another_domain() -> None:
    world = World(32, nodes=4, work=FOREVER)
    body = grouped(world, 1)
    for name in ("n2", "n3"):
        label(world, name, "network.topology.nvidia.com/accelerator", "two")
    world.submit(body)
    await world.run(30)
    before = pods(world, "job")
    lost = next(pod for pod in world.pods("job") if pod.worker == 1)
    set_ready(world, lost.node, ready=False)
    await world.run(120)  # the world checks that no two pods of a worker live at once
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert not before & pods(world, "job")
    assert len(pods(world, "job")) == 2


@pytest.mark.parametrize(("replicas", "why"), [(1, "1 is wanted"), (2, "2 are wanted")])
@pytest.mark.parametrize("suspended", [True, False])
async def test_a_size_that_is_wanted_is_not_blamed_on_the_nodes(suspended: bool, replicas: int, why: str) -> None:
    world = World(26, nodes=4, work=FOREVER)
    world.submit(elastic("job", 3))
    await world.run(30)
    edit(world, "job", suspend=suspended)
    await world.run(20)
    edit(world, "job", suspend=False, replicas=replicas)
    await world.run(60)
    assert size(world, "job") == replicas
    (resized,) = events(world, "job", "Rescaled")
    assert resized.message.endswith(f"From 3 replicas to {replicas}: {why}")
