"""Jobs that resize and compete for nodes settle after many faults, in the state that a fresh operator makes of them.

Three jobs with priorities, `elastic` bounds and `fill`, some of them `preemptible`, share five nodes. Some have a
replica of two nodes and are planned anew for one (`elastic.replan`). A history from a seed edits them, breaks pods,
nodes, ranks, watches, clocks and operators, and now and then leaves all of it alone: then the jobs must settle. Two
histories in the long tier; `make chaos` draws others, and `make chaos RUNS=20` has 1,000 faults. `-s` prints how many
of each.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from meshwright.api.goodput import TimeCause
from meshwright.api.objects import KubeObject
from meshwright.api.parsing import parse_status
from meshwright.protocol.messages import AgentState, FailureKind
from meshwright_operator.kube.client import ApiError
from meshwright_operator.timestamps import parse_time, unix_milliseconds
from tests.operator.test_settling import NODES, Cluster, runs, submitted
from tests.operator.world import Operator
from tests.randomness import seeds

NAMES = ("first", "second", "third")
FAULTS = 50
"""Of each history."""
FAULTS_BETWEEN = 25
"""After so many, everything is left alone until the jobs have settled."""
SETTLES_WITHIN = 9000.0
QUIET = 2000.0
"""Longer than the longest pause after growths that failed."""
EDIT_SHARE = 0.35
REPLAN_SHARE = 0.3
"""Of the elastic jobs."""
END_SHARE = 0.25
"""How often the faults that last end."""
TOTALS: Counter[str] = Counter()


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a job asks for, in nodes: one for each replica, and two for that of a job that may be planned anew."""

    priority: int
    least: int
    """Nodes without which it waits."""
    replicas: int
    most: int
    """Nodes above which it does not grow."""
    elastic: bool
    preemptible: bool
    replans: bool = False

    @classmethod
    def of(cls, spec: KubeObject) -> Bounds:
        """Those of a spec."""
        replicas, elastic, preemptible = spec["replicas"], spec.get("elastic"), spec["preemptible"]
        if elastic is not None and elastic.get("replan"):
            return cls(spec["priority"], 1, 2, 2, elastic=True, preemptible=preemptible, replans=True)
        if elastic is None:
            return cls(spec["priority"], replicas, replicas, replicas, elastic=False, preemptible=preemptible)
        most = elastic["maxReplicas"] if elastic["fill"] else replicas
        least = elastic["minReplicas"]
        return cls(spec["priority"], least, replicas, most, elastic=True, preemptible=preemptible)

    def gives(self, size: int, priority: int) -> int:
        """How many nodes it gives up, of so many that it has, to a job of this priority that waits."""
        if self.preemptible and self.priority < priority:
            return size
        if not self.elastic or self.replans or self.priority > priority:
            return 0  # others never make it smaller than a replica
        return max(0, size - (self.least if self.priority < priority else max(self.least, self.replicas)))


