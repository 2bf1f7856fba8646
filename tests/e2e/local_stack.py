"""A hand on the running cluster and operator: apply, wait, look, kill."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
import yaml

from meshwright.api import conditions, labels
from meshwright.api.objects import KubeObject
from meshwright.api.parsing import parse_status
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_cli import manifest
from meshwright_cli.child_processes import Program, Programs
from meshwright_cli.demo import setup
from meshwright_cli.demo.observer import gauge
from meshwright_local.kube.client import ApiClient, ApiError
from meshwright_local.kube.kubeconfig import write_kubeconfig
from meshwright_local.kube.resources import EVENTS, JOBS, PODS
from tests.operator import role_rules
from tests.patience import patient
from tests.reserved_ports import reserved_ports

NAMESPACE = "default"
AGENT_IMAGE = "meshwright-agent:0.1.0"
EXAMPLES = Path(__file__).parents[2] / "examples"
NO_TORCH = [{"name": "PYTHONPATH", "value": str(Path(__file__).parents[1] / "no_torch")}]
"""The variables of a pod whose image has no torch."""
ENDLESS = 100_000
"""Steps that no test waits for."""
T = TypeVar("T")
Test = Callable[[ParallelTrainingJobStatus], bool]

TINY = """
replicas: 2
model: {layers: 2, hiddenSize: 32, intermediateSize: 64, heads: 2, vocabSize: 260}
data: {source: PythonStdlib, heldOut: 0.1}
training:
  {steps: 60, globalBatchSize: 8, sequenceLength: 32, seed: 3, optimizer: {learningRate: 0.003, warmupSteps: 5}}
parallelism: {tensor: 2, pipeline: 1, microBatches: 2}
workers: {image: meshwright-worker:0.1.0, gpusPerWorker: 2}
checkpoint: {claimName: NAME, everySteps: 10, keep: 2}
"""

PROFILES = """
sided:
  namespaces: [default]
  volumes: [{name: shared, scratch: 16Mi, mountPath: /shared}]
  env: [{name: SHARED, value: /shared}]
  initContainers:
  - name: prepare
    image: none
    command: [sh, -c, 'echo prepared > "$SHARED/log"']
    env: &env [{name: SHARED, value: /shared}]
    mounts: &mounts [{volume: shared, mountPath: /shared}]
  sidecars:
  - name: daemon
    image: none
    command: [sh, -c, 'echo daemon >> "$SHARED/log"; trap "exit 9" TERM; while :; do sleep 0.1; done']
    env: *env
    mounts: *mounts
"""
"""Profiles of worker pods. `sided` has what those of clouds have: an init container, and a daemon beside the worker."""


def holds(condition: str) -> Test:
    """The test that a condition stands at True."""
    return lambda status: conditions.is_true(status.conditions, condition)


async def eventually(what: str, probe: Callable[[], Awaitable[T]], seconds: float = 120) -> T:
    """Ask until the answer is true-ish, and return it; fail when it is not in time."""
    deadline = time.monotonic() + patient(seconds)
    while not (answer := await probe()):
        assert time.monotonic() < deadline, f"not in {seconds:.0f} s: {what}"
        await asyncio.sleep(0.1)
    return answer


def tiny(name: str, **changes: Any) -> list[KubeObject]:
    """A claim and a job of two pods with two ranks each that trains for seconds; `changes` are merged into the spec."""
    spec = merged(yaml.safe_load(TINY.replace("NAME", name)), changes)
    claim: KubeObject = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    return [claim, {"apiVersion": labels.API_VERSION, "kind": labels.KIND, "metadata": {"name": name}, "spec": spec}]


def endless(name: str, **changes: Any) -> list[KubeObject]:
    """A job as `tiny` makes it that trains until it is deleted or told its last step, 5 steps a second at most.

    Its ranks leave the machine to what the test waits for: a step has one micro-batch.
    """
    slow_data = {"env": [{"name": "PYTHONPATH", "value": str(Path(__file__).parent / "slow_data")}]}
    slow = {"training": {"steps": ENDLESS}, "workers": slow_data, "parallelism": {"microBatches": 1}}
    return tiny(name, **merged(slow, changes))


def command(name: str, *words: str, **changes: Any) -> list[KubeObject]:
    """A job of two pods with two ranks each that run a command: for what does not depend on training.

    Its ranks start at once, and neither they nor their agents import torch.
    """
    trains = {"model": None, "data": None, "training": None, "checkpoint": None, "parallelism": {"microBatches": None}}
    runs = {"runtime": {"command": list(words)}, "workers": {"env": NO_TORCH}}
    return tiny(name, **merged(runs, changes), **trains)


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, as a JSON merge patch does: None removes."""
    out = copy.deepcopy(base)
    for key, value in changes.items():
        if value is None:
            out.pop(key, None)
        else:
            out[key] = merged(out.get(key) or {}, value) if isinstance(value, dict) else value
    return out


