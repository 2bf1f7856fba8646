"""Pods whose agents speak the real protocol but train nothing, and the kubelet that runs them."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl

import aiohttp

from meshwright.api import labels
from meshwright.api.objects import KubeObject
from meshwright.protocol.messages import (
    AgentState,
    CheckpointCommit,
    Evaluation,
    FailureKind,
    MeshDocument,
    MeshRequest,
    Phase,
    Progress,
    WorkerReport,
)
from meshwright.protocol.signing import Sender, Signer
from meshwright_operator.timestamps import format_time, utc_now
from tests.operator.support import PODS, Api

REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=10)
"""As a real agent's: an operator that dies may leave a connection open that nobody reads."""


class FakeAgent:
    """One pod's agent: says hello, takes mesh documents, reports; trains by counting."""

    def __init__(self, pod: KubeObject, token: str, session: aiohttp.ClientSession, address: str) -> None:
        container = pod["spec"]["containers"][0]
        self.env = {entry["name"]: entry.get("value", "") for entry in container["env"]}
        self.pod = pod["metadata"]["name"]
        self.worker = int(self.env[labels.ENV_WORKER_INDEX])
        self.incarnation = int(self.env[labels.ENV_INCARNATION])
        self.address = address
        self.documents: list[MeshDocument] = []
        self.refused: list[int] = []
        self.state = AgentState.IDLE
        self.failure: FailureKind | None = None
        self.message = ""
        self.step = 0
        self.checkpoint: CheckpointCommit | None = None
        self.evaluation: Evaluation | None = None
        self.steps_per_report = 1
        self.complete = asyncio.Event()
        self._session = session
        self._reporting = asyncio.Lock()
        # As a worker's agent: only the CAs of the pod's environment are trusted.
        authorities = self.env.get(labels.ENV_COORDINATOR_CA)
        self._tls: ssl.SSLContext | bool = True
        if authorities:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._tls.load_verify_locations(cadata=authorities)
        self.pod_uid = pod["metadata"]["uid"]
        self._signer = Signer(token, Sender(self.worker, self.incarnation, self.pod_uid))
        uid = self.env[labels.ENV_JOB_UID]
        name, namespace = self.env[labels.ENV_JOB_NAME], self.env[labels.ENV_JOB_NAMESPACE]
        self.path = f"/v1/jobs/{namespace}/{name}/{uid}"
        self.base = f"{self.env[labels.ENV_COORDINATOR_URL]}{self.path}"

    @property
    def generation(self) -> int:
        return self.documents[-1].generation if self.documents else 0

    @property
    def leads(self) -> bool:
        """Whether it runs rank 0."""
        members = self.documents[-1].members if self.documents else []
        return any(member.worker == self.worker and member.first_rank == 0 for member in members)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._poll())
            group.create_task(self._heartbeat())

    async def fail(self, kind: FailureKind, message: str) -> None:
        self.state, self.failure, self.message = AgentState.FAILED, kind, message
        await self.report()

    async def finish(self) -> None:
        self.state = AgentState.COMPLETE
        await self.report()
        self.complete.set()

    async def report(self) -> None:
        training = self.state in (AgentState.RUNNING, AgentState.COMPLETE, AgentState.DRAINING)
        first = self.leads and training
        body = WorkerReport(
            worker=self.worker,
            incarnation=self.incarnation,
            pod_uid=self.pod_uid,
            generation=self.generation,
            state=self.state,
            failure=self.failure,
            message=self.message,
            progress=Progress(step=self.step, loss=2.5, step_seconds=0.1, tokens_per_second=1e4) if first else None,
            evaluation=self.evaluation if first else None,
            checkpoint=self.checkpoint if self.leads else None,
            phases=[Phase(name="spawn", seconds=0.1), Phase(name="first-step", seconds=0.2)] if first else [],
        )
        # One at a time, as a real agent: two on two connections may overtake each other, and the later is refused.
        async with self._reporting:
            await self._post("report", body.wire())

    async def _poll(self) -> None:
        while True:
            hello = MeshRequest(
                worker=self.worker,
                incarnation=self.incarnation,
                pod_uid=self.pod_uid,
                generation=self.generation,
                address=self.address,
                store_port=20000 + self.worker * 100 + self.generation,
                wait_seconds=2,
            )
            answer = await self._post("mesh", hello.wire())
            if answer is None:
                continue
            self.documents.append(MeshDocument.model_validate(answer))
            self.state, self.failure, self.message = AgentState.STARTING, None, ""
            await self.report()
            self.state = AgentState.RUNNING
            await self.report()

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            if self.state is AgentState.RUNNING:
                self.step += self.steps_per_report
            await self.report()

    async def _post(self, endpoint: str, body: KubeObject) -> KubeObject | None:
        try:
            url = f"{self.base}/{endpoint}"
            data = json.dumps(body).encode()
            headers = self._signer.request("POST", f"{self.path}/{endpoint}", data)
            async with self._session.post(
                url, data=data, headers=headers, timeout=REQUEST_TIMEOUT, ssl=self._tls
            ) as response:
                if response.status == 200:
                    answer: KubeObject = await response.json()
                    return answer
                if response.status == 409:
                    self._signer.follow(response.headers)
                elif response.status != 204:
                    self.refused.append(response.status)
                    await asyncio.sleep(0.1)
        except (aiohttp.ClientError, TimeoutError):
            await asyncio.sleep(0.1)
        return None


async def bind(api: Api, pod: str, node: str) -> None:
    """What a scheduler does."""
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
    await api.create(f"{PODS}/{pod}/binding", body)


