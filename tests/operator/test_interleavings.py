"""Two or three things at once: random users, administrators, nodes and faults around jobs of every kind.

Other histories draw edits or faults of one kind of job. Here jobs complete, expire, are held by finalizers, preempt
each other and ask for checkpoints while requests fail, answers are lost and the operator dies between two writes.
"""

from __future__ import annotations

import copy
import json
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from meshwright.api.labels import ANNOTATION_CHECKPOINT
from meshwright.api.objects import KubeObject
from meshwright.protocol.messages import AgentState, FailureKind
from meshwright_operator.decide.succeeded_workers import parse_workers
from meshwright_operator.kube.client import ApiError, KubeClient, Page
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.scheduling.policy import Bounds, Policy, PriorityBounds
from meshwright_operator.timestamps import format_time
from tests.operator.memory import MemoryCluster
from tests.operator.support import JOBS, PODS, job, node
from tests.operator.test_drains import cordon
from tests.operator.test_edit_races import edit
from tests.operator.test_elastic import set_ready
from tests.operator.test_gang_races import command, small
from tests.operator.world import Operator, World
from tests.randomness import seeds

NODES = 5
FOREVER = 1e9
HOLD = "example.com/hold"
NAMES = ("a", "b", "c")
FINAL = ("Complete", "Failed")
OTHER_IMAGE = {"image": "other", "gpusPerWorker": 2}
LIVE = {"suspend", "priority", "preemptible", "recovery", "updatePolicy"}


class Died(BaseException):
    """The operator's process is gone."""


class Line(KubeClient):
    """One operator's connection: requests fail, answers are lost, and the process may die at a write."""

    def __init__(self, cluster: MemoryCluster, chance: random.Random) -> None:
        self._cluster = cluster
        self._chance = chance
        self.rate = 0.0
        self.dies_in: int | None = None
        self.dead = False

    async def _through(self, call: Callable[[], Awaitable[Any]], *, writes: bool) -> Any:
        if self.dead:
            raise Died
        if writes and self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in <= 0:
                self.dead = True
                if self._chance.random() < 0.5:
                    await call()
                raise Died
        if self._chance.random() < self.rate:
            kind = self._chance.choice((0, 409, 429, 500, "lost"))
            if kind == "lost":
                await call()
            if kind == 409 and not writes:
                kind = 500
            code = kind if isinstance(kind, int) else 0
            raise ApiError(code, "Conflict" if code == 409 else "Injected", "injected")
        return await call()

    async def get(self, path: str) -> KubeObject:
        found: KubeObject = await self._through(lambda: self._cluster.get(path), writes=False)
        return found

    async def pages(self, path: str, **query: str) -> AsyncIterator[Page]:
        async def nothing() -> None: ...

        await self._through(nothing, writes=False)
        async for page in self._cluster.pages(path, **query):
            yield page

    async def create(self, path: str, body: KubeObject) -> KubeObject:
        made: KubeObject = await self._through(lambda: self._cluster.create(path, body), writes=True)
        return made

    async def merge_patch(self, path: str, body: KubeObject) -> KubeObject:
        new: KubeObject = await self._through(lambda: self._cluster.merge_patch(path, body), writes=True)
        return new

    async def delete(self, path: str, uid: str, version: str = "") -> KubeObject | None:
        answer: KubeObject | None
        try:
            answer = await self._through(lambda: self._cluster.delete(path, uid, version), writes=True)
        except ApiError as error:
            if error.code not in (404, 409):
                raise
            return None
        return answer


class Cluster(MemoryCluster):
    """Also finalizers, which hold a job that the operator deletes."""

    async def delete(self, path: str, uid: str, version: str = "") -> KubeObject | None:
        obj = self.objects.get(path)
        same = obj is not None and version in ("", obj["metadata"]["resourceVersion"])
        if obj is not None and same and obj["metadata"]["uid"] == uid and obj["metadata"].get("finalizers"):
            if "deletionTimestamp" not in obj["metadata"]:
                obj = copy.deepcopy(obj)
                obj["metadata"]["deletionTimestamp"] = format_time(self._now())
                self.update(path, obj)
            return {}
        return await super().delete(path, uid, version)


class FaultyWorld(World):
    """Operators behind lines that fail."""

    def _check_start(self, agent: Any) -> None:
        owners = {obj["metadata"]["uid"]: obj for obj in self.cluster.of("paralleltrainingjobs")}
        if agent.uid in owners and owners[agent.uid].get("status"):
            super()._check_start(agent)

    def __init__(self, seed: int) -> None:
        self.lines: list[Line] = []
        self.chance = random.Random(seed + 10**6)
        super().__init__(seed, NODES, work=FOREVER, cluster=Cluster)

    def connect(self, metrics: OperatorMetrics) -> KubeClient:
        line = Line(self.cluster, self.chance)
        self.lines = [line]
        return line


