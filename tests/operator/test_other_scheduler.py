"""Jobs whose pods another scheduler binds (Kueue, Volcano, KAI): ranks are mapped onto the nodes that it gave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio

from meshwright.api import labels
from meshwright.api.status import MeshStatus, ParallelTrainingJobStatus, PlacementStatus, WorkerPlacement
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.placement import map_ranks
from meshwright_operator.decide import gang, gang_actions
from meshwright_operator.decide.agents import WaitingAgent
from meshwright_operator.decide.applied_spec import revision_of
from meshwright_operator.decide.decide_job import decide
from meshwright_operator.decide.decision import Decision
from meshwright_operator.decide.mesh_generation import document
from meshwright_operator.decide.observed import Observed
from meshwright_operator.decide.placement_outcome import MappedRanks, apply_mapping
from meshwright_operator.kube.pod_info import Pod
from tests.operator.agents import Kubelet, bind
from tests.operator.builders import JOB, NOW, agents, ago, observed, plan_status, pod, running_status, spec
from tests.operator.conftest import Settled, StartOperator
from tests.operator.support import JOBS, Api, condition, job, node, until
from tests.operator.test_manifests import environment, make

VOLCANO = {"image": "meshwright/worker", "gpusPerWorker": 2, "schedulerName": "volcano"}
ONE_GPU = {"image": "meshwright/worker", "gpusPerWorker": 1, "schedulerName": "volcano"}
REVISION = revision_of(spec(workers=VOLCANO))


def seen(
    pods: list[Pod], *, entries: list[WorkerPlacement] | None = None, since: float = 5, generation: int = 0
) -> Observed:
    """A job of Volcano's on its way to a generation."""
    mesh = MeshStatus(generation=generation, pending_cause="Start", pending_since=ago(since))
    placement = PlacementStatus(workers=entries or [entry(w) for w in range(4)], tensor=2, pipeline=2, data=2)
    status = running_status(plan=plan_status(revision=REVISION), mesh=mesh, placement=placement)
    return observed([replace(p, revision=REVISION) for p in pods], status, workers=VOLCANO)


def entry(worker: int, node: str = "", ranks: str = "", incarnation: int = 0) -> WorkerPlacement:
    name = f"{JOB}-w{worker}-{incarnation}"
    return WorkerPlacement(worker=worker, incarnation=incarnation, pod=name, node=node, ranks=ranks)


def unbound(worker: int, incarnation: int = 0, **changes: Any) -> Pod:
    return pod(worker, incarnation, node="", bound=False, phase="Pending", address="", **changes)


def old(seconds: float) -> dict[str, Any]:
    return {"created": NOW - timedelta(seconds=seconds)}


def inventory() -> Inventory:
    return Inventory.from_objects([node(f"n{n}", f"r{n // 2}") for n in range(4)], [])


