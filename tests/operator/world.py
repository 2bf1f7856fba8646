"""A cluster in virtual time around the operator's own code: reconciler, decisions, placer, boards and cache are real.

What is simulated: the API server (a dict), the scheduler and node agents (pods run a moment after their gates are off),
and worker agents, which call the agent registry instead of HTTP. Whatever must never happen is checked when it would.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from meshwright.api.labels import GANG_GATE
from meshwright.api.objects import KubeObject
from meshwright.api.parsing import InvalidSpecError, parse_spec, parse_status
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.planner.cost_model import Calibration
from meshwright.protocol.messages import (
    AgentState,
    CheckpointAnswer,
    CheckpointCommit,
    FailureKind,
    MeshDocument,
    MeshRequest,
    Progress,
    RankProcess,
    WorkerReport,
)
from meshwright_operator.controller.job_devices import JobDevices
from meshwright_operator.controller.job_profiles import JobProfiles
from meshwright_operator.controller.job_reporter import JobReporter
from meshwright_operator.controller.observe import JobObserver
from meshwright_operator.controller.pod_contexts import PodContexts
from meshwright_operator.controller.pod_deletions import PodDeletions
from meshwright_operator.controller.reconciler import Reconciler
from meshwright_operator.controller.status_patch import StatusWriter
from meshwright_operator.coordinator.server import Coordinator
from meshwright_operator.coordinator.tokens import Tokens
from meshwright_operator.devices.inventory import DeviceInventory
from meshwright_operator.kube.cache import Cache, JobKey, awaits_layout, key_of, pod_key_of
from meshwright_operator.kube.client import ApiError, KubeClient
from meshwright_operator.kube.job_event import JobEvent
from meshwright_operator.kube.parsed_jobs import ParsedJobs
from meshwright_operator.kube.pod_info import Pod, read_pod
from meshwright_operator.kube.progress_budget import PROGRESS_WRITES_PER_SECOND, ProgressBudget
from meshwright_operator.kube.recorder import EventRecorder
from meshwright_operator.kube.workqueue import WorkQueue
from meshwright_operator.manifests.network_policy import NetworkPolicyOptions
from meshwright_operator.metrics.job_metrics import JobMetrics
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.planning.planner import Planner
from meshwright_operator.scheduling.inventories import Inventories
from meshwright_operator.scheduling.scheduler import JobScheduler
from meshwright_operator.timestamps import format_time, parse_time
from tests.operator.builders import NOW
from tests.operator.memory import MemoryCluster
from tests.operator.support import JOBS, PODS, node


class UnchangedParsedJobs(ParsedJobs):
    """Checks that nobody has changed what all share."""

    def __init__(self) -> None:
        super().__init__()
        self._checked: dict[JobKey, tuple[object, ParallelTrainingJobSpec]] = {}
        """The spec of each job's object, and what nobody else has parsed from it."""

    def check(self, key: JobKey, job: KubeObject) -> None:
        """Check a job's, after it was reconciled."""
        assert self.status(job) == parse_status(job), "somebody changed the shared status"
        with contextlib.suppress(InvalidSpecError):
            spec = job.get("spec")
            if key not in self._checked or self._checked[key][0] != spec:
                self._checked[key] = copy.deepcopy(spec), parse_spec(job)
            assert self.spec(job) == self._checked[key][1], "somebody changed the shared spec"


class VirtualQueue(WorkQueue[JobKey]):
    """Keys with the virtual time at which they are due."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.due: dict[JobKey, datetime] = {}

    def __len__(self) -> int:
        return len(self.due)

    def add(self, key: JobKey) -> None:
        self.due[key] = self._world.now

    def add_after(self, key: JobKey, seconds: float) -> None:
        when = self._world.now + timedelta(seconds=seconds)
        self.due[key] = min(when, self.due.get(key, when))

    def forget(self, key: JobKey) -> None:
        self.due.pop(key, None)


class Notes(EventRecorder):
    """Keeps notes instead of posting them."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, JobEvent]] = []

    def post(self, job: Mapping[str, Any], note: JobEvent) -> None:
        self.notes.append((job["metadata"]["name"], note))

    def reasons(self, job: str) -> list[str]:
        return [note.reason for name, note in self.notes if name == job]