def drawn(name: str, chance: random.Random) -> KubeObject:
    """A job of one of many kinds. Each replica is one pod with a whole node."""
    fields: dict[str, Any] = {
        "replicas": chance.choice((1, 1, 2, 3)),
        "parallelism": {"tensor": 2, "pipeline": 1, "microBatches": 1},
        "training": {"steps": 10**6, "globalBatchSize": 60, "sequenceLength": 64},
        "recovery": {"maxRestarts": 100000, "hangTimeoutSeconds": 60, "spareNodes": int(chance.random() < 0.3)},
        "priority": chance.choice((0, 0, 5)),
        "preemptible": chance.random() < 0.3,
        "checkpoint": {"claimName": "shared", "everySteps": 10**6} if chance.random() < 0.4 else None,
        "elastic": _elastic(chance) if chance.random() < 0.4 else None,
        "activeDeadlineSeconds": chance.choice((30, 120)) if chance.random() < 0.1 else None,
        "ttlSecondsAfterFinished": chance.choice((0, 5)) if chance.random() < 0.2 else None,
    }
    if chance.random() < 0.25 and fields["elastic"] is None:
        fields |= {"model": None, "data": None, "training": None, "checkpoint": None}
        fields |= {"parallelism": {"tensor": 2, "pipeline": 1}, "runtime": {"command": ["python", "train.py"]}}
        fields["successPolicy"] = chance.choice(("AllWorkers", "FirstWorker"))
    if fields["elastic"] is not None:
        fields["checkpoint"] = {"claimName": "shared", "everySteps": 10**6}
    body = job(name, **fields)
    body["spec"] = {key: value for key, value in body["spec"].items() if value is not None}
    if chance.random() < 0.3:
        body["metadata"]["finalizers"] = [HOLD]
    return body


def _elastic(chance: random.Random) -> dict[str, Any]:
    given: dict[str, Any] = {"pauseSeconds": 10, "replacementSeconds": chance.choice((0, 30))}
    given |= {"onLoss": chance.choice(("Replace", "Shrink"))}
    return given | ({"fill": True, "maxReplicas": 4} if chance.random() < 0.3 else {})


