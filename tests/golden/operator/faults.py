"""Faults, edits and other events of a virtual cluster, one method each. A seed chooses them and their targets."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from meshwright.api.objects import KubeObject
from meshwright.protocol.messages import AgentState, FailureKind
from meshwright_operator.kube.client import ApiError
from meshwright_operator.scheduling.calibration import CalibrationLoop
from tests.golden.operator.agents import Worker
from tests.golden.operator.jobs import Jobs
from tests.golden.operator.machine import Machine, make_nodes, stamp
from tests.operator.support import JOBS, PODS

QUOTA = 'pods "x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=2'
WEBHOOK = 'admission webhook "policy.example" denied the request: no'
EXIT_CODES = (1, 2, 64, 75, 137, 139, 143)
GPU = "nvidia.com/gpu"


class Faults:
    """Events of one machine. A method returns what it affected."""

    def __init__(self, machine: Machine, jobs: Jobs, chance: Random) -> None:
        self.machine = machine
        self.jobs = jobs
        self.chance = chance
        self.learning: CalibrationLoop | None = None

    async def act(self, name: str) -> None:
        """Calls the method of this name and records it."""
        done = getattr(self, name)()
        what = await done if isinstance(done, Awaitable) else done
        self.machine.record.add("act", act=name, to=what)

    # Pods and ranks.

    def crash_pod(self) -> str | None:
        """Removes a pod object at once."""
        if (agent := self._agent()) is None:
            return None
        self.machine.crash(agent.pod.name)
        return agent.pod.name

    def end_container(self) -> str | None:
        """Ends a worker's container with an exit code."""
        if (agent := self._agent()) is None:
            return None
        code = self.chance.choice(EXIT_CODES)
        ended = {"terminated": {"exitCode": code, "finishedAt": stamp(self.machine)}}
        self._fail_pod(agent.pod.name, {"containerStatuses": [{"name": "worker", "state": ended}]})
        return f"{agent.pod.name} {code}"

    def kubelet_evicts(self) -> str | None:
        """Fails a pod as the kubelet does under node pressure or at shutdown."""
        if (agent := self._agent()) is None:
            return None
        reason = self.chance.choice(("Evicted", "NodeShutdown", "Preempting", "UnexpectedAdmissionError"))
        self._fail_pod(agent.pod.name, {"reason": reason, "message": "the node needs it"})
        return f"{agent.pod.name} {reason}"

    async def evict(self) -> str | None:
        """Deletes a pod with its grace period."""
        if (agent := self._agent()) is None:
            return None
        await self.machine.evict(agent.pod.name)
        return agent.pod.name

    async def disrupt(self) -> str | None:
        """Marks a pod as the target of a disruption and deletes it."""
        if (agent := self._agent()) is None:
            return None
        reasons = ("PreemptionByScheduler", "EvictionByEvictionAPI", "DeletionByTaintManager", "TerminationByKubelet")
        reason = self.chance.choice(reasons)
        obj = self.machine.cluster.objects[f"{PODS}/{agent.pod.name}"]
        obj["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True", "reason": reason}]
        self.machine.cluster.update(f"{PODS}/{agent.pod.name}", obj)
        await self.machine.evict(agent.pod.name)
        return f"{agent.pod.name} {reason}"

    def fail_rank(self) -> str | None:
        """Fails a rank with an error."""
        return self._fail_rank(FailureKind.ERROR, self.chance.choice((*EXIT_CODES, -9, -15, None)))

    def refuse_run(self) -> str | None:
        """Fails a rank that cannot execute the run."""
        return self._fail_rank(FailureKind.REJECTED, 78)

    def lose_peer(self) -> str | None:
        """Breaks a connection between ranks whose pods all live."""
        return self._fail_rank(FailureKind.PEER_LOST, None)

    def hang(self) -> str | None:
        """Stops the progress of all ranks of a job."""
        if (agent := self._agent()) is None:
            return None
        for other in self._workers():
            if other.uid == agent.uid:
                other.hung = True
        agent.letter = self.chance.choice(("", "T", "D"))
        agent.trained -= self.chance.choice((0, 1))
        return agent.pod.job

    def pause_ranks(self) -> str | None:
        """Pauses the ranks of a worker although no pod is deleted."""
        if (agent := self._agent()) is None:
            return None
        agent.state = AgentState.IDLE
        return agent.pod.name

    def silence(self) -> str | None:
        """Cuts an agent off from the coordinator while its peers wait for it."""
        if (agent := self._agent()) is None:
            return None
        agent.silent = True
        for other in self._workers():
            if other.uid == agent.uid:
                other.hung = True
        return agent.pod.name

    def speak(self) -> None:
        """Reconnects every agent."""
        for agent in self._workers():
            agent.silent = False

    # Nodes.

    async def node_down(self) -> str | None:
        """Makes a node NotReady and cuts off everything on it."""
        return await self._node(lambda body: body["status"]["conditions"][0].update(status="Unknown"), down=True)

    async def node_up(self) -> str | None:
        """Makes a node Ready again."""
        return await self._node(lambda body: body["status"]["conditions"][0].update(status="True"), down=False)

    async def node_gone(self) -> str | None:
        """Deletes a node and the pods on it."""
        if len(self.machine.nodes) < 2:
            return None
        name = self.chance.choice(sorted(self.machine.nodes))
        await self.machine.put_node(self.machine.nodes[name], "DELETED")
        return name

    async def node_added(self) -> str:
        """Adds a node."""
        model = self.machine.nodes[sorted(self.machine.nodes)[0]]
        body = make_nodes(1, int(model["status"]["allocatable"][GPU]))[0]
        name = f"new{self.machine.processes}-{len(self.machine.record.entries)}"
        labels = model["metadata"]["labels"] | {"kubernetes.io/hostname": name}
        await self.machine.put_node({**body, "metadata": {"name": name, "labels": labels}}, "ADDED")
        return name

    async def cordon(self) -> str | None:
        """Cordons a node."""
        return await self._node(lambda body: body.update(spec={"unschedulable": True}))

    async def cordon_all(self) -> None:
        """Cordons every node."""
        for name in sorted(self.machine.nodes):
            await self.machine.put_node({**copy.deepcopy(self.machine.nodes[name]), "spec": {"unschedulable": True}})

    async def taint(self) -> str | None:
        """Taints a node: for repair, or for one of its own conditions."""
        key = self.chance.choice(("example.com/repair", "node.kubernetes.io/memory-pressure"))
        taint = {"key": key, "effect": self.chance.choice(("NoSchedule", "NoExecute"))}
        return await self._node(lambda body: body.update(spec={"taints": [taint]}))

    async def uncordon_all(self) -> None:
        """Uncordons every node and removes its taints."""
        for name in sorted(self.machine.nodes):
            body = copy.deepcopy(self.machine.nodes[name])
            body["spec"] = {}
            await self.machine.put_node(body)

    def refuse_node(self) -> str | None:
        """Makes the scheduler refuse every pod that is pinned to a node."""
        name = self.chance.choice(sorted(self.machine.nodes))
        self.machine.unschedulable = {name}
        return name

    def hold_node(self) -> str | None:
        """Puts a pod that is no worker on a node's GPUs."""
        name = self.chance.choice(sorted(self.machine.nodes))
        total = int(self.machine.nodes[name]["status"]["allocatable"][GPU])
        self._put_foreign(f"other-{name}", name, self.chance.randint(1, total))
        return name

    def free_nodes(self) -> None:
        """Removes the pods that are no workers."""
        for path in [path for path in self.machine.cluster.objects if path.startswith(f"{PODS}/other-")]:
            self.machine.cluster.remove(path)
        for operator in self.machine.operators:
            operator.nodes_changed()

    # Users.

    def submit(self) -> str:
        """Creates a job."""
        body = self.jobs.draw()
        if self.machine.job(body["metadata"]["name"]) is None:
            self.machine.submit(body)
        return str(body["metadata"]["name"])

    def delete_job(self) -> str | None:
        """Deletes a job."""
        if (name := self._job()) is not None:
            self.machine.cluster.remove(f"{JOBS}/{name}")
        return name

    def create_again(self) -> str | None:
        """Deletes a job and creates another with its name at once."""
        if (name := self.delete_job()) is not None:
            body = self.jobs.draw()
            body["metadata"]["name"] = name
            self.machine.submit(body)
        return name

    def suspend(self) -> str | None:
        """Suspends a job."""
        return self._edit(lambda spec: spec.update(suspend=True))

    def resume(self) -> str | None:
        """Resumes every suspended job."""
        for name in self.machine.jobs():
            self.machine.edit(name, lambda spec: spec.update(suspend=False))
        return None

    def edit_pods(self) -> str | None:
        """Edits a field that replaces the pods."""
        image = self.chance.choice(("one", "two", "three"))
        return self._edit(lambda spec: spec["workers"].update(image=image))

    def edit_replicas(self) -> str | None:
        """Changes the number of replicas."""
        replicas = self.chance.choice((1, 2, 3, 4))
        return self._edit(lambda spec: spec.update(replicas=replicas))

    def edit_ranks(self) -> str | None:
        """Edits a field of the run configuration."""
        every = self.chance.choice((5, 10, 20))

        def change(spec: KubeObject) -> None:
            if "checkpoint" in spec and "runtime" not in spec:
                spec["checkpoint"]["everySteps"] = every
            elif "training" in spec:
                spec["training"]["steps"] += every

        return self._edit(change)

    def edit_live(self) -> str | None:
        """Edits a field that takes effect at once."""
        recovery = {"maxRestarts": self.chance.choice((0, 1, 3, 100)), "hangTimeoutSeconds": 60}
        changes: list[KubeObject] = [
            {"recovery": recovery},
            {"priority": self.chance.choice((-1, 0, 5, 9))},
            {"activeDeadlineSeconds": self.chance.choice((60, 300, 3000))},
            {"ttlSecondsAfterFinished": self.chance.choice((0, 30, 300))},
        ]
        chosen = self.chance.choice(changes)
        return self._edit(lambda spec: spec.update(chosen))

    def edit_forbidden(self) -> str | None:
        """Edits an immutable field."""

        def change(spec: KubeObject) -> None:
            if "training" in spec:
                spec["training"]["seed"] = spec["training"].get("seed", 0) + 1
            else:
                spec["managedBy"] = "example.com/other"

        return self._edit(change)

    def edit_invalid(self) -> str | None:
        """Makes a spec invalid."""
        chosen = self.chance.choice(("field", "type", "rule", "model"))

        def change(spec: KubeObject) -> None:
            if chosen == "field":
                spec["workers"]["gpus"] = 2
            elif chosen == "type":
                spec["replicas"] = "many"
            elif chosen == "rule" and "training" in spec:
                spec["training"]["globalBatchSize"] = 7
            else:
                spec["model"] = {"preset": "no-such-model"}

        return self._edit(change)

    def edit_back(self) -> str | None:
        """Restores a job's first spec."""
        if (name := self._job()) is None or name not in self.jobs.drawn:
            return None
        first = copy.deepcopy(self.jobs.drawn[name]["spec"])

        def change(spec: KubeObject) -> None:
            spec.clear()
            spec.update(first)

        self.machine.edit(name, change)
        return name

    def hand_over(self) -> str | None:
        """Hands a job to another controller."""
        return self._edit(lambda spec: spec.update(managedBy="example.com/other"))

    def strip_label(self) -> str | None:
        """Removes the label by which the operator watches a pod."""
        if (agent := self._agent()) is None:
            return None
        obj = self.machine.cluster.objects[f"{PODS}/{agent.pod.name}"]
        obj["metadata"]["labels"].pop("meshwright.dev/job-name", None)
        self.machine.cluster.update(f"{PODS}/{agent.pod.name}", obj)
        for operator in self.machine.operators:
            for pod in operator.cache.all_pods():
                if pod.name == agent.pod.name:
                    operator.cache.remove_pod(pod)
                    operator.queue.add(next(key for key in operator.cache.jobs if key.name == pod.job))
        return agent.pod.name

    def take_name(self) -> str | None:
        """Creates a foreign pod with the name of the job's next pod."""
        if (agent := self._agent()) is None:
            return None
        name = f"{agent.pod.job}-w{agent.pod.worker}-{agent.pod.incarnation + 1}"
        self._put_foreign(name, agent.pod.node, 0)
        self.machine.crash(agent.pod.name)
        return name

    def damage_status(self) -> str | None:
        """Damages a job's status."""
        if (name := self._job()) is None:
            return None
        obj = copy.deepcopy(self.machine.job(name))
        assert obj is not None
        damage: list[Callable[[KubeObject], Any]] = [
            lambda status: status.get("mesh", {}).update(startedTime=7),
            lambda status: status.update(conditions="none"),
            lambda status: status.update(placement={"workers": [{"worker": "x"}]}),
            lambda status: status.pop("plan", None),
            lambda status: status.pop("appliedSpec", None),
        ]
        chosen = self.chance.randrange(len(damage))
        damage[chosen](obj["status"])
        self.machine.cluster.update(f"{JOBS}/{name}", obj)
        return f"{name} {chosen}"

    # The operator and the API server.

    def restart_operator(self) -> None:
        """Kills the operator and starts another."""
        self.machine.restart()

    def second_operator(self) -> None:
        """Starts a second operator beside the first."""
        if len(self.machine.operators) == 1:
            self.machine.operators.append(self.machine.operator())

    def first_operator_ends(self) -> None:
        """Ends the older of two operators."""
        if len(self.machine.operators) > 1:
            self.machine.cluster.watchers.remove(self.machine.operators.pop(0).see)

    def lose_watches(self) -> None:
        """Cuts operators off from watch events."""
        for operator in self.machine.operators:
            operator.blind = True

    def see_again(self) -> None:
        """Restores the watches and relists."""
        self.machine.see_again()

    def fail_requests(self) -> str:
        """Makes some requests fail."""
        every, calls = self.chance.choice((2, 3, 5)), iter(range(10**9))
        code, reason = self.chance.choice(((0, "Unreachable"), (500, "InternalError"), (409, "Conflict"), (403, "No")))
        error = ApiError(code, reason, "this request fails")
        self.machine.server.fault = lambda verb, path, body: error if next(calls) % every == 0 else None
        return f"{code} every {every}"

    def refuse_status(self) -> None:
        """Makes the API server refuse every status."""
        error = ApiError(422, "Invalid", "status: Invalid value")
        self.machine.server.fault = lambda verb, path, body: error if path.endswith("/status") else None

    def refuse_pods(self) -> str:
        """Makes a quota or a policy refuse pods beyond a small number."""
        allowed = self.chance.choice((0, 1, 2))
        error = self.chance.choice(
            (
                ApiError(403, "Forbidden", QUOTA),
                ApiError(403, "Forbidden", 'pods "x" is forbidden: no'),
                ApiError(400, "", WEBHOOK),
                ApiError(500, "", 'failed calling webhook "policy.example": timeout'),
                ApiError(422, "Invalid", "Pod is invalid"),
            )
        )

        def fault(verb: str, path: str, body: KubeObject) -> ApiError | None:
            live = [pod for pod in self.machine.pods() if not pod.terminal]
            return error if verb == "POST" and path.endswith("/pods") and len(live) >= allowed else None

        self.machine.server.fault = fault
        return f"{error.code} {error.reason} after {allowed}"

    def refuse_secrets(self) -> None:
        """Makes the API server refuse every secret."""
        error = ApiError(403, "Forbidden", 'secrets "s" is forbidden: exceeded quota: count/secrets')
        self.machine.server.fault = lambda verb, path, body: error if "/secrets/" in path else None

    def break_image(self) -> None:
        """Breaks every image pull."""
        self.machine.broken_image = True

    def stall_containers(self) -> None:
        """Keeps every new container from starting, without a reason in its status."""
        self.machine.stalled = True

    def mute(self) -> None:
        """Cuts agents of new pods off from the coordinator."""
        self.machine.mute = True

    def stop_binding(self) -> None:
        """Stops the external scheduler."""
        self.machine.binds = False

    def heal(self) -> None:
        """Ends every fault of the API server, the schedulers and the images."""
        self.machine.server.fault = lambda verb, path, body: None
        self.machine.broken_image = self.machine.mute = self.machine.stalled = False
        self.machine.binds = True
        self.machine.unschedulable = set()

    async def learn(self) -> None:
        """Recalibrates the planner from measured steps."""
        for operator in self.machine.operators[:1]:
            await CalibrationLoop(operator.cache, operator.scheduler).refit()

    # Helpers.

    def _workers(self) -> list[Worker]:
        return [agent for agent in self.machine.agents.values() if isinstance(agent, Worker)]

    def _agent(self) -> Worker | None:
        """An agent, preferably one that trains."""
        names = sorted(agent.pod.name for agent in self._workers() if agent.state is AgentState.RUNNING)
        names = names or sorted(self.machine.agents)
        found = self.machine.agents[self.chance.choice(names)] if names else None
        return found if isinstance(found, Worker) else None

    def _job(self) -> str | None:
        names = sorted(self.machine.jobs())
        return self.chance.choice(names) if names else None

    def _edit(self, change: Callable[[KubeObject], Any]) -> str | None:
        if (name := self._job()) is not None:
            self.machine.edit(name, change)
        return name

    def _fail_rank(self, kind: FailureKind, code: int | None) -> str | None:
        if (agent := self._agent()) is None:
            return None
        agent.fail(kind, code, f"RuntimeError: made to fail, code {code}")
        return f"{agent.pod.name} {code}"

    def _fail_pod(self, name: str, status: KubeObject) -> None:
        obj = self.machine.cluster.objects[f"{PODS}/{name}"]
        obj["status"] |= {"phase": "Failed", **status}
        self.machine.agents.pop(name, None)
        self.machine.cluster.update(f"{PODS}/{name}", obj)

    def _put_foreign(self, name: str, on: str, gpus: int) -> None:
        body = {
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"nodeName": on, "containers": [{"name": "c", "resources": {"limits": {GPU: str(gpus)}}}]},
            "status": {"phase": "Running"},
        }
        self.machine.cluster.put(f"{PODS}/{name}", body)

    async def _node(self, change: Callable[[KubeObject], Any], down: bool | None = None) -> str | None:
        names = sorted(self.machine.nodes)
        if down is False:
            names = sorted(self.machine.down & set(names))
        if not names:
            return None
        name = self.chance.choice(names)
        body = copy.deepcopy(self.machine.nodes[name])
        change(body)
        if down is not None:
            self.machine.down = self.machine.down | {name} if down else self.machine.down - {name}
        await self.machine.put_node(body)
        return name
