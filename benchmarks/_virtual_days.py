"""Runs a day in virtual time, from event to event, around the operator's own reconciler, queue, placer and preemption.

The operator and the API server in memory are those of its tests (`tests/operator/world.py`). Kubelets, nodes and agents
react when something happens to them, instead of every second: agents report before each reconcile of their job, which
is what the operator has heard by then from agents that report every few seconds.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from benchmarks._day_traces import GPUS, NODES, Arrival, Outage, Trace
from meshwright.api.objects import KubeObject
from meshwright.planner.cost_model import Calibration
from meshwright.protocol.messages import AgentState, MeshRequest, WorkerReport
from meshwright_operator.coordinator.agent_registry import AgentRegistry
from meshwright_operator.kube.cache import JobKey
from meshwright_operator.kube.client import Page
from meshwright_operator.kube.job_event import JobEvent
from meshwright_operator.kube.parsed_jobs import ParsedJobs
from meshwright_operator.kube.pod_info import Pod, read_pod
from meshwright_operator.kube.watches import EventHandlers
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.planning.planner import Planner
from meshwright_operator.planning.request import Answer
from meshwright_operator.scheduling import placer
from meshwright_operator.scheduling.inventories import Inventories
from tests.operator.builders import NOW
from tests.operator.memory import MemoryCluster, copied
from tests.operator.support import JOBS, PODS
from tests.operator.world import Agent, Notes, Operator, VirtualQueue, World

BIND_SECONDS = 1.0
START_SECONDS = 25.0
"""From a bound pod to an agent that polls: image, volumes, import of torch."""
LOAD_SECONDS = 30.0
"""From a mesh generation to its first step: rendezvous, checkpoint."""
SAVE_SECONDS = 10.0
"""Of a checkpoint before a planned stop."""
EXIT_SECONDS = 2.0
CHECKPOINT_SECONDS = 600.0
"""Between two checkpoints. A crash repeats the steps since the last one."""
NOT_READY_SECONDS = 40.0
"""Until Kubernetes sees that a node is down."""
CLEAN_UP_SECONDS = 150.0
"""After its last step, a job is complete, and its user deletes it."""
WAITING_SECONDS = 300.0
"""Shortest time between two requests of a job without pods that nothing woke. Other pods, which no watch reports and
for which it asks more often, do not exist here."""
SHORTEST_SECONDS = 1e-3
"""Shortest time between two requests of any job that nothing woke."""
REPORT_SECONDS = 1e6
"""The interval that agents follow. None is silent before."""
LONGEST = 4 * 86400.0
MOST_ROUNDS = 200
"""Rounds of reconciles at one instant."""


class RecordedEvents(Notes):
    """Events with their time."""

    def __init__(self, world: DayWorld) -> None:
        super().__init__()
        self._world = world

    def post(self, job: KubeObject, note: JobEvent) -> None:
        if note.reason == "Rescaled":
            name = job["metadata"]["name"]
            self._world.jobs[name].resized(self._world.seconds(), note.message, starts=not self._world.of_job.get(name))


class DayQueue(VirtualQueue):
    """Keys that are due; those of jobs that only wait are due less often."""

    def __init__(self, world: DayWorld) -> None:
        super().__init__(world)
        self._waits = world.waits

    def add_after(self, key: JobKey, seconds: float) -> None:
        # Sums of floats make delays below a microsecond, which virtual time would never pass.
        super().add_after(key, max(seconds, WAITING_SECONDS if self._waits(key) else SHORTEST_SECONDS))


class InlineExecutor(ThreadPoolExecutor):
    """Does what the operator has threads for at once: a switch of threads takes longer on a busy machine."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The result, or the exception, of the call."""
        done: Future[Any] = Future()
        try:
            done.set_result(call(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 the caller gets it
            done.set_exception(error)
        return done


class SharedPlanner(Planner):
    """Plans of all days: the same few specs."""

    answers: OrderedDict[bytes, Answer] = OrderedDict()

    def __init__(self, inventories: Inventories, calibration: Callable[[], Calibration], world: DayWorld) -> None:
        super().__init__(inventories, calibration, world.seconds)
        self._answers = self.answers


class OwnPods(MemoryCluster):
    """An API server without other pods than those of jobs."""

    async def pages(self, path: str, **query: str) -> AsyncIterator[Page]:
        """One empty page for other pods."""
        if query.get("labelSelector", "").startswith("!"):
            yield Page([], "")
            return
        async for page in super().pages(path, **query):
            yield page

    def _tell(self, kind: str, path: str, obj: KubeObject) -> None:
        """One copy for all: neither the operator nor the world changes what it is told."""
        told = copied(obj)
        for watcher in self.watchers:
            watcher(kind, told)


@dataclass(slots=True)
class Resize:
    """One change of a job's size."""

    at: float
    before: int
    after: int
    for_job: str
    """The waiting job for which it shrank; empty for none."""
    starts: bool
    """Whether it had no pod, as before its first start and after it lost them all."""


@dataclass(slots=True)
class DayJob:
    """A job of the day, with how far its training is."""

    arrival: Arrival
    done: float = 0.0
    """Replica-seconds of training that will not be repeated."""
    repeated: float = 0.0
    rate: int = 0
    """Replicas that train now."""
    since: float = 0.0
    """Since when they do."""
    generation: int = 0
    """The mesh generation that trains, or loads its checkpoint."""
    trained_first: float | None = None
    ended: float | None = None
    resizes: list[Resize] = field(default_factory=list)
    useful: list[tuple[float, float, float]] = field(default_factory=list)
    """(from, until, replicas) in which it trained."""

    def resized(self, now: float, message: str, *, starts: bool = False) -> None:
        """A resize, from the message of its event."""
        words = message.replace(":", " ").replace(",", " ").split()
        before, after = (int(word) for word in words if word.isdigit())
        for_job = words[words.index("job") + 1] if "job" in words else ""
        self.resizes.append(Resize(now, before, after, for_job, starts))

    def stop(self, now: float, *, saved: bool) -> None:
        """Its ranks stop. Without a checkpoint, the steps since the last one are lost."""
        if self.rate:
            until = now if saved else self.since + (now - self.since) // CHECKPOINT_SECONDS * CHECKPOINT_SECONDS
            self.done += self.rate * (until - self.since)
            self.repeated += self.rate * (now - until)
            if until > self.since:
                self.useful.append((self.since, until, self.rate))
        self.rate = self.generation = 0


class DayAgent(Agent):
    """An agent that speaks when there is something to say."""

    hello: MeshRequest | None = None
    reported: WorkerReport | None = None

    def report(self) -> WorkerReport:
        """Its report, made anew if anything has changed."""
        last = self.reported
        if last is None or (last.state, last.generation) != (self.state, self.generation):
            last = self.reported = super().report()
        return last

    def report_to(self, registry: AgentRegistry) -> None:
        """Its poll and its report, as they are known by now."""
        hello = self.hello = self.hello or self._hello()
        with registry.polling(hello):
            pass
        registry.receive_report(self.report(), interval=REPORT_SECONDS)

    def follow(self, registry: AgentRegistry) -> bool:
        """Takes a newer generation. Returns whether it did."""
        hello = self.hello = self.hello or self._hello()
        document = None if registry.superseded(hello) else registry.document_for(hello)
        if document is None:
            return False
        self.generation, self.state, self.hello = document.generation, AgentState.RUNNING, None
        return True


class DayWorld(World):
    """One day with rigid or elastic jobs."""

    def __init__(self, trace: Trace, *, elastic: bool) -> None:
        self.jobs: dict[str, DayJob] = {}
        self.of_job: dict[str, dict[str, Pod]] = defaultdict(dict)
        """Job -> its pods that have not ended, by name."""
        self._events: list[tuple[float, int, Callable[[], Awaitable[None] | None]]] = []
        self._count = itertools.count()
        super().__init__(0, NODES, gpus=GPUS, cluster=OwnPods)
        self.cluster.on_pod_change = lambda old, new: None
        self.cluster.watchers.append(self._see)
        self._watch = EventHandlers(self.operators[0].cache, self.operators[0].queue, OperatorMetrics())
        for arrival in trace.arrivals:
            self.jobs[arrival.name] = DayJob(arrival)
            self._at(arrival.arrives, partial(self.submit, arrival.body(elastic=elastic)))
        for outage in trace.outages:
            self._at(outage.begins, lambda outage=outage: self._fail(outage))

    # The parts of the operator that differ.

    def operator(self) -> Operator:
        for number, obj in enumerate(self.nodes.values()):
            obj["metadata"]["labels"]["network.topology.nvidia.com/leaf"] = f"rack-{number // 16}"
        return super().operator()

    def queue(self) -> VirtualQueue:
        return DayQueue(self)

    def recorder(self) -> Notes:
        return RecordedEvents(self)

    def parsed_jobs(self) -> ParsedJobs:
        return ParsedJobs()

    def planner(self, inventories: Inventories, calibration: Callable[[], Calibration]) -> Planner:
        return SharedPlanner(inventories, calibration, self)

    def agent(self, pod: Pod, address: str) -> Agent:
        return DayAgent(pod, pod.owner, address)

    def waits(self, key: JobKey) -> bool:
        """Whether a job has no pods."""
        return not self.of_job.get(key.name)

    # Time.

    async def run_day(self) -> None:
        """Runs until every job has ended.

        Raises:
            AssertionError: A job does not end, or its reconciles do not.
        """
        placer.LONGEST_PAUSE_SECONDS = 0.0  # nobody else needs this process
        asyncio.get_running_loop().set_default_executor(InlineExecutor())
        queue = self.operators[0].queue
        while any(job.ended is None for job in self.jobs.values()) or self._events:
            await self._reconcile_due()
            following = [self._events[0][0]] if self._events else []
            following += [(when - NOW).total_seconds() for when in queue.due.values()]
            now = min(following, default=LONGEST)
            assert now < LONGEST, f"not ended: {[name for name, job in self.jobs.items() if job.ended is None]}"
            self.now = max(self.now, NOW + timedelta(seconds=now))
            while self._events and self._events[0][0] <= now:
                _, _, call = heapq.heappop(self._events)
                if (waiting := call()) is not None:
                    await waiting

    async def _reconcile_due(self) -> None:
        operator = self.operators[0]
        for _ in range(MOST_ROUNDS):
            await operator.scheduler.idle()
            due = sorted(key for key, when in operator.queue.due.items() if when <= self.now)
            if not due:
                return
            for key in due:
                operator.queue.due.pop(key, None)
                self._report(key.name)
                await operator.reconciler(key)
                self._converse(key.name)
        raise AssertionError(f"reconciles do not end at {self.seconds():.0f} s: {due}")

    def _at(self, seconds: float, call: Callable[[], Awaitable[None] | None]) -> None:
        heapq.heappush(self._events, (round(seconds, 3), next(self._count), call))

    def _after(self, seconds: float, call: Callable[[], Awaitable[None] | None]) -> None:
        self._at(self.seconds() + seconds, call)

    # Agents and ranks.

    def _agents(self, name: str) -> list[DayAgent]:
        found = (self.agents.get(pod) for pod in self.of_job.get(name, ()))
        return [agent for agent in found if isinstance(agent, DayAgent)]

    def _report(self, name: str) -> None:
        """All agents of a job report, as they do every few seconds."""
        if agents := self._agents(name):
            registry = self.operators[0].coordinator.registry(agents[0].uid)
            for agent in agents:
                agent.report_to(registry)

    def _converse(self, name: str) -> None:
        """The agents of a job see what its reconcile has published."""
        agents = self._agents(name)
        if not agents:
            return
        job, registry = self.jobs[name], self.operators[0].coordinator.registry(agents[0].uid)
        running = [agent for agent in agents if agent.state is AgentState.RUNNING]
        if registry.pause is not None and any(agent.generation == registry.pause for agent in running):
            if job.generation:
                job.stop(self.seconds(), saved=True)
                self._after(SAVE_SECONDS, lambda: self._saved(name, registry.pause))
            return
        followed = [agent.follow(registry) for agent in agents]
        if any(followed):
            self.operators[0].queue.add(JobKey("default", name))
        document = registry.document
        if document is None or document.generation == job.generation:
            return
        there = {agent.pod.worker for agent in agents if agent.generation == document.generation}
        if there >= {member.worker for member in document.members}:
            job.stop(self.seconds(), saved=True)
            job.generation = document.generation
            self._after(LOAD_SECONDS, lambda: self._train(name, document.generation, len(document.members)))

    def _saved(self, name: str, generation: int | None) -> None:
        """The ranks that were paused have saved a checkpoint and exited."""
        for agent in self._agents(name):
            if agent.generation == generation and agent.state is AgentState.RUNNING:
                agent.state = AgentState.IDLE
        self.operators[0].queue.add(JobKey("default", name))

    def _train(self, name: str, generation: int, replicas: int) -> None:
        job = self.jobs[name]
        if job.generation != generation or job.rate or job.ended is not None:
            return
        job.rate, job.since = replicas, self.seconds()
        job.trained_first = self.seconds() if job.trained_first is None else job.trained_first
        left = max(0.0, job.arrival.work - job.done) / replicas
        self._after(left, lambda: self._complete(name, generation))

    def _complete(self, name: str, generation: int) -> None:
        job = self.jobs[name]
        if job.generation != generation or not job.rate or job.ended is not None:
            return
        job.stop(self.seconds(), saved=True)
        job.ended = self.seconds()
        for agent in self._agents(name):
            if agent.generation == generation:
                agent.state = AgentState.COMPLETE
                self._after(EXIT_SECONDS, lambda pod=agent.pod.name: self._exit(pod))
        self.operators[0].queue.add(JobKey("default", name))
        self._after(CLEAN_UP_SECONDS, lambda: self._clean_up(name))

    def _exit(self, pod: str) -> None:
        path = f"{PODS}/{pod}"
        if (obj := self.cluster.objects.get(path)) is not None and (info := read_pod(obj)) is not None:
            self._finish(path, obj, info)

    def _clean_up(self, name: str) -> None:
        """The user deletes a job that is complete, and the garbage collector its pods."""
        assert self.true(name, "Complete"), f"{name} has ended and is not complete: {self.status(name)['conditions']}"
        self.cluster.remove(f"{JOBS}/{name}")
        for path in [path for path, obj in self.cluster.objects.items() if _is_pod_of(path, obj, name)]:
            self.cluster.remove(path)

    # Pods and nodes.

    def _see(self, kind: str, obj: KubeObject) -> None:
        """Kubelets, agents and ranks learn of a changed pod."""
        if obj.get("kind") != "Pod" or (pod := read_pod(obj)) is None:
            return
        pods, known = self.of_job[pod.job], self.of_job[pod.job].get(pod.name)
        agent = self.agents.get(pod.name)
        if kind == "DELETED" or pod.terminal:
            pods.pop(pod.name, None)
            self.agents.pop(pod.name, None)
        else:
            pods[pod.name] = pod
        if (
            agent is not None
            and (kind == "DELETED" or pod.deleting)
            and agent.generation == self.jobs[pod.job].generation
        ):
            self.jobs[pod.job].stop(self.seconds(), saved=pod.deleting)
        if kind == "DELETED" or pod.terminal:
            return
        if pod.deleting:
            if known is None or not known.deleting:
                self._after(SAVE_SECONDS, lambda: self._end(pod.name))
        elif not pod.gates and not pod.bound and (known is None or known.gates):
            self._after(BIND_SECONDS, lambda: self._bind(pod.name))

    def _end(self, name: str) -> None:
        if f"{PODS}/{name}" in self.cluster.objects:
            self.cluster.remove(f"{PODS}/{name}")

    def _bind(self, name: str) -> None:
        path = f"{PODS}/{name}"
        obj = self.cluster.objects.get(path)
        if obj is None or (pod := read_pod(obj)) is None or pod.deleting:
            return
        others = [one for pods in self.of_job.values() for one in pods.values() if one.node == pod.node and one.bound]
        assert not others, f"{name} was promised {pod.node}, which has {others}"
        obj["spec"]["nodeName"] = pod.node
        self.cluster.update(path, obj)
        self._after(START_SECONDS, lambda: self._run(name))

    def _run(self, name: str) -> None:
        path = f"{PODS}/{name}"
        obj = self.cluster.objects.get(path)
        if obj is not None and (pod := read_pod(obj)) is not None and not pod.deleting and self._accepts(pod.node):
            self._start(path, obj, pod)
            self.operators[0].queue.add(JobKey("default", pod.job))

    def _fail(self, outage: Outage) -> None:
        """A node stops. Kubernetes sees it later."""
        for pods in self.of_job.values():
            for pod in list(pods.values()):
                if pod.node == outage.node and self.agents.pop(pod.name, None) is not None:
                    self.jobs[pod.job].stop(self.seconds(), saved=False)
        self._after(NOT_READY_SECONDS, lambda: self._set_ready(outage.node, ready=False))
        self._at(outage.ends, lambda: self._set_ready(outage.node, ready=True))

    async def _set_ready(self, name: str, *, ready: bool) -> None:
        obj: dict[str, Any] = self.nodes[name]
        obj["status"]["conditions"][0]["status"] = str(ready)
        self.cluster.stamp(obj)
        self._watch.node({"type": "MODIFIED", "object": copied(obj)})
        if not ready:
            lost = [pod.name for pods in self.of_job.values() for pod in pods.values() if pod.node == name]
            for pod in lost:
                self._end(pod)


def _is_pod_of(path: str, obj: KubeObject, job: str) -> bool:
    return "/pods/" in path and (pod := read_pod(obj)) is not None and pod.job == job
