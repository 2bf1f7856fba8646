"""How long a small job does not train after a fault or a resize, by phase, beside the same job under another commit.

One embedded cluster, one operator, one job of two replicas of two ranks each. Each fault strikes while the job trains;
the time ends when every rank of a newer mesh generation trains. The phases are those of the operator's event. With
`--baseline DIR`, a checkout with its own `.venv`, both commits take turns on this machine. A baseline without
`spec.elastic` restarts the gang to resize.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import click
from _report import table, write_json

from meshwright.api import labels
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright_cli import manifest
from meshwright_cli.child_processes import Programs
from meshwright_cli.demo import setup
from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.resources import EVENTS, JOBS, NODES, PODS

NAMESPACE, NAME = "default", "recovery"
LIMIT_SECONDS = 240.0
HANG_LIMIT = 8
SPEC: dict[str, Any] = {
    "replicas": 2,
    "model": {"layers": 2, "hiddenSize": 32, "intermediateSize": 64, "heads": 2, "vocabSize": 260},
    "data": {"source": "PythonStdlib"},
    "training": {"steps": 1_000_000, "globalBatchSize": 8, "sequenceLength": 32, "seed": 3},
    "parallelism": {"tensor": 2, "pipeline": 1, "microBatches": 2},
    "workers": {"image": "meshwright-worker:0.1.0", "gpusPerWorker": 2},
    "recovery": {"hangTimeoutSeconds": HANG_LIMIT},
    "checkpoint": {"claimName": NAME, "everySteps": 20, "keep": 2},
}
CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": NAME},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
}


class Job:
    """The job, and what is done to it."""

    def __init__(self, client: ApiClient) -> None:
        self.client = client

    async def start(self) -> None:
        """Apply the job and wait until it trains."""
        spec = dict(SPEC)
        if "elastic" in ParallelTrainingJobSpec.model_fields:
            spec["elastic"] = {"maxReplicas": 2, "replacementSeconds": 60, "pauseSeconds": 10}
        body = {"apiVersion": labels.API_VERSION, "kind": labels.KIND, "metadata": {"name": NAME}, "spec": spec}
        for item in (CLAIM, body):
            await manifest.apply(self.client, item, NAMESPACE)
        await self.trains(0)

    async def trains(self, after: int) -> int:
        """Wait until every rank of a generation newer than `after` trains; the generation."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            status = (await self.client.get(JOBS, NAME, NAMESPACE)).get("status", {})
            generation = status.get("mesh", {}).get("generation", 0)
            ready, _, world = status.get("readyRanks", "").partition("/")
            if generation > after and ready == world != "":
                return int(generation)
            await asyncio.sleep(0.05)
        raise TimeoutError(f"no generation after {after} trains after {LIMIT_SECONDS:.0f} s: {status}")

    async def signal_rank(self, number: signal.Signals) -> None:
        """Send a signal to the last rank's process."""
        path = PODS.path(NAMESPACE, (await self.last_pod())["metadata"]["name"], "log")
        log = "\n".join([line.decode() async for line in self.client.lines(path)])
        os.kill(int(re.findall(r"rank started rank=\d+ generation=\d+ pid=(\d+)", log)[-1]), number)

    async def delete_pod(self) -> None:
        """Delete the last worker's pod at once, without time to save."""
        await self.client.delete(PODS, (await self.last_pod())["metadata"]["name"], NAMESPACE, grace_seconds=0)

    async def drain(self) -> None:
        """Cordon the last worker's node and evict its pod, as `kubectl drain` does."""
        pod = await self.last_pod()
        await self.client.patch(NODES, pod["spec"]["nodeName"], {"spec": {"unschedulable": True}})
        await self.client.delete(PODS, pod["metadata"]["name"], NAMESPACE)

    async def scale(self, replicas: int) -> None:
        """Edit the number of replicas."""
        await self.client.patch(JOBS, NAME, {"spec": {"replicas": replicas}}, NAMESPACE)

    async def last_pod(self) -> dict[str, Any]:
        """The pod of the last worker."""
        pods = (await self.client.list(PODS, NAMESPACE, label_selector=f"{labels.LABEL_JOB}={NAME}")).items
        live = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        return max(live, key=lambda pod: int(pod["metadata"]["labels"][labels.LABEL_WORKER]))

    async def phases(self, generation: int) -> dict[str, float]:
        """Seconds of each phase of a recovery, from the operator's event, which follows the first step."""
        for _ in range(100):
            for event in (await self.client.list(EVENTS, NAMESPACE)).items:
                note = event.get("message", "")
                if event.get("reason") == "Recovered" and f"(generation {generation}," in note:
                    parts = note.partition(": ")[2].partition(" (")[0].split(", ")
                    return {name: float(value) for name, _, value in (part.rpartition(" ") for part in parts)}
            await asyncio.sleep(0.1)
        return {}


