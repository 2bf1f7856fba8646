"""A small job on an embedded cluster, what is done to it, and how long it then does not train.

One cluster, one operator, one job of replicas of two ranks each, one on each node, and two more nodes. Each fault
strikes while the job trains. The modules are also imported from an older commit, which had them under other names.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp

from meshwright.api import labels
from meshwright.api.spec import ParallelTrainingJobSpec, RecoverySpec


def _import(*names: str) -> Any:
    """The first of these modules that exists."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(names[0])


setup = _import("meshwright_cli.demo.setup", "meshwright.cli.demo.setup")
observer = _import("meshwright_cli.demo.observer", "meshwright.cli.demo.observer")
manifest = _import("meshwright_cli.manifest", "meshwright.cli.manifest")
child_processes = _import("meshwright_cli.child_processes", "meshwright.cli.programs")
control_socket = _import("meshwright_local.control_socket", "meshwright.local.control")
resources = _import("meshwright_local.kube.resources", "meshwright.local.resources")
EVENTS, JOBS, NODES, PODS = resources.EVENTS, resources.JOBS, resources.NODES, resources.PODS

ELASTIC = "elastic" in ParallelTrainingJobSpec.model_fields
"""Whether this commit resizes a job without a restart of its gang."""
IN_MEMORY = ("process in memory", "pod in memory")
"""Faults of a job with `recovery.inMemory`; not measured for a commit without it."""
RESTARTED = {"process in memory": "process", "pod in memory": "pod"}
"""Faults in memory -> the same fault, after which all ranks restart."""
REPEATED = ("process in memory", "pod in memory", "pod")
"""Faults after any number of which the next one is not delayed."""
NAMESPACE, NAME, URGENT = "default", "recovery", "urgent"
LIMIT_SECONDS = 150.0
REPEAT_SECONDS = 12
"""Time between repetitions: the operator is slower to handle a worker whose state changes more often."""
RANKS_OF_WORKER = 2
POLL_SECONDS = 0.05
"""Interval of reading status and metrics: how exact the moments are."""
REAP_POLL_SECONDS = 0.002
REAP_LIMIT_SECONDS = 30.0
HANG_LIMIT = 8
SPEC: dict[str, Any] = {
    "replicas": 2,
    "model": {"layers": 2, "hiddenSize": 32, "intermediateSize": 64, "heads": 2, "vocabSize": 260},
    "data": {"source": "PythonStdlib"},
    "training": {"steps": 1_000_000, "globalBatchSize": 8, "sequenceLength": 32, "seed": 3},
    "parallelism": {"tensor": 2, "pipeline": 1, "microBatches": 2},
    "workers": {"image": "meshwright-worker:0.1.0", "gpusPerWorker": 2},
    "recovery": {"hangTimeoutSeconds": HANG_LIMIT, "maxRestarts": 1000},
    "checkpoint": {"claimName": NAME, "everySteps": 20, "keep": 2},
}
CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": NAME},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
}
URGENT_SPEC: dict[str, Any] = {
    "replicas": 1,
    "priority": 10,
    "runtime": {"command": ["sleep", "1000"]},
    "parallelism": {"tensor": 1},
    "workers": {"image": "meshwright-worker:0.1.0", "gpusPerWorker": 1},
}


@dataclass(frozen=True, slots=True)
class Kill:
    """A rank's process that was killed."""

    pod: str
    rank: int
    pid: int
    moment: float
    """Monotonic seconds."""
    time: float
    """The same moment in seconds since 1970."""