class Operator:
    """One operator process: its cache, its queue, its memory."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.cache, self.queue, self.notes = Cache(), world.queue(), world.recorder()
        self.cache.parsed = world.parsed_jobs()
        self.blind = False
        """While set, no watch event reaches the cache."""
        self.missed = False
        """Whether an event ever passed it by, or came late."""
        self.lag = timedelta(0)
        """How late its watches are. The events of one resource keep their order."""
        self.clock_error = timedelta(0)
        """How far its clock is ahead of the cluster's."""
        self._late: dict[str, list[tuple[datetime, str, KubeObject]]] = defaultdict(list)
        self.metrics, self.jobs, tokens = OperatorMetrics(), JobMetrics(), Tokens(b"k" * 32)
        self.cluster = world.connect(self.metrics)
        self.coordinator = Coordinator(self.cache, tokens, self.metrics, self.notify, world.seconds)
        inventories = Inventories(self.cache)
        self.scheduler = JobScheduler(
            self.cluster, self.cache, self.metrics, (), self.queue.add, inventories, world.seconds
        )
        self.planner = world.planner(inventories, lambda: self.scheduler.calibration)
        self.profiles = JobProfiles(tokens.seal)
        self.devices = DeviceInventory(self.cluster, self.cache, lambda: None)
        budget = ProgressBudget(world.progress_writes_per_second, world.seconds)
        writer = StatusWriter(self.cluster, self.cache, self.queue, world.seconds, budget)
        observer = JobObserver(
            self.cache,
            self.scheduler,
            self.planner,
            profiles=self.profiles,
            devices=JobDevices(self.cluster, self.devices, world.seconds),
            deletions=PodDeletions(world.seconds),
        )
        self.reconciler = Reconciler(
            self.cluster,
            self.queue,
            self.coordinator,
            observer,
            PodContexts(tokens, inventories, lambda: "http://coordinator", network_policies=world.network_policies),
            JobReporter(writer, self.notes, self.metrics, self.jobs, self.now),
            self.metrics,
            self.now,
        )
        self.relist()
        world.cluster.watchers.append(self.see)

    def now(self) -> datetime:
        """The time, as this process knows it."""
        return self.world.now + self.clock_error

    def notify(self, key: JobKey, urgent: bool) -> None:
        """An agent sent a report."""
        if urgent:
            self.queue.add(key)
        else:
            self.queue.add_after(key, 10.0)

    def relist(self) -> None:
        """What a start or a resync does."""
        for ghost in self.cache.all_pods():
            if f"{PODS}/{ghost.name}" not in self.world.cluster.objects:
                self.cache.remove_pod(ghost)
        for obj in self.world.cluster.of("paralleltrainingjobs"):
            self.cache.put_job(obj)
            self.queue.add(key_of(obj))
        for obj in self.world.cluster.of("pods"):
            if (pod := read_pod(obj)) is not None:
                self.cache.put_pod(pod)
        for obj in self.world.nodes.values():
            self.cache.put_node(obj)

    def see(self, kind: str, obj: KubeObject) -> None:
        """A watch event."""
        if self.blind:
            self.missed = True
            return
        late = self._late[str(obj.get("kind"))]
        if self.lag or late:
            self.missed = True
            due = max([self.world.now + self.lag, *(when for when, _, _ in late[-1:])])
            late.append((due, kind, obj))
            return
        self._take(kind, obj)

    @property
    def behind(self) -> bool:
        """Whether something may be gone of which it has not been told."""
        return self.blind or bool(self.lag) or any(self._late.values())

    def take_late_events(self) -> None:
        """The events whose time has come."""
        for late in self._late.values():
            while late and late[0][0] <= self.world.now:
                _, kind, obj = late.pop(0)
                if not self.blind:
                    self._take(kind, obj)

    def begin_list(self) -> Callable[[], None]:
        """The server answers from what it knows now. The answer arrives when the result is called."""
        cluster, cache = self.world.cluster, self.cache
        jobs, pods = copy.deepcopy(list(cluster.of("paralleltrainingjobs"))), copy.deepcopy(list(cluster.of("pods")))
        nodes = copy.deepcopy(list(self.world.nodes.values()))
        version = cluster.version
        listings = cache.begin_nodes_listing(), cache.begin_pods_listing(None), cache.begin_jobs_listing(None)

        def arrive() -> None:
            for listing in listings:
                listing.start_page(version)
            for obj in nodes:
                listings[0].add(obj["metadata"]["name"], obj["metadata"]["uid"])
                cache.put_node(obj)
            for obj in pods:
                listings[1].add(pod_key_of(obj), obj["metadata"]["uid"])
                if (pod := read_pod(obj)) is not None:
                    cache.put_pod(pod)
            for obj in jobs:
                listings[2].add(key_of(obj), obj["metadata"]["uid"])
                cache.put_job(obj)
            cache.finish_nodes_listing(listings[0])
            cache.finish_pods_listing(listings[1])
            for key in [*cache.finish_jobs_listing(listings[2]), *cache.jobs]:
                self.queue.add(key)

        return arrive

    def _take(self, kind: str, obj: KubeObject) -> None:
        if obj.get("kind") != "Pod":
            self.cache.remove_job(obj) if kind == "DELETED" else self.cache.put_job(obj)
            self.queue.add(key_of(obj))
            return
        pod = read_pod(obj)
        if pod is None:
            return
        self.cache.remove_pod(pod) if kind == "DELETED" else self.cache.put_pod(pod)
        self.queue.add(JobKey(pod.namespace, pod.job))

    def nodes_changed(self) -> None:
        """What a watch event of a node does, once the cache has it."""
        for key, job in self.cache.jobs.items():
            if awaits_layout(job):
                self.queue.add(key)

    async def run_due(self, random: random.Random) -> int:
        """Reconciles every key that is due, in any order; how many."""
        await self.scheduler.idle()
        due = [key for key, when in self.queue.due.items() if when <= self.world.now]
        random.shuffle(due)
        for key in due:
            self.queue.due.pop(key, None)
            try:
                await self.reconciler(key)
            except ApiError:
                self.queue.add_after(key, 1.0)
            if isinstance(self.cache.parsed, UnchangedParsedJobs) and (job := self.cache.jobs.get(key)) is not None:
                self.cache.parsed.check(key, job)
        return len(due)


