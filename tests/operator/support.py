"""A control plane, the operator in a thread, and pods whose agents speak the real protocol but train nothing."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from meshwright.api import labels
from meshwright.protocol import (
    CheckpointCommit,
    FailureKind,
    MeshDocument,
    MeshRequest,
    Phase,
    Progress,
    WorkerReport,
    WorkerState,
)
from meshwright_operator.clock import format_time, utc_now
from meshwright_operator.run import run
from meshwright_operator.settings import Address, Settings

Object = dict[str, Any]

ROOT = Path(__file__).parent.parent.parent
JOBS = f"/apis/{labels.GROUP}/{labels.VERSION}/namespaces/default/{labels.PLURAL}"
PODS = "/api/v1/namespaces/default/pods"
MERGE = "application/merge-patch+json"


class Api:
    """A few requests to the API server, as an administrator."""

    def __init__(self, url: str, token: str | None, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.token = token
        self._session = session
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def call(
        self, method: str, path: str, body: object = None, *, kind: str = "application/json", ok: bool = True
    ) -> Object:
        headers = {**self._headers, "Content-Type": kind}
        async with self._session.request(method, self.url + path, json=body, headers=headers, ssl=False) as response:
            answer: Object = await response.json()
            if ok:
                assert response.status < 300, (method, path, response.status, answer)
            return answer

    async def get(self, path: str) -> Object:
        return await self.call("GET", path)

    async def items(self, path: str) -> list[Object]:
        return list((await self.get(path))["items"])

    async def create(self, path: str, body: object) -> Object:
        return await self.call("POST", path, body)

    async def patch(self, path: str, body: object) -> Object:
        return await self.call("PATCH", path, body, kind=MERGE)

    async def delete(self, path: str, grace: int | None = None) -> None:
        await self.call("DELETE", path, {"gracePeriodSeconds": grace} if grace is not None else {}, ok=False)

    async def job(self, name: str) -> Object:
        return await self.get(f"{JOBS}/{name}")

    async def status(self, name: str) -> Object:
        status: Object = (await self.job(name)).get("status") or {}
        return status

    async def pods(self, job: str) -> list[Object]:
        return await self.items(f"{PODS}?labelSelector={labels.LABEL_JOB}={job}")

    async def events(self, job: str) -> list[Object]:
        events = await self.items("/api/v1/namespaces/default/events")
        return [event for event in events if event["involvedObject"]["name"] == job]

    async def reasons(self, job: str) -> list[str]:
        return [event["reason"] for event in await self.events(job)]


async def until(check: Callable[[], Awaitable[Any]], what: str, seconds: float = 15.0) -> Any:
    """Waits until `check` gives something true, and gives that."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        if found := await check():
            return found
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not in {seconds} s: {what}")
        await asyncio.sleep(0.03)


def condition(status: Mapping[str, Any], kind: str) -> Object:
    found: Object = next((c for c in status.get("conditions") or () if c["type"] == kind), {})
    return found


def node(name: str, rack: str, gpus: int = 2) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": name, "network.topology.nvidia.com/leaf": rack},
        },
        "status": {
            "allocatable": {"nvidia.com/gpu": str(gpus), "cpu": "64", "memory": "256Gi", "pods": "110"},
            "capacity": {"nvidia.com/gpu": str(gpus), "cpu": "64", "memory": "256Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        },
    }


def job(name: str, **spec: Any) -> Object:
    """Two tensor-parallel ranks by two stages by two replicas: eight ranks in four pods."""
    whole: Object = {
        "replicas": 2,
        "model": {
            "layers": 4,
            "hiddenSize": 64,
            "intermediateSize": 128,
            "heads": 4,
            "kvHeads": 2,
            "vocabSize": 320,
        },
        "data": {"source": "PythonStdlib"},
        "training": {"steps": 50, "globalBatchSize": 8, "sequenceLength": 64},
        "parallelism": {"tensor": 2, "pipeline": 2, "microBatches": 2},
        "workers": {"image": "meshwright/worker", "gpusPerWorker": 2},
        **spec,
    }
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND,
        "metadata": {"name": name},
        "spec": whole,
    }