class Job:
    """The job, and what is done to it."""

    limit_seconds = LIMIT_SECONDS
    """Longest time to wait until it trains again."""

    def __init__(self, client: Any, directory: Path, on_loss: str, ranks: int = 4) -> None:
        self.client = client
        self.on_loss = on_loss
        self.ranks = ranks
        self.replicas = ranks // RANKS_OF_WORKER
        self.control = directory / "cluster"
        self.changes: list[float] = []
        """Moments (monotonic seconds) at which another step of rank 0 was observed."""
        self.observed: list[float] = []
        """The steps that were observed then."""
        self.kill: Kill | None = None
        """The last process that was killed."""

    async def start(self) -> int:
        """Apply the job and wait until it trains; its mesh generation."""
        spec = {**SPEC, "replicas": self.replicas}
        if ELASTIC:
            spec["elastic"] = {"maxReplicas": self.replicas, "onLoss": self.on_loss, "pauseSeconds": 10}
        await manifest.apply(self.client, CLAIM, NAMESPACE)
        await self.apply(NAME, spec)
        return int((await self.trains(0))["generation"])

    async def apply(self, name: str, spec: dict[str, Any]) -> None:
        """Apply a job."""
        body = {"apiVersion": labels.API_VERSION, "kind": labels.KIND, "metadata": {"name": name}, "spec": spec}
        await manifest.apply(self.client, body, NAMESPACE)

    async def trains(self, after: int) -> dict[str, float]:
        """Wait until every rank of a generation newer than `after` trains.

        Returns:
            `generation`, and the moments (monotonic seconds) `detected`, `started` and `trains`, of which the first is
            when status said that a new generation forms, the second when it was formed.

        Raises:
            TimeoutError: after LIMIT_SECONDS.
        """
        deadline = time.monotonic() + self.limit_seconds
        seen: dict[str, float] = {}
        while (now := time.monotonic()) < deadline:
            status = (await self.client.get(JOBS, NAME, NAMESPACE)).get("status", {})
            mesh = status.get("mesh", {})
            generation = mesh.get("generation", 0)
            if generation > after:
                seen.setdefault("started", now)
            if mesh.get("pendingCause") or generation > after:
                seen.setdefault("detected", now)
            ready, _, world = status.get("readyRanks", "").partition("/")
            if generation > after and ready == world != "":
                return {"generation": generation, **seen, "trains": now}
            await asyncio.sleep(POLL_SECONDS)
        raise TimeoutError(f"no generation after {after} trains after {self.limit_seconds:.0f} s: {status}")

    async def settled(self, ready_ranks: str) -> int:
        """Wait until a job that shrank after a fault has its size again; its mesh generation.

        Raises:
            TimeoutError: after LIMIT_SECONDS.
        """
        deadline = time.monotonic() + self.limit_seconds
        while time.monotonic() < deadline:
            status = (await self.client.get(JOBS, NAME, NAMESPACE)).get("status", {})
            if status.get("readyRanks") == ready_ranks:
                return int(status["mesh"]["generation"])
            await asyncio.sleep(0.1)
        raise TimeoutError(f"not {ready_ranks} ranks after {self.limit_seconds:.0f} s: {status}")

    async def watch_steps(self) -> None:
        """Note the moments at which rank 0 was at another step, until cancelled."""
        last: float | None = None
        address = ""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            while True:
                try:
                    address = address or await self.first_address()
                    async with session.get(f"http://{address}:{labels.METRICS_PORT}/metrics") as response:
                        step = observer.gauge(await response.text(), "ptj_step")
                except (aiohttp.ClientError, TimeoutError):
                    address, step = "", None
                if step is not None and step != last:
                    last = step
                    self.changes.append(time.monotonic())
                    self.observed.append(step)
                await asyncio.sleep(POLL_SECONDS)

    async def first_address(self) -> str:
        """The address of the pod of worker 0; `invalid.` while it has none."""
        addresses = [
            pod.get("status", {}).get("podIP", "")
            for pod in await self.pods()
            if pod["metadata"]["labels"][labels.LABEL_WORKER] == "0"
        ]
        return next((address for address in addresses if address), "invalid.")

    async def seconds_to_leave(self) -> list[float]:
        """How long ranks took to leave the collectives of an interrupted generation, from the logs of all pods."""
        found: list[float] = []
        for pod in await self.pods():
            log = await self.log(pod["metadata"]["name"])
            found += [float(value) for value in re.findall(r"rank holds its state .*left-in=([0-9.]+) s", log)]
        return found

    async def log(self, pod: str, timestamps: bool = False) -> str:
        """The log of a pod, on request with the time of each line."""
        lines = self.client.lines(PODS.path(NAMESPACE, pod, "log"), {"timestamps": "true"} if timestamps else None)
        return "\n".join([line.decode() async for line in lines])

    async def signal_rank(self, number: signal.Signals) -> None:
        """Send a signal to the last rank's process."""
        pod = (await self.last_pod())["metadata"]["name"]
        started = re.findall(r"rank started rank=(\d+) generation=\d+ pid=(\d+)", await self.log(pod))
        rank, pid = (int(value) for value in started[-1])
        if number is signal.SIGKILL:
            self.kill = Kill(pod, rank, pid, time.monotonic(), time.time())
        os.kill(pid, number)

    async def reaped(self) -> float | None:
        """Seconds from the kill until its agent had collected the exit status of the process; None if none was killed.

        Every commit's agent forks its ranks in a server that reaps them and reports their exit at once.
        """
        kill = self.kill
        while kill is not None and time.monotonic() < kill.moment + REAP_LIMIT_SECONDS:
            if not _known_to_kernel(kill.pid):
                return round(time.monotonic() - kill.moment, 3)
            await asyncio.sleep(REAP_POLL_SECONDS)
        return None

    async def logged(self) -> float | None:
        """Seconds from the kill until the agent wrote the exit of the process to its log."""
        if self.kill is None:
            return None
        exit_of_rank = rf"(?m)^(\S+) .*rank (?:exited|ended) rank={self.kill.rank} "
        log = await self.log(self.kill.pod, timestamps=True)
        stamps = (datetime.fromisoformat(stamp).timestamp() for stamp in re.findall(exit_of_rank, log))
        return next((round(stamp - self.kill.time, 3) for stamp in stamps if stamp >= self.kill.time), None)

    async def delete_pod(self) -> None:
        """Delete the last worker's pod at once, without time to save."""
        await self.client.delete(PODS, (await self.last_pod())["metadata"]["name"], NAMESPACE, grace_seconds=0)

    async def remove_node(self) -> None:
        """Remove the last worker's node: its processes and its object vanish. Another node is free."""
        node = (await self.last_pod())["spec"]["nodeName"]
        await asyncio.to_thread(control_socket.send, self.control, action="remove", node=node)

    async def drain(self) -> None:
        """Cordon the last worker's node and evict its pod, as `kubectl drain` does."""
        pod = await self.last_pod()
        await self.cordon([pod["spec"]["nodeName"]], True)
        await self.client.delete(PODS, pod["metadata"]["name"], NAMESPACE)

    async def preempt(self) -> None:
        """Apply a job of higher priority that needs a node of this one; before elastic jobs, shrink by hand for it."""
        if ELASTIC:
            await self.apply(URGENT, URGENT_SPEC)
        else:
            await self.scale(1)

    async def scale(self, replicas: int) -> None:
        """Edit the number of replicas."""
        await self.client.patch(JOBS, NAME, {"spec": {"replicas": replicas}}, NAMESPACE)

    async def hold_state(self, held: bool) -> None:
        """Edit `recovery.inMemory`. It takes effect in the next generation, for which a rank is killed first."""
        await self.client.patch(JOBS, NAME, {"spec": {"recovery": {"inMemory": held}}}, NAMESPACE)
        if held:
            generation = await self.generation()
            await self.signal_rank(signal.SIGKILL)
            await self.trains(generation)

    async def generation(self) -> int:
        """The mesh generation in status."""
        return int((await self.client.get(JOBS, NAME, NAMESPACE))["status"]["mesh"]["generation"])

    async def cordon(self, names: list[str], unschedulable: bool) -> None:
        """Cordon nodes, or end that."""
        for name in names:
            await self.client.patch(NODES, name, {"spec": {"unschedulable": unschedulable}})

    async def free_nodes(self) -> list[str]:
        """Nodes without a pod of the job."""
        used = {pod["spec"].get("nodeName") for pod in await self.pods()}
        names = [node["metadata"]["name"] for node in (await self.client.list(NODES)).items]
        return [name for name in names if name not in used]

    async def pods(self) -> list[dict[str, Any]]:
        """The job's pods that are not being deleted."""
        pods = (await self.client.list(PODS, NAMESPACE, label_selector=f"{labels.LABEL_JOB}={NAME}")).items
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    async def last_pod(self) -> dict[str, Any]:
        """The pod of the last worker."""
        return max(await self.pods(), key=lambda pod: int(pod["metadata"]["labels"][labels.LABEL_WORKER]))

    async def phases(self, generation: int) -> dict[str, float]:
        """Seconds of each phase of a recovery, from the operator's event, which follows the first step."""
        for _ in range(50):
            for event in (await self.client.list(EVENTS, NAMESPACE)).items:
                note = event.get("message", "") or event.get("note", "")
                found = re.search(rf" s: (.*) \(generation {generation},", note)
                if event.get("reason") == "Recovered" and found:
                    parts = found.group(1).split(", ")
                    return {name: float(value) for name, _, value in (part.rpartition(" ") for part in parts)}
            await asyncio.sleep(0.1)
        return {}


