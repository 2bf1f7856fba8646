"""Real runs of a small job on an embedded cluster, with faults injected at seeded times, and their ledgers.

One cluster and one operator for all runs. Each run is a new job; it ends some steps after its last fault. The times of
a recovery are measured from outside, by the clock of this process: from the injection until the job's status says that
a new generation forms, and from there until rank 0 has completed a step of it.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks._recovery_job import (
    CLAIM,
    JOBS,
    NAME,
    NAMESPACE,
    SPEC,
    Job,
    child_processes,
    control_socket,
    first_step_after,
    manifest,
    setup,
)

SAVE_EVERY = 100
"""Steps between checkpoints."""
FAULTS_OF_A_RUN = 2
LIMIT_SECONDS = 900.0
LEASE_SECONDS = 600
"""Of the operator, which nobody starts again if it loses its Lease on a busy machine."""


@dataclass(slots=True)
class Fault:
    """One injected fault. Times are in seconds."""

    kind: str
    at: float
    """Since the creation of the job."""
    detection: float
    restart: float


@dataclass(slots=True)
class InjectedRun:
    """One run, as it was measured."""

    seed: int
    start: float
    """Seconds from the creation of the job to its first steps."""
    faults: list[Fault] = field(default_factory=list)
    ledger: dict[str, float] = field(default_factory=dict)
    """Seconds by cause: `status.goodput.booked`."""
    steps: int = 0
    """`status.goodput.furthestStep`."""
    step: float = 0.0
    """Seconds of a step while nothing is disturbed."""
    restarts: int = 0
    """`status.restartCount`."""

    @property
    def disturbed(self) -> bool:
        """Whether something else failed too, as on a machine so busy that nodes or agents time out."""
        return self.restarts != len(self.faults)

    @property
    def goodput(self) -> float:
        """The time that the steps of the run take undisturbed, over its time."""
        return self.steps * self.step / self.seconds

    @property
    def booked(self) -> float:
        """Training over all time, as the operator's ledger has them, from reports that are seconds apart."""
        return self.ledger["Training"] / self.seconds

    @property
    def seconds(self) -> float:
        """All time of the run."""
        return sum(self.ledger.values())


class InjectedJob(Job):
    """A job that is created and deleted again and again."""

    limit_seconds = LIMIT_SECONDS
    added = 0
    """Nodes that were added for those that were removed."""

    async def begin(self) -> tuple[int, float]:
        """Create the job and wait until it trains; its mesh generation, and the time of its creation."""
        spec = {**SPEC, "parallelism": {"tensor": 1, "pipeline": 1, "microBatches": 2}}
        spec["workers"] = {**SPEC["workers"], "gpusPerWorker": 1}
        spec["checkpoint"] = {**SPEC["checkpoint"], "everySteps": SAVE_EVERY}
        spec["recovery"] = {**SPEC["recovery"], "maxRestarts": 1000}
        await manifest.apply(self.client, CLAIM, NAMESPACE)
        await self.apply(NAME, spec)
        created = (await self.client.get(JOBS, NAME, NAMESPACE))["metadata"]["creationTimestamp"]
        generation = int((await self.trains(0))["generation"])
        return generation, datetime.fromisoformat(created.replace("Z", "+00:00")).timestamp()

    async def status(self) -> dict[str, Any]:
        """The job's status."""
        return dict((await self.client.get(JOBS, NAME, NAMESPACE)).get("status", {}))

    async def steps_after(self, more: int) -> dict[str, Any]:
        """Wait until the ledger has so many more steps than ever; the status."""
        first = int((await self.status()).get("goodput", {}).get("furthestStep", 0))
        deadline = time.monotonic() + self.limit_seconds
        while time.monotonic() < deadline:
            status = await self.status()
            if int(status.get("goodput", {}).get("furthestStep", 0)) >= first + more:
                return status
            await asyncio.sleep(0.5)
        raise TimeoutError(f"no {more} steps after {self.limit_seconds:.0f} s")

    def progress(self, begin: float, end: float) -> tuple[float, float]:
        """Seconds between two moments in which steps were observed, and how many steps that were."""
        seen = [
            (moment, step) for moment, step in zip(self.changes, self.observed, strict=True) if begin <= moment <= end
        ]
        return (seen[-1][0] - seen[0][0], seen[-1][1] - seen[0][1]) if seen else (0.0, 0.0)

    async def replace_node(self) -> None:
        """Remove the last worker's node, and add another one."""
        node = (await self.last_pod())["spec"]["nodeName"]
        await asyncio.to_thread(control_socket.send, self.control, action="remove", node=node)
        self.added += 1
        await asyncio.to_thread(
            control_socket.send, self.control, action="add", node=f"added-{self.added}", rack="rack0"
        )

    async def end(self) -> None:
        """Delete the job, and wait until its pods are gone."""
        await self.client.delete(JOBS, NAME, NAMESPACE)
        deadline = time.monotonic() + self.limit_seconds
        while time.monotonic() < deadline:
            if not (await self.pods()) and not [j for j in (await self.client.list(JOBS, NAMESPACE)).items]:
                return
            await asyncio.sleep(0.5)
        raise TimeoutError("the job is not deleted")