FAULTS: dict[str, Callable[[Job], Awaitable[None]]] = {
    "process": lambda job: job.signal_rank(signal.SIGKILL),
    "pod": Job.delete_pod,
    "hang": lambda job: job.signal_rank(signal.SIGSTOP),
    "drain": Job.drain,
    "resize down": lambda job: job.scale(1),
    "resize up": lambda job: job.scale(2),
}
QUICK = ("process", "resize down", "resize up")


async def measure(faults: list[str]) -> dict[str, dict[str, Any]]:
    """Seconds and phases by fault."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="recovery-") as directory:
        async with Programs() as programs:
            kubeconfig = await setup.start_cluster(programs, Path(directory), setup.Shape())
            async with setup.connect(kubeconfig) as client:
                await setup.install_crd(client)
                await setup.start_operator(programs, Path(directory), kubeconfig, setup.Ports())
                job = Job(client)
                await job.start()
                generation = await job.trains(0)
                for fault in faults:
                    await asyncio.sleep(3)  # some steps, so that there is something to repeat
                    began = time.monotonic()
                    await FAULTS[fault](job)
                    generation = await job.trains(generation)
                    seconds = round(time.monotonic() - began, 1)
                    found[fault] = {"seconds": seconds, "phases": await job.phases(generation)}
    return found


def measure_other(python: Path, faults: list[str]) -> dict[str, dict[str, Any]]:
    """The same, with the packages of another checkout."""
    command = [str(python), str(Path(__file__).resolve()), "--print", *(f"--fault={fault}" for fault in faults)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=python.parents[2])
    return dict(json.loads(done.stdout.splitlines()[-1]))


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="A few faults: tests that it runs.")
@click.option("--fault", "faults", multiple=True, type=click.Choice(list(FAULTS)), help="Only these.")
@click.option("--runs", default=1, show_default=True, help="Runs of each commit; the shortest time counts.")
@click.option("--baseline", type=click.Path(path_type=Path, exists=True), help="A checkout with its own `.venv`.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the numbers there.")
@click.option("--print", "printed", is_flag=True, hidden=True)
def main(
    quick: bool, faults: tuple[str, ...], runs: int, baseline: Path | None, file: Path | None, printed: bool
) -> None:
    """Measure, and print a table."""
    chosen = list(faults or (QUICK if quick else FAULTS))
    if printed:
        print(json.dumps(asyncio.run(measure(chosen))))
        return
    pythons = {"this": Path(sys.executable)}
    if baseline is not None:
        pythons["baseline"] = baseline.resolve() / ".venv" / "bin" / "python"
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
    for _ in range(runs):
        for name, python in pythons.items():
            results[name].append(measure_other(python, chosen))
    best = {
        name: {fault: min((run[fault] for run in found), key=lambda one: one["seconds"]) for fault in chosen}
        for name, found in results.items()
    }
    rows = []
    for fault in chosen:
        phases = ", ".join(f"{name} {value}" for name, value in best["this"][fault]["phases"].items() if value >= 0.1)
        rows.append([fault, *(best[name][fault]["seconds"] for name in pythons), phases])
    table("Seconds without training", ["", *pythons, "phases (this)"], rows)
    write_json(file, {"best": best, "runs": results})


if __name__ == "__main__":
    main()