def _known_to_kernel(pid: int) -> bool:
    """Whether a process runs, or has exited and is not reaped."""
    return Path(f"/proc/{pid}").exists()


async def _nothing(job: Job) -> None:
    """Nothing needs preparation."""


async def _cordon_free(job: Job) -> None:
    await job.cordon(await job.free_nodes(), True)


async def _uncordon(job: Job) -> None:
    await job.cordon(await job.free_nodes(), False)


Act = Callable[[Job], Awaitable[None]]
FAULTS: dict[str, tuple[Act, Act, Act]] = {
    "process": (_nothing, lambda job: job.signal_rank(signal.SIGKILL), _nothing),
    "process in memory": (
        lambda job: job.hold_state(True),
        lambda job: job.signal_rank(signal.SIGKILL),
        lambda job: job.hold_state(False),
    ),
    "pod in memory": (lambda job: job.hold_state(True), Job.delete_pod, lambda job: job.hold_state(False)),
    "hang": (_nothing, lambda job: job.signal_rank(signal.SIGSTOP), _nothing),
    "pod": (_nothing, Job.delete_pod, _nothing),
    "drain": (_nothing, Job.drain, _uncordon),
    "node": (_nothing, Job.remove_node, _nothing),
    "resize down": (_nothing, lambda job: job.scale(1), _nothing),
    "resize up": (_nothing, lambda job: job.scale(job.replicas), _nothing),
    "preempt": (_cordon_free, Job.preempt, _nothing),
}
"""What prepares each fault, what it is, and what follows once the job trains again. The order matters: `resize up`
follows `resize down`, and nothing follows `preempt`."""