class Kubelet:
    """Scheduler and node agents for worker pods: runs a fake agent for every ungated pod until it ends."""

    def __init__(self, api: Api, session: aiohttp.ClientSession) -> None:
        self.api = api
        self.agents: dict[str, FakeAgent] = {}
        self.all_agents: list[FakeAgent] = []
        self.ever: list[str] = []
        """The uids of the pods that it has started. A job that is created again may use the names of pods again."""
        self.hold = False
        """While set, no pod is started."""
        self.silent = False
        """While set, agents of new pods say nothing."""
        self.drain_seconds = 0.1
        self.mount_error = ""
        """While set, new pods are bound, and wait for a volume: only an event says so."""
        self._session = session
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._addresses = 0

    async def run(self) -> None:
        while True:
            for pod in await self.api.items(f"{PODS}?labelSelector={labels.LABEL_JOB}"):
                try:
                    await self._look_at(pod)
                except AssertionError:
                    # A kubelet survives a pod that is deleted while it looks at it.
                    if await self._exists(pod):
                        raise
            await asyncio.sleep(0.05)

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def of(self, job_name: str) -> list[FakeAgent]:
        """The job's agents that run, by worker."""
        mine = [agent for agent in self.agents.values() if agent.env[labels.ENV_JOB_NAME] == job_name]
        return sorted(mine, key=lambda agent: agent.worker)

    async def crash(self, name: str, code: int = 1) -> None:
        """The pod's container ends by itself."""
        self._end(name)
        await self._set_phase(name, "Failed", code)

    async def _look_at(self, pod: KubeObject) -> None:
        metadata, spec, phase = pod["metadata"], pod["spec"], pod.get("status", {}).get("phase", "Pending")
        name, new = metadata["name"], metadata["uid"] not in self.ever
        if metadata.get("deletionTimestamp"):
            await self._drain(name, phase)
        elif not spec.get("nodeName") and not spec.get("affinity"):
            return  # another scheduler is to bind it
        elif phase == "Pending" and not spec.get("schedulingGates") and not self.hold and new:
            await (self._wait_for_volume(name, pod) if self.mount_error else self._start(name, pod))
        elif (agent := self.agents.get(name)) is not None and agent.complete.is_set():
            self._end(name)
            await self._set_phase(name, "Succeeded", 0)

    async def _bind(self, name: str, pod: KubeObject) -> None:
        if not pod["spec"].get("nodeName"):
            terms = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            await bind(self.api, name, terms["nodeSelectorTerms"][0]["matchFields"][0]["values"][0])

    async def _wait_for_volume(self, name: str, pod: KubeObject) -> None:
        if pod["spec"].get("nodeName"):
            return
        await self._bind(name, pod)
        now = format_time(utc_now())
        event = {
            "metadata": {"name": f"{name}.mount"},
            "involvedObject": {"kind": "Pod", "name": name, "namespace": "default", "uid": pod["metadata"]["uid"]},
            **{"type": "Warning", "reason": "FailedMount", "message": self.mount_error, "count": 3},
            **{"firstTimestamp": now, "lastTimestamp": now},
        }
        await self.api.call("POST", "/api/v1/namespaces/default/events", event, ok=False)

    async def _start(self, name: str, pod: KubeObject) -> None:
        self._end(name)
        self.ever.append(pod["metadata"]["uid"])
        await self._bind(name, pod)
        self._addresses += 1
        address = f"127.7.0.{self._addresses}"
        await self.api.patch(f"{PODS}/{name}/status", {"status": {"phase": "Running", "podIP": address}})
        reference = next(e for e in pod["spec"]["containers"][0]["env"] if e["name"] == labels.ENV_TOKEN)
        secret_name = reference["valueFrom"]["secretKeyRef"]["name"]
        secret = await self.api.get(f"/api/v1/namespaces/default/secrets/{secret_name}")
        data = secret.get("data", {}).get("token")
        token = base64.b64decode(data).decode() if data else secret["stringData"]["token"]
        agent = self.agents[name] = FakeAgent(pod, token, self._session, address)
        self.all_agents.append(agent)
        if not self.silent:
            self._tasks[name] = asyncio.create_task(agent.run())

    async def _drain(self, name: str, phase: str) -> None:
        if (agent := self.agents.get(name)) is not None:
            agent.state = AgentState.DRAINING
            if agent.leads:
                now = format_time(utc_now())
                agent.checkpoint = CheckpointCommit(step=agent.step, time=now, path=f"/ckpt/{agent.step}")
            await agent.report()
            await asyncio.sleep(self.drain_seconds)
            self._end(name)
        await self.api.delete(f"{PODS}/{name}", grace=0)

    async def _exists(self, pod: KubeObject) -> bool:
        """Whether the very pod is there, and nobody deletes it."""
        found = await self.api.call("GET", f"{PODS}/{pod['metadata']['name']}", ok=False)
        metadata = found.get("metadata") or {}
        return metadata.get("uid") == pod["metadata"]["uid"] and not metadata.get("deletionTimestamp")

    def _end(self, name: str) -> None:
        self.agents.pop(name, None)
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()

    async def _set_phase(self, name: str, phase: str, code: int) -> None:
        terminated = {"exitCode": code, "finishedAt": format_time(utc_now())}
        state = {"state": {"terminated": terminated}, "ready": False, "restartCount": 0, "image": "", "imageID": ""}
        container = {"name": labels.WORKER_CONTAINER, **state}
        status = {"status": {"phase": phase, "containerStatuses": [container]}}
        await self.api.patch(f"{PODS}/{name}/status", status)