@dataclass
class Stage:
    """The running cluster and operator."""

    directory: Path
    kubeconfig: Path
    client: ApiClient
    programs: Programs
    operator: Program
    ports: setup.Ports
    restricted: Path
    """Kubeconfig of the operator: it has the rights that the chart gives it, and no others."""
    applied: list[tuple[str, str]] = field(default_factory=list)

    async def apply(self, items: list[KubeObject]) -> None:
        """Apply objects as `kubectl apply --server-side` does."""
        for item in items:
            await manifest.apply(self.client, item, NAMESPACE)

    async def status(self, name: str) -> ParallelTrainingJobStatus:
        """The job's status now."""
        return parse_status(await self.client.get(JOBS, name, NAMESPACE))

    async def until(self, name: str, test: Test, what: str, seconds: float = 150) -> ParallelTrainingJobStatus:
        """Wait until the job's status is so; fail with the status and the logs when it is not in time."""
        deadline = time.monotonic() + patient(seconds)
        while True:
            status = await self.status(name)
            if test(status):
                return status
            if time.monotonic() > deadline or conditions.is_true(status.conditions, conditions.FAILED):
                pytest.fail(f"{name}: not {what}\n{await self.story(name, status)}")
            await asyncio.sleep(0.1)

    async def complete(self, name: str, seconds: float = 180) -> ParallelTrainingJobStatus:
        """Wait until the job is Complete."""
        return await self.until(
            name, lambda s: conditions.is_true(s.conditions, conditions.COMPLETE), "Complete", seconds
        )

    async def trained(self, name: str, step: int, seconds: float = 150) -> int:
        """Wait until rank 0 has finished a step; the step it is at."""
        deadline = time.monotonic() + patient(seconds)
        while time.monotonic() < deadline:
            pause = 0.2  # as long as there is no rank that trains
            for pod in await self.pods(name):
                address = pod.get("status", {}).get("podIP")
                if address and pod["metadata"]["labels"][labels.LABEL_WORKER] == "0":
                    now = gauge(await self.scrape(f"http://{address}:{labels.METRICS_PORT}/metrics"), "ptj_step")
                    if now is not None and now >= step:
                        return int(now)
                    pause = 0.2 if now is None else 0.05
            await asyncio.sleep(pause)
        pytest.fail(f"{name}: rank 0 did not reach step {step}\n{await self.story(name, await self.status(name))}")

    async def story(self, name: str, status: ParallelTrainingJobStatus) -> str:
        """What a person would want to see of a job that went wrong."""
        events = (await self.client.list(EVENTS, NAMESPACE)).items
        events = [event for event in events if event["involvedObject"].get("name") == name]
        told = [
            f"{event.get('lastTimestamp')} {event['reason']}: {event.get('message')}"
            for event in sorted(events, key=lambda event: str(event.get("lastTimestamp")))
        ]
        parts = [json.dumps(status.wire(), indent=1), "--- events", *told, "--- operator", self.operator.tail(25)]
        for pod in await self.pods(name):
            try:
                text = await self.log(pod["metadata"]["name"])
            except (ApiError, aiohttp.ClientError) as error:  # a story is told with what there is
                text = repr(error)
            parts += [f"--- {pod['metadata']['name']} {pod['status'].get('phase')}", *text.splitlines()[-60:]]
        return "\n".join(parts)

    async def log(self, pod: str) -> str:
        """The whole log of a pod."""
        path = PODS.path(NAMESPACE, pod, "log")
        return "\n".join([line.decode() async for line in self.client.lines(path)])

    async def pods(self, name: str) -> list[KubeObject]:
        """The job's pods."""
        return (await self.client.list(PODS, NAMESPACE, label_selector=f"{labels.LABEL_JOB}={name}")).items

    async def pod(self, name: str, worker: int) -> KubeObject:
        """The newest pod of a worker."""
        mine = [p for p in await self.pods(name) if p["metadata"]["labels"][labels.LABEL_WORKER] == str(worker)]
        return max(mine, key=lambda p: int(p["metadata"]["labels"][labels.LABEL_INCARNATION]))

    async def delete_pod(self, name: str, worker: int, grace_seconds: int | None = None) -> str:
        """Delete a worker's pod; its name."""
        pod: str = (await self.pod(name, worker))["metadata"]["name"]
        await self.client.delete(PODS, pod, NAMESPACE, grace_seconds=grace_seconds)
        return pod

    async def delete(self, name: str) -> None:
        """Delete a job and wait until nothing of it is left: neither objects nor processes."""
        job = await self.client.find(JOBS, name, NAMESPACE)
        if job is None:
            return
        await self.client.delete(JOBS, name, NAMESPACE)
        await self.gone(name, job["metadata"]["uid"])

    async def gone(self, name: str, uid: str) -> None:
        """Wait until the job has neither pods nor processes."""

        async def nothing() -> bool:
            return not await self.pods(name) and not processes(uid)

        await eventually(f"{name} has no pod and no process", nothing)

    async def scrape(self, url: str) -> str:
        """A metrics page; empty while there is none."""
        try:
            timeout = aiohttp.ClientTimeout(total=2)
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
                return await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return ""

    async def kill_operator(self) -> None:
        """kill -9."""
        self.operator.signal(signal.SIGKILL)
        await self.operator.process.wait()

    async def start_operator(self) -> None:
        """Start the operator again, at the same address."""
        self.operator = await start_operator(self.programs, self.directory, self.restricted, self.ports)

    async def saved(self, name: str) -> dict[str, Any]:
        """Where training stands, by the manifest of the job's newest durable checkpoint."""
        state: dict[str, Any] = json.loads((await self.checkpoint(name) / "meshwright.json").read_text())["state"]
        return state

    async def checkpoint(self, name: str) -> Path:
        """The directory of the job's newest durable checkpoint, on this machine."""
        job, status = await self.client.get(JOBS, name, NAMESPACE), await self.status(name)
        assert status.checkpoint is not None
        claim = job["spec"]["checkpoint"]["claimName"]
        return await setup.local_checkpoint_path(self.client, NAMESPACE, claim, status.checkpoint.path)