@dataclass
class Agent:
    """A worker pod's agent: takes generations, trains for a while, completes."""

    pod: Pod
    uid: str
    address: str
    generation: int = 0
    trained: float = 0.0
    state: AgentState = AgentState.IDLE
    silent: bool = False
    preparing: bool = False
    hung: bool = False
    """Its ranks live and do nothing."""
    failure: FailureKind | None = None
    idle: float = 0.0
    document: MeshDocument | None = None
    """The generation that it took last."""
    saved: CheckpointCommit | None = None
    """What its ranks saved last, when they paused or were asked, if one of them is rank 0."""
    answers: bool = True
    """Whether it knows requests for checkpoints."""
    answer: CheckpointAnswer | None = None
    """The last request for a checkpoint. Its ranks save in the round after it."""

    def train(self, seconds: float, work: float) -> None:
        """Its ranks go on, whoever listens."""
        if self.state is AgentState.RUNNING:
            self.trained += 0.0 if self.hung else seconds
            self.idle = self.idle + seconds if self.hung else 0.0
            if self.trained >= work:
                self.state = AgentState.COMPLETE

    def talk(self, operator: Operator) -> None:
        """One round with the coordinator."""
        if self.silent:
            return
        registry, key = operator.coordinator.registry(self.uid), JobKey(self.pod.namespace, self.pod.job)
        if self.state is AgentState.RUNNING and registry.pause == self.generation and not self.hung:
            self.state = AgentState.IDLE
            if self.first_rank == 0:
                self.saved = self._commit(operator, int(self.trained))
        if self.answer is not None and self.answer.step is not None and self.state is AgentState.RUNNING:
            self.saved = self._commit(operator, self.answer.step)
        asked = registry.checkpoint_request_for(self.pod.worker)
        if self.answers and asked and (self.answer is None or self.answer.request != asked):
            self.answer = CheckpointAnswer(request=asked, step=int(self.trained) + 1)
        hello = self._hello()
        if registry.superseded(hello):
            self.state = AgentState.DRAINING
            return
        document = registry.document_for(hello)
        if document is not None:
            self.generation, self.state, self.trained, self.idle = document.generation, AgentState.RUNNING, 0.0, 0.0
            self.failure, self.hung, self.document, self.saved = None, False, document, None
            self.answer, hello = None, self._hello()
        new = registry.is_new(hello)
        with registry.polling(hello):
            if new:
                operator.notify(key, urgent=True)
        operator.notify(key, registry.receive_report(self.report()))

    @property
    def first_rank(self) -> int:
        """Its first rank in the generation that it took last; -1 before the first."""
        members = self.document.members if self.document is not None else []
        return next((member.first_rank for member in members if member.worker == self.pod.worker), -1)

    def _commit(self, operator: Operator, step: int) -> CheckpointCommit:
        return CheckpointCommit(step=step, time=format_time(operator.now()), path=f"step-{step:08d}")

    def _hello(self) -> MeshRequest:
        return MeshRequest(
            worker=self.pod.worker,
            incarnation=self.pod.incarnation,
            pod_uid=self.pod.uid,
            generation=self.generation,
            address=self.address,
            store_port=20000,
            preparing=self.preparing,
        )

    def report(self) -> WorkerReport:
        step = int(self.trained)
        live = self.state is AgentState.RUNNING
        process = RankProcess(
            rank=max(0, self.first_rank), pid=7, step=step, idle_seconds=self.idle, state="T" if self.hung else ""
        )
        return WorkerReport(
            worker=self.pod.worker,
            incarnation=self.pod.incarnation,
            pod_uid=self.pod.uid,
            generation=self.generation,
            state=self.state,
            failure=self.failure,
            ranks=[process] if live or self.saved else [],
            progress=Progress(step=step, loss=1.0, step_seconds=1.0) if live and self.first_rank == 0 else None,
            checkpoint=self.saved,
            checkpoint_request=self.answer,
        )