SMALLER = ("resize down", "preempt")
"""Faults after which the job has one replica."""


async def measure(faults: list[str], on_loss: str, ranks: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Seconds and phases by fault, in the order of FAULTS; `error` where the job did not train again in time.

    `on_loss` is `elastic.onLoss` of the job, where it has that.
    """
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        directory = Path(name)
        async with child_processes.Programs() as programs:
            shape = setup.Shape(racks=2, nodes_per_rack=1 + ranks // (2 * RANKS_OF_WORKER))
            kubeconfig = await setup.start_cluster(programs, directory, shape)
            async with setup.connect(kubeconfig) as client:
                await setup.install_crd(client)
                await setup.start_operator(programs, directory, kubeconfig, setup.Ports())
                job = Job(client, directory, on_loss, ranks)
                began = time.monotonic()
                await job.start()
                found["start"] = {"seconds": round(time.monotonic() - began, 1)}
                steps = asyncio.create_task(job.watch_steps())
                known = [one for one in faults if one not in IN_MEMORY or "in_memory" in RecoverySpec.model_fields]
                for fault in (one for one in FAULTS if one in known):
                    found[fault] = {}
                    try:
                        await _measure_fault(job, fault, found[fault], repeats if fault in REPEATED else 1)
                    except TimeoutError as error:
                        found[fault]["error"] = str(error)
                        break
                found["left"] = {"seconds": await job.seconds_to_leave()}
                steps.cancel()
    return found


EACH = ("reaped", "logged", "stepAfter")
"""Of every repetition: seconds until the agent had reaped the process, until its log had that, and until a new step."""


async def _measure_fault(job: Job, fault: str, result: dict[str, Any], repeats: int) -> None:
    """Let a fault strike some times. The result is that of the first, with the moments of EACH of all."""
    await FAULTS[fault][0](job)
    each: dict[str, list[float | None]] = {name: [] for name in EACH}
    for index in range(repeats):
        await asyncio.sleep(REPEAT_SECONDS if index else 4)  # some steps, so that there is something to repeat
        one: dict[str, Any] = {}
        await _strike(job, fault, one)
        for name, values in each.items():
            values.append(one[name])
        result |= one if not index else {}
    await _restore(job, fault, result)
    result |= each


async def _strike(job: Job, fault: str, result: dict[str, Any]) -> None:
    generation = await job.generation()
    began = time.monotonic()
    load = os.getloadavg()[0]
    job.kill = None
    await FAULTS[fault][1](job)
    reaped = asyncio.create_task(job.reaped())
    began = job.kill.moment if job.kill is not None else began
    seen = await job.trains(generation)
    await first_step_after(job, seen["trains"])
    gap, stepped = _longest_gap(job.changes, began - 1)
    result |= {
        "seconds": round(seen["trains"] - began, 2),
        "detected": round(seen["detected"] - began, 2),
        "started": round(seen["started"] - began, 2),
        "withoutSteps": round(gap, 2),
        "reaped": await reaped,
        "logged": await job.logged(),
        "stepAfter": round(stepped - began, 2),
        "phases": await job.phases(int(seen["generation"])),
        "load": round(load, 1),
    }


async def _restore(job: Job, fault: str, result: dict[str, Any]) -> None:
    """Wait until the job has its size again, and count that resize too."""
    began = time.monotonic()
    await FAULTS[fault][2](job)
    before = job.changes[-1]
    generation = await job.settled("2/2" if fault in SMALLER else f"{job.ranks}/{job.ranks}")
    restored = time.monotonic()
    result["restored"] = 0.0
    if restored - began > 0.5 and fault not in SMALLER:
        await first_step_after(job, restored)
        result["restored"] = round(_longest_gap(job.changes, before)[0], 2)
        result["restoredPhases"] = await job.phases(generation)
        result["withoutSteps"] = round(result["withoutSteps"] + result["restored"], 2)


async def first_step_after(job: Job, moment: float) -> float:
    """Wait until a step was observed after a moment; the moment of the first one."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if job.changes and job.changes[-1] > moment:
            return next(change for change in job.changes if change > moment)
        await asyncio.sleep(0.1)
    raise TimeoutError("no step was observed after all ranks trained")


def _longest_gap(changes: list[float], since: float) -> tuple[float, float]:
    """The longest time between two observed steps, of which the later is after `since`, and the moment of that one."""
    pairs = zip(changes, changes[1:], strict=False)
    return max(((later - earlier, later) for earlier, later in pairs if later > since), default=(0.0, since))
