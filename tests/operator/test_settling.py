"""Whatever happened on the way, the cluster settles in the state that a fresh operator makes of the final input.

Hypothesis edits jobs, breaks pods, nodes and ranks, cuts and kills operators; then everything is left alone. The oracle
is a second cluster that was given the final jobs and nodes at once. Six histories always; `make chaos` draws others.
"""

from __future__ import annotations

import asyncio
import copy
import gc
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from meshwright.api.objects import KubeObject
from meshwright.protocol.messages import AgentState, FailureKind
from meshwright_operator.controller.status_patch import is_urgent
from meshwright_operator.kube.client import ApiError
from meshwright_operator.kube.watches import EventHandlers
from meshwright_operator.operator_metrics import OperatorMetrics
from tests.operator.support import JOBS, PODS, job
from tests.operator.world import Operator, World
from tests.randomness import ASKED
from tests.randomness import runs as histories

NODES = 5
NAMES = ("first", "second")
SETTLES_WITHIN = 900
QUIET = 150
STEP = 3.0
RESYNC = 120.0
STEADY = 300.0
PROGRESS = 10.0
FOREVER = 1e9
T = TypeVar("T")


def submitted(name: str, workers: int) -> KubeObject:
    """A job of so many pods, each of which takes a whole node; it may fail as often as it likes."""
    return job(
        name,
        replicas=workers,
        parallelism={"tensor": 2, "pipeline": 1, "microBatches": 1},
        training={"steps": 10**6, "globalBatchSize": 60, "sequenceLength": 64},
        recovery={"maxRestarts": 100000},
    )