async def install(api: Api) -> None:
    """The CRD and four nodes in two racks."""
    definition = yaml.safe_load((ROOT / "crds" / "meshwright.dev_paralleltrainingjobs.yaml").read_text())
    await api.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition, ok=False)
    for name, rack in (("n0", "r0"), ("n1", "r0"), ("n2", "r1"), ("n3", "r1")):
        await put_node(api, node(name, rack))

    async def served() -> bool:
        return "items" in await api.call("GET", JOBS, ok=False)

    await until(served, "the CRD is served")


async def put_node(api: Api, body: Object) -> None:
    """A node with its status, new or as before."""
    await api.call("POST", "/api/v1/nodes", body, ok=False)
    await api.patch(f"/api/v1/nodes/{body['metadata']['name']}/status", {"status": body["status"]})


def write_kubeconfig(path: Path, url: str, token: str | None) -> Path:
    user = {"token": token} if token else {}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": url, "insecure-skip-tls-verify": url.startswith("https")}}],
        "users": [{"name": "test", "user": user}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


class OperatorThread:
    """The operator, whole, in a thread of its own: kopf takes every task of its event loop for its own."""

    def __init__(self, kubeconfig: Path, directory: Path, coordinator_port: int, **settings: Any) -> None:
        self.settings = Settings(
            kubeconfig=kubeconfig,
            coordinator_listen=Address("127.0.0.1", coordinator_port),
            key_file=directory / "coordinator.key",
            **{
                "metrics_listen": Address("127.0.0.1", 0),
                "identity": "test",
                "lease_seconds": 3.0,
                "resync_seconds": 5.0,
                **settings,
            },
        )
        self.ready = threading.Event()
        self.failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)

    async def start(self, wait: bool = True) -> OperatorThread:
        self._thread.start()
        if wait:
            assert await asyncio.to_thread(self.ready.wait, 20), self.failure
        return self

    async def stop(self) -> None:
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(self._thread.join, 15)
        assert not self._thread.is_alive()

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:  # noqa: BLE001 - shown by the test that waits for it
            self.failure = error

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        await run(self.settings, self._stop, self.ready.set)