class History:
    """One history."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.world = FaultyWorld(seed)
        self.log: list[str] = []
        self.harms: Counter[str] = Counter()
        """uid -> failures of its own processes."""
        self.last: dict[str, KubeObject] = {}
        """uid -> status, as it was last."""
        self.writes: dict[str, list[float]] = defaultdict(list)
        self.completed: dict[str, int] = {}
        """uid -> the generation in which all its ranks have completed the run, by what agents could report."""
        self.policy = Policy()
        self.seen = 0

    # What is there.

    @property
    def operator(self) -> Operator:
        return self.world.operators[0]

    def jobs(self) -> dict[str, KubeObject]:
        return {obj["metadata"]["name"]: obj for obj in self.world.cluster.of("paralleltrainingjobs")}

    def say(self, text: str) -> None:
        self.log.append(f"{self.world.seconds():.0f} {text}")

    # What users do.

    def submit(self, name: str) -> None:
        if name not in self.jobs():
            body = drawn(name, self.chance)
            self.say(f"submit {name} {body['spec'] | {'model': 0, 'training': 0}} {body['metadata'].get('finalizers')}")
            self.world.submit(body)

    def change(self, name: str, **spec: Any) -> None:
        obj = self.jobs().get(name)
        if obj is None or obj["metadata"].get("deletionTimestamp"):
            return
        new = copy.deepcopy(obj)
        new["spec"] = {key: value for key, value in (new["spec"] | spec).items() if value is not None}
        if new["spec"] != obj["spec"]:
            self.say(f"edit {name} {spec}")
            if not spec.keys() <= LIVE:
                self.completed.pop(obj["metadata"]["uid"], None)  # the ranks have to start again
            new["metadata"]["generation"] += 1
            self.world.cluster.update(f"{JOBS}/{name}", new)

    def edit(self, name: str) -> None:
        obj = self.jobs().get(name)
        if obj is None:
            return
        spec, chance = obj["spec"], self.chance
        kind = chance.randrange(13)
        if kind <= 1:
            self.change(name, suspend=not spec.get("suspend", False))
        elif kind <= 3:
            self.change(name, replicas=chance.randint(1, 4))
        elif kind == 4:
            self.change(name, workers={**spec["workers"], "image": chance.choice(("one", "two"))})
        elif kind == 5:
            self.change(name, priority=chance.choice((0, 5, 10)))
        elif kind == 6:
            self.change(name, preemptible=not spec.get("preemptible", False))
        elif kind == 7:
            self.change(name, recovery={**spec["recovery"], "spareNodes": chance.choice((0, 1, 2))})
        elif kind == 8:
            self.change(name, updatePolicy=chance.choice(("Now", "OnRestart")))
        elif kind == 9:
            self.change(
                name,
                suspend=chance.random() < 0.5,
                replicas=chance.randint(1, 4),
                workers={**spec["workers"], "image": chance.choice(("one", "two", "three"))},
            )
        elif kind <= 11 and "checkpoint" in spec and "command" not in spec.get("runtime", {}):
            self.change(name, elastic=None if "elastic" in spec else _elastic(chance), replicas=chance.randint(1, 4))
        else:
            self.ask_for_a_checkpoint(name)

    def ask_for_a_checkpoint(self, name: str) -> None:
        obj = copy.deepcopy(self.jobs()[name])
        obj["metadata"].setdefault("annotations", {})[ANNOTATION_CHECKPOINT] = f"r{self.chance.randrange(10**6)}"
        self.say(f"checkpoint {name}")
        self.world.cluster.update(f"{JOBS}/{name}", obj)

    def delete(self, name: str) -> None:
        obj = self.jobs().get(name)
        if obj is None:
            return
        self.say(f"delete {name}")
        if obj["metadata"].get("finalizers"):
            if "deletionTimestamp" not in obj["metadata"]:
                new = copy.deepcopy(obj)
                new["metadata"]["deletionTimestamp"] = format_time(self.world.now)
                self.world.cluster.update(f"{JOBS}/{name}", new)
        else:
            self.world.cluster.remove(f"{JOBS}/{name}")

    def release(self, name: str) -> None:
        obj = self.jobs().get(name)
        if obj is None or not obj["metadata"].get("finalizers"):
            return
        self.say(f"release {name}")
        new = copy.deepcopy(obj)
        new["metadata"].pop("finalizers")
        if "deletionTimestamp" in new["metadata"]:
            self.world.cluster.remove(f"{JOBS}/{name}")
        else:
            self.world.cluster.update(f"{JOBS}/{name}", new)

    def create_again(self, name: str) -> None:
        self.delete(name)
        self.release(name)
        self.submit(name)

    async def finish(self, name: str) -> None:
        """Its ranks complete the run now."""
        obj = self.jobs().get(name)
        agents = self.agents(name)
        if obj is None or any(agent.state is not AgentState.RUNNING or agent.hung for agent in agents):
            return
        self.say(f"finish {name}")
        apart = "command" in obj["spec"].get("runtime", {})
        for agent in agents:
            if not apart or self.chance.random() < 0.8:
                agent.state = AgentState.COMPLETE
        whole = bool(agents) and self.may_complete(obj, agents)
        if self.chance.random() < 0.3:
            self.world.keeps_running |= {agent.pod.name for agent in self.agents(name)}
        if whole:
            await self.tick()  # their agents report it
            self.completed[obj["metadata"]["uid"]] = agents[0].generation

    def may_complete(self, obj: KubeObject, agents: list[Any]) -> bool:
        """Whether the job must succeed now: its generation runs, and nothing has happened to it."""
        mesh = (obj.get("status") or {}).get("mesh") or {}
        pods = [pod for pod in self.world.pods(obj["metadata"]["name"]) if pod.owner == obj["metadata"]["uid"]]
        whole = len(agents) == sum(not pod.terminal for pod in pods) and all(
            agent.generation == mesh.get("generation") and agent.state is AgentState.COMPLETE and not agent.silent
            for agent in agents
        )
        quiet = all(
            not operator.behind and not line.rate and line.dies_in is None
            for operator, line in zip(self.world.operators, self.world.lines, strict=True)
        )
        return (
            whole
            and quiet
            and not mesh.get("pendingCause")
            and not any(pod.deleting for pod in pods)
            and not (obj["spec"].get("suspend") or obj["metadata"].get("deletionTimestamp"))
        )

    # What nodes and processes do.

    def agents(self, name: str) -> list[Any]:
        return [agent for agent in self.world.agents.values() if agent.pod.job == name]

    async def harm(self, name: str) -> None:
        agents = self.agents(name)
        if not agents:
            return
        agent = self.chance.choice(agents)
        kind = self.chance.choice(("crash", "evict", "fail", "hang", "stuck", "silent"))
        self.say(f"{kind} {agent.pod.name}")
        if kind == "crash":
            self.world.crash(agent.pod.name)
        elif kind in ("evict", "stuck"):
            if kind == "stuck":
                self.world.stuck.add(agent.pod.name)
            await self.world.evict(agent.pod.name)
        elif kind == "fail" and agent.state is AgentState.RUNNING:
            agent.state, agent.failure = AgentState.FAILED, FailureKind.ERROR
            self.harms[agent.uid] += 1
        elif kind == "hang" and agent.state is AgentState.RUNNING:
            agent.hung = True
            self.harms[agent.uid] += 1
        elif kind == "silent":
            agent.silent = True
            self.harms[agent.uid] += 1

    def put_node(self, obj: KubeObject) -> None:
        self.world.cluster.stamp(obj)
        self.world.nodes[obj["metadata"]["name"]] = obj
        for operator in self.world.operators:
            changed = operator.cache.put_node(copy.deepcopy(obj))
            name = obj["metadata"]["name"]
            if changed:
                for key in operator.cache.jobs_on(name):
                    operator.queue.add(key)
                operator.nodes_changed()

    def node(self) -> None:
        name = f"n{self.chance.randrange(NODES)}"
        obj = copy.deepcopy(self.world.nodes[name])
        if self.chance.random() < 0.6:
            obj["spec"] = {"unschedulable": not obj.get("spec", {}).get("unschedulable", False)}
            self.say(f"cordon {name} {obj['spec']}")
            self.put_node(obj)
            return
        ready = obj["status"]["conditions"][0]["status"] != "True"
        obj["status"]["conditions"][0]["status"] = str(ready)
        self.say(f"ready {name} {ready}")
        self.put_node(obj)
        if not ready:
            for pod in self.world.pods():
                if pod.bound and pod.node == name:
                    self.world.crash(pod.name)

    def set_policy(self) -> None:
        bounds = self.chance.choice(
            (
                Bounds(),
                Bounds(priority=PriorityBounds(max=3)),
                Bounds(max_gpus_in_use=6),
                Bounds(max_replicas=2),
                Bounds(max_spare_nodes=0),
            )
        )
        self.say(f"policy {bounds.model_dump(exclude_defaults=True)}")
        self.policy = Policy(defaults=bounds)
        for operator in self.world.operators:
            operator.scheduler.set_policy(self.policy)

    def restart(self) -> None:
        self.say("operator restarts")
        cluster, missed = self.world.cluster, any(operator.missed for operator in self.world.operators)
        for operator in self.world.operators:
            operator.blind = True
        cluster.watchers.clear()
        rate = self.world.lines[0].rate
        self.world.operators = [Operator(self.world)]
        self.world.lines[0].rate = rate
        self.operator.missed = missed
        self.operator.scheduler.set_policy(self.policy)

    def kill_at_a_write(self) -> None:
        number = self.chance.randint(1, 6)
        self.say(f"dies at write {number}")
        self.world.lines[0].dies_in = number

    def faults(self) -> None:
        self.world.lines[0].rate = self.chance.choice((0.0, 0.1, 0.3))
        self.say(f"fault rate {self.world.lines[0].rate}")

    def skew(self) -> None:
        seconds = self.chance.choice((-40, 0, 40, 3600))
        self.say(f"clock {seconds}")
        self.operator.clock_error = timedelta(seconds=seconds)

    async def act(self) -> None:
        name, number = self.chance.choice(NAMES), self.chance.random()
        acts: list[tuple[float, Callable[[], Any]]] = [
            (0.10, lambda: self.submit(name)),
            (0.30, lambda: self.edit(name)),
            (0.04, lambda: self.delete(name)),
            (0.04, lambda: self.release(name)),
            (0.05, lambda: self.create_again(name)),
            (0.06, lambda: self.finish(name)),
            (0.15, lambda: self.harm(name)),
            (0.10, self.node),
            (0.03, self.set_policy),
            (0.03, self.restart),
            (0.04, self.kill_at_a_write),
            (0.04, self.faults),
            (0.02, self.skew),
        ]
        for weight, act in acts:
            number -= weight
            if number < 0:
                result = act()
                if result is not None:
                    await result
                return

    # Time.

    async def tick(self) -> None:
        before = len(self.world.cluster.requests)
        try:
            await self.world.tick()
        except Died:
            self.restart()
        self.collect()
        for verb, path in self.world.cluster.requests[before:]:
            if verb == "patch" and path.endswith("/status"):
                self.writes[path].append(self.world.seconds())
        self.check()

    def collect(self) -> None:
        """The garbage collector."""
        owners = {obj["metadata"]["uid"] for obj in self.jobs().values()}
        for pod in self.world.pods():
            if pod.owner in owners or pod.deleting:
                continue
            path = f"{PODS}/{pod.name}"
            if not pod.bound or pod.terminal:
                self.world.cluster.remove(path)
            else:
                obj = self.world.cluster.objects[path]
                obj["metadata"]["deletionTimestamp"] = format_time(self.world.now)
                self.world.cluster.update(path, obj)

    async def run(self, seconds: int) -> None:
        for _ in range(seconds):
            await self.tick()

    # What must hold at any time.

    def check(self) -> None:
        now = self.world.seconds()
        for name, obj in self.jobs().items():
            status, uid = obj.get("status") or {}, obj["metadata"]["uid"]
            old = self.last.get(uid, {})
            self.last[uid] = copy.deepcopy(status)
            conditions = {c["type"]: c for c in status.get("conditions", ())}
            assert len(conditions) == len(status.get("conditions", ())), "a condition twice"
            observed = status.get("observedGeneration", 0)
            assert old.get("observedGeneration", 0) <= observed <= obj["metadata"]["generation"]
            true = {kind for kind, c in conditions.items() if c["status"] == "True"}
            assert not {"Ready", "Reconciling"} <= true, conditions
            assert not {"Ready", "Stalled"} <= true, conditions
            assert not {"Complete", "Failed"} <= true, conditions
            was = {c["type"] for c in old.get("conditions", ()) if c["status"] == "True"}
            assert not was & set(FINAL) - true, f"{name} came back from the end"
            before, after = (s.get("mesh", {}).get("generation", 0) for s in (old, status))
            assert before <= after, f"{name} went back from generation {before} to {after}"
            if was & set(FINAL):
                assert before == after, f"{name} formed a generation after its end"
            if (generation := self.completed.get(uid)) is not None:
                assert after == generation, f"{name} trains again, although all its ranks have completed"
                assert "Failed" not in true, f"{name} failed, although all its ranks have completed"
            limited = status.get("restartsTowardLimit", 0)
            assert limited <= self.harms[uid], f"{name} is charged {limited} restarts for {self.harms[uid]} failures"
            counts = {c["cause"]: c["count"] for c in status.get("restarts", ())}
            assert status.get("restartCount", 0) >= sum(counts.values())
            times = self.writes[f"{JOBS}/{name}/status"]
            recent = [t for t in times if now - t <= 30]
            assert len(recent) <= 90, f"{len(recent)} status writes of {name} in 30 s"

    # The end.

    async def heal(self) -> None:
        self.say("heal")
        world = self.world
        self.world.lines[0].rate = 0.0
        self.world.lines[0].dies_in = None
        self.operator.clock_error = timedelta(0)
        world.stuck.clear()
        world.keeps_running.clear()
        self.policy = Policy()
        self.operator.scheduler.set_policy(self.policy)
        for agent in world.agents.values():
            agent.silent = False
        for name in list(world.nodes):
            obj = copy.deepcopy(world.nodes[name])
            obj["status"]["conditions"][0]["status"] = "True"
            obj["spec"] = {}
            self.put_node(obj)
        for name in NAMES:
            self.release(name)

    def ended(self, status: KubeObject) -> bool:
        return any(c["type"] in FINAL and c["status"] == "True" for c in status.get("conditions", ()))

    def settled(self) -> str:
        """What is not as it should be; empty if all is."""
        owners = {obj["metadata"]["uid"] for obj in self.jobs().values()}
        orphans = [f"{pod.name} is an orphan" for pod in self.world.pods() if pod.owner not in owners]
        wrong = (self.wrong(name, obj) for name, obj in self.jobs().items())
        return next((text for text in (*orphans, *wrong) if text), "")

    def wrong(self, name: str, obj: KubeObject) -> str:
        """What is not as it should be with one job."""
        status = obj.get("status") or {}
        conditions = {c["type"]: c for c in status.get("conditions", ())}
        ready, live = conditions.get("Ready", {}), [pod for pod in self.world.pods(name) if not pod.terminal]
        if status.get("observedGeneration") != obj["metadata"]["generation"]:
            return f"{name} is not observed"
        if self.ended(status):
            return f"{name} has ended, and has pods {live}" if live else ""
        if obj["spec"].get("suspend"):
            return (
                "" if ready.get("reason") == "Suspended" and not live else f"{name} is not suspended: {ready}, {live}"
            )
        if ready.get("status") == "True":
            done = sum(pod.phase == "Succeeded" for pod in self.world.pods(name))
            ranks, _, world = str(status.get("readyRanks")).partition("/")
            done += len(parse_workers((status.get("mesh") or {}).get("succeededWorkers", "")))
            if ranks != world or not 0 <= int(world) // 2 - len(live) <= done:
                return f"{name} has {status.get('readyRanks')} ranks and {len(live)} pods"
            return f"{name} rescales" if conditions.get("Rescaling", {}).get("status") == "True" else ""
        if ready.get("reason") in ("Placing", "Preempted"):
            return f"{name} waits with pods" if live else ""
        return "" if ready.get("reason") in ("EditDoesNotFit", "EditWaits") else f"{name}: {ready}"

    async def end(self) -> None:
        await self.heal()
        for _ in range(1500):
            await self.tick()
            if not self.settled():
                break
        await self.run(150)
        assert not self.settled(), self.settled()
        self.check_all_run()
        await self.quiet()

    def check_all_run(self) -> None:
        """Nobody waits for nodes that are free."""
        free = NODES - sum(not pod.terminal for pod in self.world.pods())
        for name, obj in self.jobs().items():
            status = obj.get("status") or {}
            if (
                self.ended(status)
                or obj["spec"].get("suspend")
                or any(p.job == name for p in self.world.pods() if not p.terminal)
            ):
                continue
            spec = obj["spec"]
            least = spec["elastic"].get("minReplicas", 1) if "elastic" in spec else spec["replicas"]
            spares = sum(
                len((o.get("status") or {}).get("placement", {}).get("spares", ())) for o in self.jobs().values()
            )
            assert least > free - spares, f"{name} waits for {least} of {free} nodes"

    async def quiet(self) -> None:
        notes, begun = len(self.operator.notes.notes), len(self.world.cluster.requests)
        await self.run(120)
        posted = self.operator.notes.notes[notes:]
        assert not posted, f"events in a quiet cluster: {posted[:3]}"
        writes = Counter(
            call for call in self.world.cluster.requests[begun:] if call[0] in ("create", "patch", "delete")
        )
        for (verb, path), count in writes.items():
            assert (verb, path.endswith("/status")) == ("patch", True), f"{count} times {verb} {path}"
            assert count <= 13, f"{count} times {verb} {path}"


async def play(seed: int, length: int = 12) -> History:
    history = History(seed)
    try:
        for name in NAMES[: history.chance.randint(1, 3)]:
            history.submit(name)
            await history.run(history.chance.choice((0, 1, 10)))
        await history.run(history.chance.choice((0, 15)))
        for _ in range(length):
            await history.act()
            await history.run(history.chance.choice((0, 0, 1, 1, 2, 5, 20)))
        await history.end()
    except BaseException:
        print("\n".join([f"seed {seed}", *history.log]))
        for name, obj in history.jobs().items():
            print(name, obj["metadata"], obj.get("status"))
        print([(p.name, p.owner, p.phase, p.deleting, p.node, p.gates) for p in history.world.pods()])
        raise
    return history


@pytest.mark.chaos
@pytest.mark.parametrize("seed", seeds(3))
async def test_whatever_meets_whatever_jobs_settle(seed: int) -> None:
    await play(seed)


# What such histories have found, and what meets it.


async def kept_running(make: Callable[..., KubeObject], nodes: int = 3, **fields: Any) -> World:
    """A job of two workers whose ranks have completed the run, and whose pods do not exit yet."""
    world = World(1, nodes, work=20.0)
    world.submit(make("job", 2, **fields))
    await world.run(8)
    world.keeps_running |= {pod.name for pod in world.pods("job")}
    await world.run(25)
    assert {agent.state for agent in world.agents.values()} == {AgentState.COMPLETE}
    assert not world.true("job", "Complete")
    return world


@pytest.mark.parametrize("make", [small, command])
async def test_a_job_that_is_suspended_while_its_pods_exit_has_succeeded(make: Callable[..., KubeObject]) -> None:
    world = await kept_running(make)
    edit(world, "job", {"suspend": True})
    await world.run(10)
    world.keeps_running.clear()
    await world.run(10)
    assert world.true("job", "Complete")
    assert not world.true("job", "Suspended")
    assert world.status("job")["mesh"]["generation"] == 1


async def test_a_job_that_is_suspended_while_its_pods_do_not_exit_has_succeeded() -> None:
    world = await kept_running(command)
    edit(world, "job", {"suspend": True})
    await world.run(150)
    assert world.true("job", "Complete")
    assert not [pod for pod in world.pods("job") if not pod.deleting]


@pytest.mark.parametrize(("nodes", "fields"), [(3, {}), (2, {"elastic": {"pauseSeconds": 10}})])
async def test_nobody_leaves_a_draining_node_who_only_has_to_exit(nodes: int, fields: dict[str, Any]) -> None:
    world = await kept_running(small, nodes, checkpoint={"claimName": "shared"}, **fields)
    await world.run(15)
    cordon(world, world.pods("job")[1].node, cordoned=True)
    await world.run(15)
    assert not any(pod.deleting for pod in world.pods("job"))
    world.keeps_running.clear()
    await world.run(5)
    assert world.true("job", "Complete")
    assert world.status("job")["mesh"]["generation"] == 1


async def test_a_deadline_that_passes_while_pods_exit_takes_no_success() -> None:
    world = await kept_running(small, activeDeadlineSeconds=40)
    await world.run(20)
    assert not world.true("job", "Failed")
    world.keeps_running.clear()
    await world.run(5)
    assert world.true("job", "Complete")


async def test_a_deadline_that_passes_while_the_operator_is_away_takes_no_success() -> None:
    world = World(1, nodes=3, work=20.0)
    world.submit(small("job", 2, activeDeadlineSeconds=40))
    await world.run(8)
    world.cluster.watchers.clear()
    world.operators.clear()
    await world.run(60)
    assert {pod.phase for pod in world.pods("job")} == {"Succeeded"}
    world.operators.append(world.operator())
    await world.run(5)
    assert world.true("job", "Complete")


@pytest.mark.parametrize("make", [small, command])
@pytest.mark.parametrize("limit", [0, 3])
async def test_a_worker_that_completes_the_run_after_another_one_was_evicted_has_not_failed(
    make: Callable[..., KubeObject], limit: int
) -> None:
    world = World(1, nodes=3, work=FOREVER)
    world.submit(make("job", 2, recovery={"maxRestarts": limit}))
    await world.run(10)
    first, second = sorted(world.agents.values(), key=lambda agent: agent.pod.name)
    await world.evict(second.pod.name)
    second.silent = True
    await world.run(1)
    first.state = AgentState.COMPLETE
    await world.run(20)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    status = world.status("job")
    assert status["restarts"] == [{"cause": "PodLost", "count": 1}]
    assert not status["restartsTowardLimit"]


@pytest.mark.parametrize("more", [{"replicas": 4}, {"priority": 9}, {"replicas": 4, "workers": OTHER_IMAGE}])
async def test_the_policy_also_bounds_an_edit_that_comes_with_a_short_suspension(more: dict[str, Any]) -> None:
    world = World(1, nodes=5, work=FOREVER)
    bounds = Bounds(max_gpus_per_job=4, priority=PriorityBounds(max=3))
    world.operators[0].scheduler.set_policy(Policy(defaults=bounds))
    world.submit(small("job", 2))
    await world.run(10)
    edit(world, "job", {"suspend": True, **more})
    await world.run(1)
    assert world.condition("job", "Ready")["reason"] == "PolicyExceeded"
    assert all(pod.deleting for pod in world.pods("job")), "it is suspended all the same"
    edit(world, "job", {"suspend": False})
    await world.run(40)
    assert world.condition("job", "Ready")["reason"] == "PolicyExceeded"
    assert len(world.pods("job")) == 2
    applied = json.loads(world.status("job")["appliedSpec"])["spec"]
    assert (applied["replicas"], applied.get("priority", 0)) == (2, 0)


async def test_the_policy_bounds_a_job_that_is_edited_while_it_is_suspended() -> None:
    world = World(1, nodes=5, work=FOREVER)
    world.operators[0].scheduler.set_policy(Policy(defaults=Bounds(max_gpus_per_job=4)))
    world.submit(small("job", 2))
    await world.run(10)
    edit(world, "job", {"suspend": True})
    await world.run(10)
    edit(world, "job", {"replicas": 4})
    await world.run(10)
    assert world.condition("job", "Ready")["reason"] == "Suspended"
    edit(world, "job", {"suspend": False})
    await world.run(20)
    assert world.condition("job", "Ready")["reason"] == "PolicyExceeded"
    assert not world.pods("job")


ELASTIC: dict[str, Any] = {"elastic": {"minReplicas": 1, "pauseSeconds": 10}}
CHECKPOINT: dict[str, Any] = {"checkpoint": {"claimName": "shared"}}


async def edited(before: dict[str, Any], after: dict[str, Any], bounds: Bounds = Bounds()) -> World:  # noqa: B008
    """A job of two workers on four nodes, half a minute after an edit."""
    world = World(1, nodes=4, work=FOREVER)
    world.operators[0].scheduler.set_policy(Policy(defaults=bounds))
    world.submit(small("job", 2, **CHECKPOINT, **before))
    await world.run(15)
    names = {pod.name for pod in world.pods("job")}
    edit(world, "job", after)
    await world.run(30)
    assert {pod.name for pod in world.pods("job")} == names, "its workers go on"
    assert world.status("job")["readyRanks"] == "4/4"
    return world


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(("before", "after"), [({}, ELASTIC), (ELASTIC, {"elastic": None})])
async def test_an_edit_that_adds_or_removes_elastic_waits_with_the_update_policy(
    before: dict[str, Any], after: dict[str, Any], replicas: int
) -> None:
    world = await edited({"updatePolicy": "OnRestart", **before}, {**after, "replicas": replicas})
    assert world.condition("job", "Ready")["reason"] == "EditWaits"
    world.crash(world.pods("job")[0].name)
    await world.run(40)
    assert world.true("job", "Ready")
    assert len([pod for pod in world.pods("job") if not pod.terminal]) == replicas


@pytest.mark.parametrize(
    ("before", "after"),
    [({}, {"elastic": {"minReplicas": 6}, "replicas": 6}), (ELASTIC, {"elastic": None, "replicas": 6})],
)
async def test_an_edit_that_adds_or_removes_elastic_and_does_not_fit_costs_no_run(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    world = await edited(before, after)
    assert world.condition("job", "Ready")["reason"] == "EditDoesNotFit"


@pytest.mark.parametrize("before", [{}, ELASTIC])
async def test_the_policy_bounds_an_edit_that_adds_or_removes_elastic(before: dict[str, Any]) -> None:
    after = {"elastic": None} if before else ELASTIC
    world = await edited(before, {**after, "replicas": 4}, Bounds(max_gpus_per_job=4))
    assert world.condition("job", "Ready")["reason"] == "PolicyExceeded"


@pytest.mark.parametrize("size", [{"replicas": 4}, {"elastic": {**ELASTIC["elastic"], "fill": True, "maxReplicas": 4}}])
async def test_the_policy_bounds_the_size_in_an_edit_that_also_restarts_the_gang(size: dict[str, Any]) -> None:
    """The restart is blocked, and `replicas` of an elastic job takes effect without one."""
    world = await edited(ELASTIC, {**size, "workers": OTHER_IMAGE}, Bounds(max_gpus_per_job=4))
    assert world.condition("job", "Ready")["reason"] == "PolicyExceeded"


@pytest.mark.parametrize("late", [{"ttlSecondsAfterFinished": None}, {"ttlSecondsAfterFinished": 3600}])
async def test_a_finished_job_that_is_edited_to_stay_is_kept_although_the_watch_is_late(late: dict[str, Any]) -> None:
    world = World(1, nodes=3, work=5.0)
    world.submit(small("job", 2, ttlSecondsAfterFinished=30))
    await world.run(30)
    assert world.true("job", "Complete")
    world.operators[0].lag = timedelta(seconds=60)
    edit(world, "job", late)
    await world.run(100)
    assert f"{JOBS}/job" in world.cluster.objects


async def test_a_finished_job_is_deleted_in_time_although_its_status_has_just_changed() -> None:
    world = World(1, nodes=3, work=5.0)
    world.submit(small("job", 2, ttlSecondsAfterFinished=0))
    await world.run(30)
    assert f"{JOBS}/job" not in world.cluster.objects


@pytest.mark.parametrize("size", [{"replicas": 4}, {"elastic": {**ELASTIC["elastic"], "fill": True, "maxReplicas": 4}}])
async def test_the_policy_bounds_an_edit_of_the_size_of_a_job_that_has_lost_a_node(size: dict[str, Any]) -> None:
    """It grows again to the size that it had, and not beyond."""
    world = World(1, nodes=2, work=FOREVER)
    world.operators[0].scheduler.set_policy(Policy(defaults=Bounds(max_gpus_per_job=4)))
    elastic = {"elastic": {**ELASTIC["elastic"], "replacementSeconds": 0}}
    world.submit(small("job", 2, **CHECKPOINT, **elastic))
    await world.run(20)
    set_ready(world, world.pods("job")[1].node, ready=False)
    await world.run(40)
    assert world.status("job")["replicas"] == 1
    edit(world, "job", size)
    await world.run(20)
    for name in ("n2", "n3", "n4"):
        body = node(name, "r0", 2)
        body["metadata"]["uid"] = f"uid-of-{name}"
        world.cluster.stamp(body)
        world.nodes[name] = body
        world.operators[0].cache.put_node(body)
    await world.run(120)
    assert world.status("job")["replicas"] == 2
    assert world.condition("job", "Ready")["reason"] == "PolicyExceeded"


@pytest.mark.parametrize(("first", "size"), [(2, 4), (4, 2)])
@pytest.mark.parametrize("bad", [{"workers": "none"}, {"elastic": None, "replicas": 40}])
async def test_an_elastic_job_that_was_resized_keeps_its_size_while_an_edit_is_blocked(
    first: int, size: int, bad: dict[str, Any]
) -> None:
    """The spec in effect has the size that takes effect at once, and not that of the first start."""
    world = World(1, nodes=5, work=FOREVER)
    world.submit(small("job", first, **CHECKPOINT, **ELASTIC))
    await world.run(20)
    edit(world, "job", {"replicas": size})
    await world.run(60)
    assert world.status("job")["replicas"] == size
    generation = world.status("job")["mesh"]["generation"]
    edit(world, "job", bad)
    await world.run(60)
    assert world.condition("job", "Ready")["reason"] == "InvalidSpec"
    assert (world.status("job")["replicas"], world.status("job")["mesh"]["generation"]) == (size, generation)