def test_pods_are_left_to_the_scheduler_with_what_it_reads() -> None:
    group = {"scheduling.k8s.io/group-name": "gang"}
    body = make(workers={**VOLCANO, "labels": {"queue": "big"}, "annotations": group})
    assert body["spec"]["schedulerName"] == "volcano"
    assert "schedulingGates" not in body["spec"]
    assert "affinity" not in body["spec"]
    assert body["metadata"]["labels"]["queue"] == "big"
    assert body["metadata"]["labels"][labels.LABEL_WORKER] == "1"
    assert body["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "gang"
    assert environment(body)[labels.ENV_WORKER_INDEX] == "1"


def test_pods_are_made_without_nodes_or_ranks() -> None:
    decision = decide(observed([], ParallelTrainingJobStatus(), workers=VOLCANO))
    assert (decision.place, decision.create) == (None, [0, 1, 2, 3])
    assert decision.status.placement is not None
    assert [(e.node, e.ranks, e.incarnation) for e in decision.status.placement.workers] == [("", "", 0)] * 4
    placed = next(c for c in decision.status.conditions if c.type == "Placed")
    assert (placed.status, placed.reason) == ("False", "WaitingForScheduler")


@pytest.mark.parametrize(
    ("pods", "kind", "words"),
    [
        ([unbound(w) for w in range(4)], gang_actions.Wait, "Scheduler volcano has bound 0 of 4 pods"),
        ([unbound(w, **old(1700)) for w in range(4)], gang_actions.Wait, "0 of 4"),
        (
            [unbound(w, **old(1900)) for w in range(4)],
            gang_actions.EndAttempt,
            "0 of 4 pods, and no more within 1800 s",
        ),
        ([pod(0), pod(1), unbound(2), unbound(3)], gang_actions.Wait, "2 of 4"),
        ([pod(0, **old(290)), pod(1), unbound(2), unbound(3)], gang_actions.Wait, "2 of 4"),
        (
            [pod(0, **old(310)), pod(1), unbound(2), unbound(3)],
            gang_actions.EndAttempt,
            "2 of 4 pods, and no more within 300 s",
        ),
        # It stood in the queue for long, and is being bound just now.
        (
            [pod(0, scheduled=NOW, **old(900)), *(unbound(w, **old(900)) for w in (1, 2, 3))],
            gang_actions.Wait,
            "1 of 4",
        ),
    ],
)
def test_the_wait_for_a_scheduler_is_bounded(pods: list[Pod], kind: type, words: str) -> None:
    found = gang.next_action(seen(pods, since=3000), "Start")
    assert isinstance(found, kind)
    assert words in getattr(found, "message", "")
    if isinstance(found, gang_actions.EndAttempt):
        assert (found.reason, len(found.pods)) == ("NotScheduled", 4)


def test_giving_up_lets_go_of_all_pods_and_says_why() -> None:
    decision = decide(
        seen([pod(0, **old(310)), pod(1), unbound(2, problem="Unschedulable: no"), unbound(3)], since=400)
    )
    assert len(decision.delete) == 4
    placed = next(c for c in decision.status.conditions if c.type == "Placed")
    assert (placed.status, placed.reason) == ("False", "NotScheduled")
    assert "Scheduler volcano has bound 2 of 4 pods" in placed.message
    assert "Unschedulable: no" in placed.message
    assert decision.mesh.retry_time is not None


def test_ranks_are_mapped_once_all_pods_are_bound_and_told_only_then() -> None:
    scattered = {0: "n0", 1: "n2", 2: "n1", 3: "n3"}
    found = seen([pod(w, node=name) for w, name in scattered.items()])
    step = gang.next_action(found, "Start")
    assert step == gang_actions.MapRanks(scattered, {})
    assert document(found, MeshStatus(generation=1, master="10.0.0.0:2000")) is None, "nobody knows its ranks yet"
    decision = Decision.of(found)
    placement, slots = map_ranks(found.plan, inventory(), scattered, {})
    apply_mapping(decision, MappedRanks(placement, slots))
    status = decision.status.placement
    assert status is not None
    assert (status.straddling_replicas, status.gap) == (0, "0")
    # Pipelines of two stages: workers 0 and 2, which share a rack, are one, 1 and 3 the other.
    assert {e.worker: e.ranks for e in status.workers} == {0: "0-1", 1: "4-5", 2: "2-3", 3: "6-7"}
    assert gang.next_action(replace(found, status=decision.status), "Start") == gang_actions.FormGeneration()


def test_the_mesh_is_formed_around_the_worker_of_rank_zero() -> None:
    entries = [entry(w, f"n{w}", ranks) for w, ranks in enumerate(("4-5", "0-1", "6-7", "2-3"))]
    found = seen([pod(w) for w in range(4)], entries=entries)
    waiting_agents = {w: WaitingAgent(0, f"10.0.0.{w}", 2000 + w) for w in range(4)}
    decision = decide(replace(found, agents=replace(agents(), waiting_agents=waiting_agents)))
    assert (decision.mesh.generation, decision.mesh.master) == (2, "10.0.0.1:2001")
    told = document(replace(found, status=decision.status), decision.mesh)
    assert told is not None
    assert [(m.worker, m.first_rank) for m in told.members] == [(1, 0), (3, 2), (0, 4), (2, 6)]


def test_a_lost_pod_is_scheduled_again_and_the_others_keep_their_ranks() -> None:
    entries = [entry(w, f"n{w}", ranks) for w, ranks in enumerate(("4-5", "0-1", "6-7", "2-3"))]
    lost = decide(seen([pod(0), pod(2), pod(3)], entries=entries, generation=1))
    assert lost.create == [1]
    assert lost.status.placement is not None
    assert lost.status.placement.workers[1] == entry(1, incarnation=1)
    assert [lost.status.placement.workers[w] for w in (0, 2, 3)] == [entries[w] for w in (0, 2, 3)]
    again = [pod(0), pod(1, 1, node="n5"), pod(2), pod(3)]
    step = gang.next_action(seen(again, entries=lost.status.placement.workers, generation=1), "PodLost")
    assert step == gang_actions.MapRanks({0: "n0", 1: "n5", 2: "n2", 3: "n3"}, {0: 2, 2: 3, 3: 1})


def test_a_cordoned_node_is_left_to_the_scheduler() -> None:
    entries = [entry(w, f"n{w}", f"{2 * w}-{2 * w + 1}") for w in range(4)]
    found = seen([pod(w) for w in range(4)], entries=entries, generation=1)
    mesh = MeshStatus(generation=1, master="10.0.0.0:2000", cause="Start", started_time=ago(60))
    status = found.status.model_copy(update={"mesh": mesh})
    leaving = [replace(w, node_drain_reason="cordoned") for w in found.workers]
    checkpoint = found.spec.model_copy(update={"checkpoint": spec(checkpoint={"claimName": "c"}).checkpoint})
    decision = decide(replace(found, status=status, workers=leaving, spec=checkpoint, revision=found.revision))
    assert decision.move is None
    assert decision.delete == []


class Volcano:
    """A scheduler that binds pods of its name in an order that is bad for their ranks: by index, from rack to rack."""

    def __init__(self, api: Api, nodes: list[str]) -> None:
        self.api = api
        self.nodes = nodes
        self.bound: dict[str, str] = {}

    async def run(self) -> None:
        while True:
            pods = await self.api.items("/api/v1/namespaces/default/pods")
            for found in sorted(pods, key=lambda found: str(found["metadata"]["name"])):
                name, body = found["metadata"]["name"], found["spec"]
                waits = body.get("schedulerName") == "volcano" and not body.get("nodeName")
                if waits and self.nodes and name not in self.bound:
                    self.bound[name] = self.nodes.pop(0)
                    await bind(self.api, name, self.bound[name])
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture
async def volcano(api: Api) -> AsyncIterator[Volcano]:
    """Eight pods of one GPU: neighbors in index land in different nodes, and in different racks."""
    scheduler = Volcano(api, ["n0", "n2", "n1", "n3", "n0", "n2", "n1", "n3"])
    task = asyncio.create_task(scheduler.run())
    yield scheduler
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_ranks_follow_the_nodes_that_another_scheduler_gave(
    api: Api, kubelet: Kubelet, start_operator: StartOperator, settled: Settled, volcano: Volcano
) -> None:
    await start_operator()
    queue = {"scheduling.k8s.io/group-name": "gang"}
    await api.create(JOBS, job("theirs", workers={**ONE_GPU, "annotations": queue}))
    status = await settled("theirs")
    pods = {found["metadata"]["name"]: found for found in await api.pods("theirs")}
    assert {name: found["spec"]["nodeName"] for name, found in pods.items()} == volcano.bound
    assert all(found["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "gang" for found in pods.values())

    placement = status["placement"]
    node_of = {int(e["ranks"]): e["node"] for e in placement["workers"]}
    assert {int(e["ranks"]): e["node"] for e in placement["workers"]} == {
        int(e["ranks"]): volcano.bound[e["pod"]] for e in placement["workers"]
    }
    groups = [{node_of[rank], node_of[rank + 1]} for rank in range(0, 8, 2)]
    assert all(len(group) == 1 for group in groups), "no tensor-parallel group leaves its node"
    racks = [{e["rack"] for e in placement["workers"] if int(e["ranks"]) // 4 == half} for half in (0, 1)]
    assert all(len(rack) == 1 for rack in racks), "no pipeline leaves its rack"
    assert placement.get("straddlingReplicas", 0) == 0
    assert placement["straddlingTensorGroups"] == 4, "NVLink ends at each pod"
    assert placement["gap"] == "0"
    assert float(placement["cost"]) > 0, "every tensor-parallel group crosses pods"
    assert condition(status, "Placed")["status"] == "True"
    await api.posted("theirs", "WaitingForScheduler", "RanksMapped")

    told = kubelet.of("theirs")[0].documents[-1]
    assert [m.first_rank for m in told.members] == list(range(8))
    assert {m.worker: m.first_rank for m in told.members} == {
        e["worker"]: int(e["ranks"]) for e in placement["workers"]
    }
    leader = next(agent for agent in kubelet.of("theirs") if agent.leads)
    assert status["mesh"]["master"].startswith(f"{leader.address}:")

    lost = next(e for e in placement["workers"] if e["ranks"] == "0")
    volcano.nodes = [lost["node"]]
    await api.delete(f"/api/v1/namespaces/default/pods/{lost['pod']}")

    async def second() -> dict[str, Any] | None:
        found = await api.status("theirs")
        formed = found["mesh"]["generation"] == 2 and condition(found, "Ready").get("reason") == "Running"
        return found if formed else None

    after = await until(second, "the second generation runs", 30)
    ranks = {e["worker"]: (e["ranks"], e["node"]) for e in after["placement"]["workers"]}
    assert ranks == {e["worker"]: (e["ranks"], e["node"]) for e in placement["workers"]}, "nobody else moved"
    replaced = next(e for e in after["placement"]["workers"] if e["ranks"] == "0")
    assert (replaced["worker"], replaced["incarnation"]) == (lost["worker"], 1)