class World:
    """Nodes, pods, agents and operators."""

    network_policies: NetworkPolicyOptions | None = None
    """The option of its operators."""
    progress_writes_per_second = PROGRESS_WRITES_PER_SECOND
    """The same."""

    def __init__(
        self, seed: int, nodes: int, *, gpus: int = 2, work: float = 30.0, cluster: type[MemoryCluster] = MemoryCluster
    ) -> None:
        self.random = random.Random(seed)
        self.now = NOW
        self.cluster = cluster(lambda: self.now)
        self.cluster.on_pod_change = self._check_change
        self.nodes = {f"n{n}": node(f"n{n}", "r0", gpus) for n in range(nodes)}
        for name, obj in self.nodes.items():
            obj["metadata"]["uid"] = f"uid-of-{name}"
            self.cluster.stamp(obj)
        self.gpus = gpus
        self.work = work
        self.agents: dict[str, Agent] = {}
        self._read_pods: dict[str, tuple[str, Pod | None]] = {}
        """uid -> the version that was read last, and what it says."""
        self.unschedulable: set[str] = set()
        """Nodes that the scheduler refuses, whatever the operator believes."""
        self.rejecting: dict[str, str] = {}
        """Node -> reason for which its kubelet rejects pods."""
        self.stuck: set[str] = set()
        """Pods whose processes no kubelet can kill."""
        self.keeps_running: set[str] = set()
        """Pods with a container that does not exit, whatever their agents do."""
        self.broken_image = False
        self.mute = False
        """While set, agents of new pods reach no coordinator."""
        self.unprepared = False
        """While set, agents of new pods still import the training runtime."""
        self.started: list[tuple[str, int, int, int]] = []
        """(job uid, generation, worker, incarnation) of every start of a worker's ranks."""
        self.lost_unseen: set[str] = set()
        """Pods that went while an operator did not see it: it may take them for being there."""
        self.operators = [self.operator()]

    def operator(self) -> Operator:
        """A new operator process."""
        return Operator(self)

    # The parts of an operator that another world may replace.

    def queue(self) -> VirtualQueue:
        """The keys to reconcile."""
        return VirtualQueue(self)

    def recorder(self) -> Notes:
        """What receives the events."""
        return Notes()

    def parsed_jobs(self) -> ParsedJobs:
        """Parses the jobs of a cache."""
        return UnchangedParsedJobs()

    def planner(self, inventories: Inventories, calibration: Callable[[], Calibration]) -> Planner:
        """Makes the plans."""
        return Planner(inventories, calibration, self.seconds)

    def connect(self, metrics: OperatorMetrics) -> KubeClient:
        """The API server as an operator reaches it."""
        return self.cluster

    def agent(self, pod: Pod, address: str) -> Agent:
        """The agent of a pod that starts."""
        return Agent(pod, pod.owner, address, silent=self.mute, preparing=self.unprepared)

    def seconds(self) -> float:
        return (self.now - NOW).total_seconds()

    def submit(self, body: KubeObject) -> None:
        self.cluster.put(f"{JOBS}/{body['metadata']['name']}", body)

    def status(self, name: str) -> KubeObject:
        status: KubeObject = self.cluster.objects[f"{JOBS}/{name}"]["status"]
        return status

    def condition(self, name: str, kind: str) -> KubeObject:
        found: KubeObject = next((c for c in self.status(name).get("conditions", ()) if c["type"] == kind), {})
        return found

    def true(self, name: str, kind: str) -> bool:
        return self.condition(name, kind).get("status") == "True"

    def pods(self, job: str | None = None) -> list[Pod]:
        found = [pod for obj in self.cluster.of("pods") if (pod := self._read(obj)) is not None]
        return [pod for pod in found if job in (None, pod.job)]

    def _read(self, obj: KubeObject) -> Pod | None:
        """The pod, read once in each version."""
        metadata = obj["metadata"]
        version, pod = self._read_pods.get(metadata["uid"], ("", None))
        if version != metadata["resourceVersion"]:
            pod = read_pod(obj)
            self._read_pods[metadata["uid"]] = metadata["resourceVersion"], pod
        return pod

    async def run(self, seconds: float, step: float = 1.0) -> None:
        """Lets time pass."""
        for _ in range(round(seconds / step)):
            await self.tick(step)

    async def tick(self, step: float = 1.0) -> None:
        self.now += timedelta(seconds=step)
        pods = list(self.cluster.of("pods"))
        self.random.shuffle(pods)
        for obj in pods:
            self._kubelet(obj)
        for agent in list(self.agents.values()):
            before = agent.generation
            agent.train(step, self.work)
            for operator in self.operators:
                agent.talk(operator)
            if agent.generation > before:
                self.started.append((agent.uid, agent.generation, agent.pod.worker, agent.pod.incarnation))
                self._check_start(agent)
        for operator in self.operators:
            operator.take_late_events()
            for _ in range(20):
                if not await operator.run_due(self.random):
                    break
        self._check_pods()

    async def evict(self, name: str) -> None:
        """The pod gets SIGTERM, and takes its time to exit."""
        path = f"{PODS}/{name}"
        await self.cluster.delete(path, self.cluster.objects[path]["metadata"]["uid"])

    def crash(self, name: str) -> None:
        """The pod is gone at once, and its agent with it."""
        if any(operator.behind for operator in self.operators):
            self.lost_unseen.add(name)
        self.agents.pop(name, None)
        self.cluster.remove(f"{PODS}/{name}")

    def _kubelet(self, obj: KubeObject) -> None:
        metadata, spec, status = obj["metadata"], obj["spec"], obj["status"]
        path = f"{PODS}/{metadata['name']}"
        if path not in self.cluster.objects or status["phase"] in ("Succeeded", "Failed"):
            return
        pod = self._read(obj)
        if pod is None:
            return
        if pod.deleting:
            deleted = parse_time(metadata["deletionTimestamp"])
            if pod.name not in self.stuck and deleted is not None and self.now - deleted >= timedelta(seconds=2):
                self.crash(pod.name)
        elif not pod.gates and not pod.bound:
            if self._schedule(pod):
                spec["nodeName"] = pod.node
                self.cluster.update(path, obj)
            elif not pod.problem:
                reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
                status["conditions"] = [reason]
                self.cluster.update(path, obj)
        elif pod.bound and pod.phase == "Pending":
            self._start(path, obj, pod)
        elif (agent := self.agents.get(pod.name)) is not None and agent.state is AgentState.COMPLETE:
            self._finish(path, obj, pod)

    def _schedule(self, pod: Pod) -> bool:
        if pod.node in self.unschedulable or not self._accepts(pod.node):
            return False
        holders = [other for other in self.pods() if other.bound and other.node == pod.node and not other.terminal]
        free = len(holders) * 2 < self.gpus
        late = any(operator.missed for operator in self.operators)
        assert free or late, f"{pod.name} was promised {pod.node}, which is full: {holders}"
        return free

    def _accepts(self, node: str) -> bool:
        """Whether the node takes new pods: a node that is down or cordoned has a `NoSchedule` taint."""
        if not node:
            return True  # the pod of somebody else, which may run anywhere
        obj = self.nodes[node]
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in obj["status"]["conditions"])
        return ready and not obj.get("spec", {}).get("unschedulable")

    def _start(self, path: str, obj: KubeObject, pod: Pod) -> None:
        if (reason := self.rejecting.get(pod.node)) is not None:
            obj["status"] = {"phase": "Failed", "reason": reason, "message": "Pod was rejected"}
            self.cluster.update(path, obj)
            return
        if self.broken_image:
            waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
            if not pod.problem:
                obj["status"]["containerStatuses"] = [{"name": "worker", "state": waiting}]
                self.cluster.update(path, obj)
            return
        address = f"10.0.{len(self.started) % 250}.{self.random.randint(1, 250)}"
        obj["status"] = {"phase": "Running", "podIP": address}
        self.cluster.update(path, obj)
        self.agents[pod.name] = self.agent(pod, address)

    def _finish(self, path: str, obj: KubeObject, pod: Pod) -> None:
        if pod.name in self.keeps_running:
            return
        ended = {"terminated": {"exitCode": 0, "finishedAt": format_time(self.now)}}
        obj["status"] |= {"phase": "Succeeded", "containerStatuses": [{"name": "worker", "state": ended}]}
        self.agents.pop(pod.name)
        self.cluster.update(path, obj)

    def _check_change(self, old: KubeObject, new: KubeObject) -> None:
        """A gate may only come off when every pod of the gang is there."""
        gates = [gate["name"] for gate in new["spec"].get("schedulingGates") or ()]
        before = [gate["name"] for gate in old["spec"].get("schedulingGates") or ()]
        if GANG_GATE in before and GANG_GATE not in gates:
            pod = read_pod(old)
            assert pod is not None
            wanted = {entry["pod"] for entry in self.status(pod.job)["placement"]["workers"]}
            there = {other.name for other in self.pods(pod.job)} | self.lost_unseen
            assert wanted <= there, f"{pod.name} was started without {wanted - there}"

    def _check_start(self, agent: Agent) -> None:
        """At most one live set of ranks per worker and generation; and the generation is persisted."""
        same = [
            other.pod.name
            for other in self.agents.values()
            if (other.uid, other.pod.worker, other.generation) == (agent.uid, agent.pod.worker, agent.generation)
        ]
        assert len(same) == 1, f"two live ranks of one generation: {same}"
        persisted = self.status(agent.pod.job)["mesh"]["generation"]
        assert persisted >= agent.generation, f"generation {agent.generation} was announced before it was persisted"

    def _check_pods(self) -> None:
        """At most one live pod per worker, whatever its incarnation."""
        live: dict[tuple[str, int], str] = {}
        for pod in self.pods():
            if not pod.terminal and pod.name not in self.stuck:
                other = live.setdefault((pod.owner, pod.worker), pod.name)
                assert other == pod.name, f"{other} and {pod.name} live at once"