KINDS: dict[str, Callable[[InjectedJob], Awaitable[None]]] = {
    "process": lambda job: job.signal_rank(signal.SIGKILL),
    "hang": lambda job: job.signal_rank(signal.SIGSTOP),
    "pod": InjectedJob.delete_pod,
    "node": InjectedJob.replace_node,
}


async def one_run(job: InjectedJob, seed: int, mean_seconds: float) -> InjectedRun:
    """One run with its faults."""
    draw = random.Random(seed)
    generation, created = await job.begin()
    trains = await first_step_after(job, time.monotonic())
    run = InjectedRun(seed, time.time() - created)
    undisturbed = []
    for _ in range(FAULTS_OF_A_RUN):
        kind = draw.choices(list(KINDS), [0.45, 0.15, 0.25, 0.15])[0]
        await asyncio.sleep(3.0 + draw.expovariate(1.0 / mean_seconds))
        at, began = time.time() - created, time.monotonic()
        undisturbed.append(job.progress(trains, began))
        await KINDS[kind](job)
        seen = await job.trains(generation)
        generation = int(seen["generation"])
        trains = await first_step_after(job, seen["trains"])
        run.faults.append(Fault(kind, at, seen["detected"] - began, trains - seen["detected"]))
        print(f"seed {seed}: {kind} after {at:.1f} s, {run.faults[-1]}", file=sys.stderr, flush=True)
    status = await job.steps_after(2 * SAVE_EVERY)
    ledger = status["goodput"]
    run.restarts = int(status.get("restartCount", 0))
    run.ledger = {entry["cause"]: entry["milliseconds"] / 1000.0 for entry in ledger["booked"]}
    run.steps = int(ledger["furthestStep"])
    undisturbed.append(job.progress(trains, time.monotonic()))
    run.step = sum(seconds for seconds, _ in undisturbed) / sum(steps for _, steps in undisturbed)
    await job.end()
    return run


async def injected_runs(seeds: list[int], mean_seconds: float, done: Callable[[InjectedRun], None]) -> None:
    """Run every seed, and pass each run on when it has ended."""
    with tempfile.TemporaryDirectory(prefix="injected-") as name:
        directory = Path(name)
        async with child_processes.Programs() as programs:
            kubeconfig = await setup.start_cluster(programs, directory, setup.Shape())
            async with setup.connect(kubeconfig) as client:
                await setup.install_crd(client)
                options = ["--lease-seconds", str(LEASE_SECONDS)]
                await setup.start_operator(programs, directory, kubeconfig, setup.Ports(), options)
                job = InjectedJob(client, directory, "Replace")
                steps = asyncio.create_task(job.watch_steps())
                for seed in seeds:
                    run = await one_run(job, seed, mean_seconds)
                    if run.disturbed:
                        print(f"seed {seed}: {run.restarts} restarts, left out", file=sys.stderr, flush=True)
                    else:
                        done(run)
                steps.cancel()