async def operators_kubeconfig(client: ApiClient, directory: Path) -> Path:
    """A kubeconfig with the operator's service account, bound to exactly the chart's roles."""
    for path, body in role_rules.objects():
        await client.request("POST", path, body=body)
    path, body = role_rules.token_request()
    token: str = (await client.request("POST", path, body=body))["status"]["token"]
    file = directory / "operator.kubeconfig"
    write_kubeconfig(file, replace(client.connection, token=token, client_pem=None))
    return file


@contextmanager
def operator_ports() -> Iterator[setup.Ports]:
    """Ports that no other program gets while the operator is not running."""
    with reserved_ports(2) as (coordinator, metrics):
        yield setup.Ports(coordinator, metrics)


async def start_operator(programs: Programs, directory: Path, kubeconfig: Path, ports: setup.Ports) -> Program:
    """Start an operator that writes its log where a failed test reads it."""
    profiles = directory / "profiles.yaml"
    profiles.write_text(PROFILES)
    more = ["--agent-image", AGENT_IMAGE, "--profiles-file", str(profiles)]
    return await setup.start_operator(programs, directory, kubeconfig, ports, more)


def processes(job_uid: str) -> dict[int, str]:
    """Every living process of a job on this machine, by pid with its command line: they all inherit the job's uid."""
    found = {}
    needle = f"{labels.ENV_JOB_UID}={job_uid}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found