class History:
    """What happens to the jobs, from a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draw = random.Random(seed)
        self.cluster = Cluster(seed)
        self.faults: Counter[str] = Counter()
        self.edits: Counter[str] = Counter()
        self.ledgers: dict[str, tuple[int, int]] = {}
        """Uid of a job -> when the time of its ledger begins, and up to when it is booked, in milliseconds."""
        self.raised: set[str] = set()
        """Jobs whose minimum was raised above the size with which they train. They train on."""
        self.lists: list[tuple[Operator, Callable[[], None]]] = []
        self.log: list[str] = []
        for name in NAMES:
            self.cluster.call(partial(self.world.submit, self.body(name)))
        self.cluster.do(self.world.run(20))

    @property
    def world(self) -> Any:
        """The virtual cluster."""
        return self.cluster.world

    def body(self, name: str) -> KubeObject:
        """A job with bounds of its own."""
        obj = submitted(name, 1)
        elastic = self.draw.random() < 0.8
        replans = elastic and self.draw.random() < REPLAN_SHARE
        obj["spec"] |= self.fields(elastic=elastic, replans=replans)
        if replans:
            obj["spec"]["parallelism"] = {"tensor": 2, "pipeline": 2, "microBatches": 4}
        return obj

    def fields(self, *, elastic: bool, replans: bool) -> KubeObject:
        """Fields of a spec that may be edited."""
        replicas = 1 if replans else self.draw.randint(1, 3)
        found: KubeObject = {"replicas": replicas, "priority": self.draw.choice([0, 0, 5, 10])}
        found |= {"checkpoint": {"claimName": "shared"}, "preemptible": self.draw.random() < 0.3}
        if elastic:
            found["elastic"] = {
                "minReplicas": self.draw.randint(1, replicas),
                "maxReplicas": 1 if replans else self.draw.randint(replicas, 4),
                "fill": self.draw.random() < 0.5,
                "replan": replans,
                "pauseSeconds": self.draw.choice([10, 60]),
                "replacementSeconds": self.draw.choice([5, 30]),
            }
        return found

    # Steps.

    def run(self) -> None:
        """The whole history, with the checks."""
        while self.faults.total() < FAULTS:
            due = self.faults.total() + FAULTS_BETWEEN
            while self.faults.total() < due:
                self.step()
            self.settle()
        self.cluster.close()

    def step(self) -> None:
        """One edit or fault, and some time."""
        if self.draw.random() < EDIT_SHARE:
            name = self.draw.choice(NAMES)
            edit = self.draw.choice([self.edit_size, self.edit_size, self.edit_bounds, self.suspend, self.create_again])
            self.note(self.edits, f"{edit.__name__}", name)
            edit(name)
        else:
            fault = self.draw.choice(self.FAULTS)
            if (what := fault(self)) is not None:
                self.note(self.faults, fault.__name__, what)
        if self.draw.random() < END_SHARE:
            self.end_faults()
        self.cluster.do(self.world.run(self.draw.choice([1, 2, 5, 20, 60])))
        self.check_ledgers()

    def note(self, counts: Counter[str], kind: str, what: str) -> None:
        """Counts it, for the totals and for the message of a failure."""
        counts[kind] += 1
        self.log.append(f"{self.world.seconds():.0f} s: {kind} {what}")

    # Edits.

    def edit_size(self, name: str) -> None:
        spec = self.cluster.jobs()[name]["spec"]
        least, most = 1, 4
        if spec.get("elastic"):
            least, most = spec["elastic"]["minReplicas"], spec["elastic"]["maxReplicas"]
        self.cluster.edit(name, replicas=self.draw.randint(least, most))

    def edit_bounds(self, name: str) -> None:
        job = self.cluster.jobs()[name]
        elastic, status = job["spec"].get("elastic"), parse_status(job)
        fields = self.fields(elastic=elastic is not None, replans=bool(elastic and elastic["replan"]))
        if (
            elastic
            and status.placement is not None
            and len(status.placement.workers) < fields["elastic"]["minReplicas"]
        ):
            self.raised.add(name)
        self.cluster.edit(name, **fields)

    def suspend(self, name: str) -> None:
        self.cluster.edit(name, suspend=not self.cluster.jobs()[name]["spec"].get("suspend", False))

    def create_again(self, name: str) -> None:
        self.cluster.remove(name)
        self.raised.discard(name)
        self.cluster.do(self.world.run(self.draw.randint(0, 3)))
        self.cluster.call(partial(self.world.submit, self.body(name)))

    # Faults. Each returns what it harms, or None if there is nothing to harm.

    def crash_a_pod(self) -> str | None:
        if not self.world.agents:
            return None
        name = self.draw.choice(sorted(self.world.agents))
        self.cluster.call(lambda: self.world.crash(name))
        return name

    def evict_a_pod(self) -> str | None:
        if not self.world.agents:
            return None
        name = self.draw.choice(sorted(self.world.agents))
        self.cluster.do(self.world.evict(name))
        return name

    def fail_a_rank(self) -> str | None:
        running = sorted(name for name, agent in self.world.agents.items() if agent.state is AgentState.RUNNING)
        if not running:
            return None
        agent = self.world.agents[name := self.draw.choice(running)]
        agent.state, agent.failure = AgentState.FAILED, FailureKind.ERROR
        return name

    def lose_a_pod_of_each_job(self) -> str | None:
        found = {agent.pod.job: name for name, agent in sorted(self.world.agents.items())}
        for name in found.values():
            self.cluster.call(partial(self.world.crash, name))
        return ", ".join(found.values()) or None

    def lose_a_node(self) -> str | None:
        ready = [name for name, obj in self.world.nodes.items() if _is_ready(obj)]
        if len(ready) < 2:
            return None
        self.set_node(name := self.draw.choice(ready), ready=False)
        return name

    def drain_a_node(self) -> str | None:
        name = self.draw.choice(sorted(self.world.nodes))
        self.set_node(name, cordoned=True)
        for pod in self.world.pods():
            if pod.node == name and pod.name in self.world.agents and self.draw.random() < 0.5:
                self.cluster.do(self.world.evict(pod.name))
        return name

    def kill_the_operator(self) -> str:
        self.world.cluster.watchers.clear()
        missed = any(operator.missed for operator in self.world.operators)
        self.world.operators = [self.cluster.do(_operator(self.world))]
        self.world.operators[0].missed = missed
        return ""

    def lose_the_watches(self) -> str:
        for operator in self.world.operators:
            operator.blind = True
        return ""

    def delay_the_watches(self) -> str:
        seconds = self.draw.choice([1, 5, 20])
        for operator in self.world.operators:
            operator.lag = timedelta(seconds=seconds)
        return f"{seconds} s"

    def show_an_old_list(self) -> str:
        """A list that was answered a while ago arrives; another one begins."""
        self.lists.append((self.world.operators[0], self.cluster.call(self.world.operators[0].begin_list)))
        operator, arrive = self.lists.pop(self.draw.randrange(len(self.lists)))
        if operator in self.world.operators:
            self.cluster.call(arrive)
        self.lists.append((self.world.operators[0], self.cluster.call(self.world.operators[0].begin_list)))
        return ""

    def set_the_clock(self) -> str:
        seconds = self.draw.choice([-86400, -3600, -30, 30, 3600, 86400])
        for operator in self.world.operators:
            operator.clock_error = timedelta(seconds=seconds)
        return f"{seconds} s"

    def let_the_server_fail(self) -> str:
        calls, every = iter(range(10**9)), self.draw.randint(2, 4)
        unreachable = ApiError(0, "Unreachable", "connection reset")
        self.world.cluster.refuse = lambda path, body: unreachable if next(calls) % every == 0 else None
        return f"every {every}"

    def break_the_image(self) -> str:
        self.world.broken_image = True
        return ""

    FAULTS = (
        break_the_image,
        crash_a_pod,
        evict_a_pod,
        fail_a_rank,
        lose_a_pod_of_each_job,
        lose_a_node,
        lose_a_node,
        drain_a_node,
        kill_the_operator,
        lose_the_watches,
        delay_the_watches,
        show_an_old_list,
        set_the_clock,
        let_the_server_fail,
    )

    # Ends of faults.

    def set_node(self, name: str, *, ready: bool = True, cordoned: bool = False) -> None:
        """Sends a node as it is now. Its pods are gone if it is not ready."""
        obj = copy.deepcopy(self.world.nodes[name])
        obj["status"]["conditions"][0]["status"] = str(ready)
        obj["spec"] = {"unschedulable": cordoned}
        self.cluster.put_node(obj)
        for pod in self.world.pods():
            if not ready and pod.node == name:
                self.cluster.call(partial(self.world.crash, pod.name))

    def end_faults(self) -> None:
        """The API server answers, watches stand, clocks are right, and some nodes are back."""
        self.world.cluster.refuse = lambda path, body: None
        self.world.broken_image = False
        for operator in self.world.operators:
            operator.clock_error, operator.lag, operator.blind = timedelta(0), timedelta(0), False
            self.cluster.call(operator.begin_list())
        for name in sorted(self.world.nodes):
            if self.draw.random() < 0.5:
                self.set_node(name)

    # Checks.

    def settle(self) -> None:
        """Everything is left alone: the jobs settle, as a fresh operator would leave them."""
        self.end_faults()
        try:
            settled = self.cluster.settle(SETTLES_WITHIN, QUIET)
            self.check(settled)
            self.cluster.check_steady()
        except AssertionError as error:
            raise AssertionError("\n".join([f"seed {self.seed}: {error}", *self.log])) from error

    def check_ledgers(self) -> None:
        """All time of each job since the begin of its ledger is booked once, to causes that there are."""
        for name, obj in self.cluster.jobs().items():
            if (ledger := parse_status(obj).goodput) is None:
                continue
            booked = {entry.cause: entry.milliseconds for entry in ledger.booked}
            until = parse_time(ledger.since)
            assert until is not None
            now = unix_milliseconds(until)
            begin = now - sum(booked.values())
            first, last = self.ledgers.setdefault(obj["metadata"]["uid"], (begin, now))
            told = f"seed {self.seed}, {name}: {ledger}\n" + "\n".join(self.log)
            assert begin == first, told
            assert now >= last, told
            assert set(booked) <= set(TimeCause), told
            self.ledgers[obj["metadata"]["uid"]] = first, now

    def check(self, settled: dict[str, Any]) -> None:
        """Every gang is whole and within its bounds, and the nodes are used as a fresh operator would use them."""
        specs = {name: obj["spec"] for name, obj in self.cluster.jobs().items() if not obj["spec"].get("suspend")}
        bounds = {name: _in_effect(Bounds.of(spec), settled[name]) for name, spec in specs.items()}
        usable = {name for name, obj in self.world.nodes.items() if _is_usable(obj)}
        sizes = {name: len(settled[name]["pods"]) for name in bounds}
        seen = f"{sizes} of {bounds} on {len(usable)} nodes: {settled}"
        for name, size in sizes.items():
            replicas = 1 if bounds[name].replans and size else size
            assert not size or (settled[name]["world"][-1], settled[name]["replicas"]) == (size, replicas), seen
            assert not size or runs(settled[name]), seen
            assert not size or size <= bounds[name].most, seen
            assert not size or bounds[name].least <= size or name in self.raised, seen
        self.check_nodes(bounds, sizes, usable, seen)
        below = any(0 < sizes[name] < one.least for name, one in bounds.items())
        if below or any(bounds[name] != Bounds.of(spec) for name, spec in specs.items()):
            return  # the former spec or size of a job is history, which a fresh operator does not know
        if sum(one.most for one in bounds.values()) <= len(usable):
            fresh = self.fresh()
            for name in bounds:
                same = _without_indices(settled[name]) == _without_indices(fresh[name])
                assert same, f"{name}: {settled[name]}, and fresh: {fresh[name]}"
        elif all(_always_runs(name, bounds, len(usable)) for name in bounds):
            fresh = self.fresh()
            assert {name for name in bounds if fresh[name]["pods"]} == set(bounds), (seen, fresh)
            new = sum(len(fresh[name]["pods"]) for name in bounds)
            assert new == sum(sizes.values()) - self.drained(usable).total(), (seen, fresh)

    def check_nodes(self, bounds: dict[str, Bounds], sizes: dict[str, int], usable: set[str], seen: str) -> None:
        """No node is free that a job may use, and no job waits for what others should give up."""
        drained = self.drained(usable)
        free = len(usable) - (sum(sizes.values()) - drained.total())
        # The first job that waits and would fit alone reserves its nodes: those behind it may leave nodes free.
        queue = sorted((name for name in bounds if not sizes[name]), key=partial(self.turn, bounds))
        first = next((name for name in queue if bounds[name].least <= len(usable)), None)
        for name, one in bounds.items():
            if sizes[name]:
                behind = first is not None and bounds[first].priority >= one.priority
                too_few = sizes[name] + free < one.least
                assert sizes[name] == one.most or not free or behind or too_few, seen
            elif first is None or queue.index(name) <= queue.index(first):
                others = [key for key in bounds if key != name]
                # What a job gives up on a draining node is of no use.
                given = sum(max(0, bounds[key].gives(sizes[key], one.priority) - drained[key]) for key in others)
                assert free < one.least, seen
                # Others shrink for a whole replica, and not for the layout in which a job makes do with less.
                assert free + given < (one.most if one.replans else one.least), seen

    def turn(self, bounds: dict[str, Bounds], name: str) -> tuple[int, str, str]:
        """The position of a job without pods in the queue; the smallest is first."""
        metadata = self.cluster.jobs()[name]["metadata"]
        return -bounds[name].priority, str(metadata.get("creationTimestamp", "")), metadata["uid"]

    def drained(self, usable: set[str]) -> Counter[str]:
        """Job -> its pods that stay on nodes that drain, because they fit on no others."""
        return Counter(pod.job for pod in self.world.pods() if not pod.terminal and pod.node not in usable)

    def fresh(self) -> dict[str, Any]:
        """What a fresh operator makes of the final input."""
        fresh = Cluster(self.seed + 1, self.world.nodes)
        for name, obj in self.cluster.jobs().items():
            fresh.world.submit({**submitted(name, 1), "spec": copy.deepcopy(obj["spec"])})
        found = fresh.settle(SETTLES_WITHIN, QUIET)
        fresh.close()
        return found


def _without_indices(job: dict[str, Any]) -> dict[str, Any]:
    """A job without the indices of its workers, in which resizes leave gaps."""
    return {**job, "pods": [pod[1:] for pod in job["pods"]]}


def _in_effect(bounds: Bounds, job: dict[str, Any]) -> Bounds:
    """The bounds of a job; of one that runs on with its former spec, because an edit does not fit, those it has."""
    if job["Ready"] != ("False", "EditDoesNotFit") or not job["pods"]:
        return bounds
    size = len(job["pods"])
    return replace(bounds, least=size, replicas=size, most=size, elastic=False)


def _always_runs(name: str, bounds: dict[str, Bounds], usable: int) -> bool:
    """Whether a job runs however large the others of its priority and above are."""
    one = bounds[name]
    others = sum(other.most for key, other in bounds.items() if key != name and other.priority >= one.priority)
    return one.least + others <= usable


def _is_ready(obj: KubeObject) -> bool:
    return bool(obj["status"]["conditions"][0]["status"] == "True")


def _is_usable(obj: KubeObject) -> bool:
    return _is_ready(obj) and not obj.get("spec", {}).get("unschedulable")


async def _operator(world: Any) -> Operator:
    return Operator(world)


@pytest.mark.chaos
@pytest.mark.long  # `test_elastic_settling` holds in part that jobs of changing sizes settle
@pytest.mark.parametrize("seed", seeds(2))
def test_jobs_that_compete_settle_after_faults(seed: int) -> None:
    assert NODES == 5
    history = History(seed)
    history.run()
    TOTALS.update(history.faults)
    print(f"\n{TOTALS.total()} faults so far: {dict(TOTALS.most_common())}; edits of this one: {dict(history.edits)}")