class Cluster:
    """A virtual cluster, run step by step."""

    def __init__(self, seed: int, nodes: dict[str, KubeObject] | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.world = self.do(_world(seed))
        for obj in (nodes or {}).values():
            self.put_node(copy.deepcopy(obj))

    def do(self, call: Awaitable[T]) -> T:
        async def run() -> T:
            return await call

        return self.loop.run_until_complete(run())

    def call(self, what: Callable[[], T]) -> T:
        """Calls it where the operators run."""

        async def run() -> T:
            return what()

        return self.do(run())

    def put_node(self, obj: KubeObject) -> None:
        """Sends a node, as it is now, to every operator that watches."""
        self.world.cluster.stamp(obj)
        self.world.nodes[obj["metadata"]["name"]] = obj
        for operator in self.world.operators:
            if not operator.blind:
                watch = EventHandlers(operator.cache, operator.queue, OperatorMetrics())
                change = {"type": "MODIFIED", "object": copy.deepcopy(obj)}
                self.call(partial(watch.node, change))

    def edit(self, name: str, **spec: Any) -> None:
        """A user's edit of a job's spec."""
        obj = self.world.cluster.objects[f"{JOBS}/{name}"]
        new = copy.deepcopy(obj)
        new["spec"] |= spec
        if new["spec"] != obj["spec"]:
            new["metadata"]["generation"] += 1
            self.call(lambda: self.world.cluster.update(f"{JOBS}/{name}", new))

    def remove(self, name: str) -> None:
        """A user deletes a job, and the garbage collector its pods."""

        def remove() -> None:
            self.world.cluster.remove(f"{JOBS}/{name}")
            for pod in self.world.pods(name):
                self.world.crash(pod.name)

        self.call(remove)

    def jobs(self) -> dict[str, KubeObject]:
        return {obj["metadata"]["name"]: obj for obj in self.world.cluster.of("paralleltrainingjobs")}

    def summary(self) -> dict[str, Any]:
        """What everybody can see, without how it came to be: no counts, no times, no names of pods."""
        found = {}
        for name, obj in self.jobs().items():
            status = obj["status"]
            conditions = {c["type"]: (c["status"], c["reason"]) for c in status.get("conditions", ())}
            plan = status.get("plan") or {}
            pods = [pod for pod in self.world.pods(name) if not pod.terminal]
            found[name] = {
                "Ready": conditions.get("Ready"),
                **{kind: conditions.get(kind, ("",))[0] == "True" for kind in ("Reconciling", "Stalled", "Suspended")},
                "observed": status.get("observedGeneration") == obj["metadata"]["generation"],
                "world": [plan.get(key) for key in ("tensor", "pipeline", "data", "worldSize", "workers")],
                "pods": sorted((pod.worker, pod.phase, pod.gated, pod.revision) for pod in pods),
                "nodes": len({pod.node for pod in pods}),
                "replicas": status.get("replicas"),
            }
        return found

    def settle(self, within: float = SETTLES_WITHIN, quiet_for: float = QUIET) -> dict[str, Any]:
        """Lets time pass until nothing has changed for a while. Every operator lists everything now and then."""
        last, quiet = self.summary(), 0.0
        for number in range(round(within / STEP)):
            if number * STEP % RESYNC == RESYNC / 2:
                for operator in self.world.operators:
                    self.call(operator.begin_list())
            self.do(self.world.tick(STEP))
            now = self.summary()
            quiet = quiet + STEP if now == last else 0.0
            last = now
            if quiet >= quiet_for:
                return now
        raise AssertionError(f"still changing after {within} s: {last}")

    def check_steady(self) -> None:
        """Once settled, the operators write nothing but how far training is."""
        cluster, notes = self.world.cluster, [len(operator.notes.notes) for operator in self.world.operators]
        before, begun = self.without_versions(), len(cluster.requests)
        for _ in range(round(STEADY / STEP)):
            if self.world.random.random() < STEP / RESYNC:
                for operator in self.world.operators:
                    self.call(operator.begin_list())
            self.do(self.world.tick(STEP))
        after = self.without_versions()
        for path, obj in before.items():
            found = after.get(path, {})
            assert not is_urgent(obj.pop("status", {}), found.pop("status", {})), f"the status of {path} changed"
        assert after == before, "something was written"
        posted = [operator.notes.notes[n:] for n, operator in zip(notes, self.world.operators, strict=True)]
        assert not any(posted), f"events were posted: {posted}"
        writes = Counter(call for call in cluster.requests[begun:] if call[0] in ("create", "patch", "delete"))
        for (verb, path), number in writes.items():
            name = path.removesuffix("/status").rpartition("/")[2]
            assert (verb, path) == ("patch", f"{JOBS}/{name}/status"), f"{verb} {path}"
            # A new message may be written with the next progress.
            assert runs(self.summary()[name]) or number == 1, f"{number} writes of {name}, which does not train"
            assert number <= STEADY / PROGRESS + 1, f"{number} writes of {name}"

    def without_versions(self) -> dict[str, KubeObject]:
        """Every object, without its version, which changes with every write of progress."""
        found = copy.deepcopy(self.world.cluster.objects)
        for obj in found.values():
            obj["metadata"].pop("resourceVersion")
        return found

    def close(self) -> None:
        self.loop.close()


async def _world(seed: int) -> World:
    return World(seed, NODES, work=FOREVER)


class Settling(RuleBasedStateMachine):
    """Everything that may happen to two jobs on five nodes."""

    submitted = staticmethod(submitted)

    def __init__(self) -> None:
        super().__init__()
        self.cluster: Cluster = Cluster(0)
        self.seed = 0
        self.lists: list[tuple[Operator, Callable[[], None]]] = []

    @initialize(seed=st.integers(0, 2**16), sizes=st.tuples(st.integers(1, 3), st.integers(0, 3)))
    def begin(self, seed: int, sizes: tuple[int, int]) -> None:
        self.cluster.close()
        self.seed = seed
        self.cluster = Cluster(seed)
        for name, workers in zip(NAMES, sizes, strict=True):
            if workers:
                self.cluster.call(partial(self.world.submit, self.submitted(name, workers)))
        self.cluster.do(self.world.run(10))

    @property
    def world(self) -> World:
        return self.cluster.world

    @rule(name=st.sampled_from(NAMES), workers=st.integers(1, 3), pause=st.integers(0, 3))
    def create_again(self, name: str, workers: int, pause: int) -> None:
        """Under the same name, at once or a little later; what the garbage collector does is done."""
        if name in self.cluster.jobs():
            self.cluster.remove(name)
            self.cluster.do(self.world.run(pause))
        self.cluster.call(lambda: self.world.submit(self.submitted(name, workers)))

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name: str) -> None:
        if len(self.cluster.jobs()) == len(NAMES):
            self.cluster.remove(name)

    @precondition(lambda self: self.cluster.jobs())
    @rule(name=st.sampled_from(NAMES), workers=st.integers(1, 4))
    def scale(self, name: str, workers: int) -> None:
        if name in self.cluster.jobs():
            self.cluster.edit(name, replicas=workers)

    @precondition(lambda self: self.cluster.jobs())
    @rule(name=st.sampled_from(NAMES), suspend=st.booleans())
    def suspend(self, name: str, suspend: bool) -> None:
        if name in self.cluster.jobs():
            self.cluster.edit(name, suspend=suspend)

    @precondition(lambda self: self.cluster.jobs())
    @rule(name=st.sampled_from(NAMES), image=st.sampled_from(["one", "two"]))
    def change_image(self, name: str, image: str) -> None:
        if name in self.cluster.jobs():
            self.cluster.edit(name, workers={**self.cluster.jobs()[name]["spec"]["workers"], "image": image})

    @precondition(lambda self: self.cluster.jobs())
    @rule(name=st.sampled_from(NAMES), policy=st.sampled_from(["Now", "OnRestart"]))
    def change_update_policy(self, name: str, policy: str) -> None:
        if name in self.cluster.jobs():
            self.cluster.edit(name, updatePolicy=policy)

    @precondition(lambda self: self.world.agents)
    @rule(data=st.data(), kind=st.sampled_from(["crash", "evict", "fail", "hang up"]))
    def harm_a_worker(self, data: st.DataObject, kind: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.agents)))
        agent = self.world.agents[name]
        if kind == "crash":
            self.cluster.call(lambda: self.world.crash(name))
        elif kind == "evict":
            self.cluster.do(self.world.evict(name))
        elif kind == "fail" and agent.state is AgentState.RUNNING:
            agent.state, agent.failure = AgentState.FAILED, FailureKind.ERROR
        elif kind == "hang up":
            self.cluster.do(self.world.cluster.delete(f"{PODS}/{name}", agent.pod.uid))

    @rule(number=st.integers(0, NODES - 1), ready=st.booleans())
    def node_down_or_up(self, number: int, ready: bool) -> None:
        obj = copy.deepcopy(self.world.nodes[f"n{number}"])
        obj["status"]["conditions"][0]["status"] = str(ready)
        self.cluster.put_node(obj)
        for pod in self.world.pods():
            if not ready and pod.node == f"n{number}":
                self.cluster.call(partial(self.world.crash, pod.name))

    @rule(number=st.integers(0, NODES - 1), cordoned=st.booleans())
    def cordon(self, number: int, cordoned: bool) -> None:
        obj = copy.deepcopy(self.world.nodes[f"n{number}"])
        obj["spec"] = {"unschedulable": cordoned}
        self.cluster.put_node(obj)

    @rule()
    def kill_the_operator(self) -> None:
        self.world.cluster.watchers.clear()
        missed = any(operator.missed for operator in self.world.operators)
        self.world.operators = [self.cluster.do(_operator(self.world))]
        # What the former one did with an old view is still there.
        self.world.operators[0].missed = missed

    @rule()
    def lose_the_watches(self) -> None:
        for operator in self.world.operators:
            operator.blind = True

    @rule(seconds=st.sampled_from([0, 1, 5, 20]))
    def delay_the_watches(self, seconds: int) -> None:
        for operator in self.world.operators:
            operator.lag = timedelta(seconds=seconds)

    @rule()
    def begin_a_list(self) -> None:
        """The server answers from what it knows now; the answer arrives later, maybe after that of a later list."""
        self.lists.append((self.world.operators[0], self.world.operators[0].begin_list()))

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def end_a_list(self, data: st.DataObject) -> None:
        """What it says is old by now."""
        number = data.draw(st.integers(0, len(self.lists) - 1))
        operator, arrive = self.lists.pop(number)
        if operator in self.world.operators:
            self.cluster.call(arrive)

    @rule(seconds=st.sampled_from([-86400, -3600, -30, 0, 30, 3600, 86400]))
    def set_the_clock(self, seconds: int) -> None:
        """Of the operators' machines."""
        for operator in self.world.operators:
            operator.clock_error = timedelta(seconds=seconds)

    @rule(every=st.integers(2, 4))
    def let_the_server_fail(self, every: int) -> None:
        calls = iter(range(10**9))
        unreachable = ApiError(0, "Unreachable", "connection reset")
        self.world.cluster.refuse = lambda path, body: unreachable if next(calls) % every == 0 else None

    @rule(seconds=st.sampled_from([1, 2, 5, 20, 60]))
    def wait(self, seconds: int) -> None:
        self.cluster.do(self.world.run(seconds))

    def teardown(self) -> None:
        """Faults end, watches stand again, time passes: now look."""
        self.end_faults()
        settled = self.cluster.settle()
        wanted = {name: obj["spec"] for name, obj in self.cluster.jobs().items() if not obj["spec"].get("suspend")}
        usable = self.usable_nodes()
        event(f"{len(wanted)} jobs, {len(usable)} nodes")
        if sum(spec["replicas"] for spec in wanted.values()) <= len(usable):
            assert settled == self.oracle(), "the way here shows"
        elif wanted and min(spec["replicas"] for spec in wanted.values()) <= len(usable):
            # Who came first is history; that somebody runs, and nobody in part, is not.
            assert any(runs(settled[name]) for name in wanted), settled
        for name in wanted:
            # As large as its plan in effect says: an edit that does not fit waits, and the former gang runs on.
            pods = settled[name]["pods"]
            assert not pods or len(pods) == settled[name]["world"][-1], "a gang is whole, or it is not there"
        self.cluster.check_steady()
        self.cluster.close()

    def end_faults(self) -> None:
        """The API server answers, watches stand, clocks are right again, and no edit waits."""
        self.world.cluster.refuse = lambda path, body: None
        for name, obj in self.cluster.jobs().items():
            if "updatePolicy" in obj["spec"]:
                self.cluster.edit(name, updatePolicy="Now")
        for operator in self.world.operators:
            operator.clock_error, operator.lag = timedelta(0), timedelta(0)
            operator.blind = False

    def usable_nodes(self) -> list[KubeObject]:
        """The nodes that accept pods."""
        return [
            obj
            for obj in self.world.nodes.values()
            if obj["status"]["conditions"][0]["status"] == "True" and not obj.get("spec", {}).get("unschedulable")
        ]

    def oracle(self) -> dict[str, Any]:
        """What a fresh operator makes of the final input."""
        fresh = Cluster(self.seed + 1, self.world.nodes)
        for name, obj in self.cluster.jobs().items():
            fresh.world.submit({**submitted(name, 1), "spec": copy.deepcopy(obj["spec"])})
        found = fresh.settle()
        fresh.close()
        return found


def runs(job: dict[str, Any]) -> bool:
    """Whether its gang trains, maybe as it was before an edit for which there is no room."""
    held = job["Ready"] == ("False", "EditDoesNotFit") and bool(job["pods"])
    return job["Ready"] == ("True", "Running") or (held and all(phase == "Running" for _, phase, *_ in job["pods"]))


async def _operator(world: World) -> Operator:
    return Operator(world)


def chaos_test(machine: type[RuleBasedStateMachine], default: int) -> Any:
    """The test of a machine: so many histories, unless others are asked for."""

    class Case(machine.TestCase):  # type: ignore[name-defined, misc]
        def setUp(self) -> None:
            # Hypothesis parses this file. In CPython 3.11 that fails if a finalizer of an earlier test runs meanwhile.
            gc.collect()
            super().setUp()

    Case.settings = settings(
        max_examples=histories(default),
        stateful_step_count=20,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking would take longer than finding
        derandomize=not ASKED,
    )
    return pytest.mark.chaos(Case)


TestSettling = chaos_test(Settling, 6)