class FakeAgent:
    """One pod's agent: says hello, takes mesh documents, reports; trains by counting."""

    def __init__(self, pod: Object, token: str, session: aiohttp.ClientSession, address: str) -> None:
        container = pod["spec"]["containers"][0]
        self.env = {entry["name"]: entry.get("value", "") for entry in container["env"]}
        self.pod = pod["metadata"]["name"]
        self.worker = int(self.env[labels.ENV_WORKER_INDEX])
        self.incarnation = int(self.env[labels.ENV_INCARNATION])
        self.address = address
        self.documents: list[MeshDocument] = []
        self.refused: list[int] = []
        self.state = WorkerState.IDLE
        self.failure: FailureKind | None = None
        self.message = ""
        self.step = 0
        self.checkpoint: CheckpointCommit | None = None
        self.steps_per_report = 1
        self.complete = asyncio.Event()
        self._session = session
        self._headers = {"Authorization": f"Bearer {token}"}
        uid = self.env[labels.ENV_JOB_UID]
        name, namespace = self.env[labels.ENV_JOB_NAME], self.env[labels.ENV_JOB_NAMESPACE]
        self.base = f"{self.env[labels.ENV_COORDINATOR_URL]}/v1/jobs/{namespace}/{name}/{uid}"

    @property
    def generation(self) -> int:
        return self.documents[-1].generation if self.documents else 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._poll())
            group.create_task(self._heartbeat())

    async def fail(self, kind: FailureKind, message: str) -> None:
        self.state, self.failure, self.message = WorkerState.FAILED, kind, message
        await self.report()

    async def finish(self) -> None:
        self.state = WorkerState.COMPLETE
        await self.report()
        self.complete.set()

    async def report(self) -> None:
        training = self.state in (WorkerState.RUNNING, WorkerState.COMPLETE, WorkerState.DRAINING)
        first = self.worker == 0 and training
        body = WorkerReport(
            worker=self.worker,
            incarnation=self.incarnation,
            generation=self.generation,
            state=self.state,
            failure=self.failure,
            message=self.message,
            progress=Progress(step=self.step, loss=2.5, step_seconds=0.1, tokens_per_second=1e4) if first else None,
            checkpoint=self.checkpoint if self.worker == 0 else None,
            phases=[Phase(name="spawn", seconds=0.1), Phase(name="first-step", seconds=0.2)] if first else [],
        )
        await self._post("report", body.wire())

    async def _poll(self) -> None:
        while True:
            hello = MeshRequest(
                worker=self.worker,
                incarnation=self.incarnation,
                generation=self.generation,
                address=self.address,
                store_port=20000 + self.worker * 100 + self.generation,
                wait_seconds=2,
            )
            answer = await self._post("mesh", hello.wire())
            if answer is None:
                continue
            self.documents.append(MeshDocument.model_validate(answer))
            self.state, self.failure, self.message = WorkerState.STARTING, None, ""
            await self.report()
            self.state = WorkerState.RUNNING
            await self.report()

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            if self.state is WorkerState.RUNNING:
                self.step += self.steps_per_report
            await self.report()

    async def _post(self, endpoint: str, body: Object) -> Object | None:
        try:
            url = f"{self.base}/{endpoint}"
            async with self._session.post(url, json=body, headers=self._headers) as response:
                if response.status == 200:
                    answer: Object = await response.json()
                    return answer
                if response.status != 204:
                    self.refused.append(response.status)
                    await asyncio.sleep(0.1)
        except aiohttp.ClientError:
            await asyncio.sleep(0.1)
        return None


class Kubelet:
    """Scheduler and node agents for worker pods: runs a fake agent for every ungated pod until it ends."""

    def __init__(self, api: Api, session: aiohttp.ClientSession) -> None:
        self.api = api
        self.agents: dict[str, FakeAgent] = {}
        self.all_agents: list[FakeAgent] = []
        self.ever: list[str] = []
        self.hold = False
        """While set, no pod is started."""
        self.silent = False
        """While set, agents of new pods say nothing."""
        self.drain_seconds = 0.1
        self._session = session
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._addresses = 0

    async def run(self) -> None:
        while True:
            for pod in await self.api.items(f"{PODS}?labelSelector={labels.LABEL_JOB}"):
                await self._look_at(pod)
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

    async def _look_at(self, pod: Object) -> None:
        metadata, spec, phase = pod["metadata"], pod["spec"], pod.get("status", {}).get("phase", "Pending")
        name = metadata["name"]
        if metadata.get("deletionTimestamp"):
            await self._drain(name, phase)
        elif phase == "Pending" and not spec.get("schedulingGates") and not self.hold and name not in self.ever:
            await self._start(name, pod)
        elif (agent := self.agents.get(name)) is not None and agent.complete.is_set():
            self._end(name)
            await self._set_phase(name, "Succeeded", 0)

    async def _start(self, name: str, pod: Object) -> None:
        self.ever.append(name)
        terms = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        target = terms["nodeSelectorTerms"][0]["matchFields"][0]["values"][0]
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name},
            "target": {"apiVersion": "v1", "kind": "Node", "name": target},
        }
        await self.api.create(f"{PODS}/{name}/binding", binding)
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
            agent.state = WorkerState.DRAINING
            if agent.worker == 0:
                now = format_time(utc_now())
                agent.checkpoint = CheckpointCommit(step=agent.step, time=now, path=f"/ckpt/{agent.step}")
            await agent.report()
            await asyncio.sleep(self.drain_seconds)
            self._end(name)
        await self.api.delete(f"{PODS}/{name}", grace=0)

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
