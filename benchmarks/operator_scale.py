"""How the operator scales: time to a whole gang beside the server's raw speed, 500 jobs, a restart with 10,000 pods.

    python benchmarks/operator_scale.py [--provider embedded|assets] [--kubeconfig FILE] [--quick] [--json FILE]

The baseline is measured in the same run: the same pods, created by a bare client, as many at a time as the operator
does. On an existing cluster (--kubeconfig) it makes nodes `bench-*` and namespaces `bench-*` and deletes them again.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import statistics
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from _operator_cluster import GPUS, PARALLEL, Bench, at_once, delete_quietly, job, operator, quantile, until
from _report import table, write_json

from meshwright.api import labels
from meshwright.api.objects import KubeObject
from meshwright_cli.child_processes import Programs
from meshwright_cli.demo import setup
from meshwright_local.kube.resources import JOBS, NAMESPACES, NODES, PODS

SLOW = 600.0

log = logging.getLogger("operator_scale")


@dataclass
class Numbers:
    """What is reported, under the names of the JSON file. Times in seconds, objects by number of pods."""

    raw_create_s: dict[str, float] = field(default_factory=dict)
    created_s: dict[str, float] = field(default_factory=dict)
    bound_s: dict[str, float] = field(default_factory=dict)
    reconcile_p50_s: float | None = None
    reconcile_p99_s: float | None = None
    restart_10k_s: float | None = None
    restart_10k_rss_mib: float | None = None


@dataclass
class Sizes:
    """How much is done."""

    gangs: tuple[tuple[int, int], ...] = ((64, 5), (256, 5), (1000, 5))
    """Pods, and how often: medians are reported, since a small gang takes less time than this machine's moods."""
    jobs: int = 500
    restart_jobs: int = 10
    restart_workers: int = 1000

    def nodes(self, part: str) -> int:
        """Nodes that hold the most of a part."""
        pods = {
            "gangs": max(pods for pods, _ in self.gangs),
            "jobs": 2 * self.jobs,
            "restart": self.restart_jobs * self.restart_workers,
        }
        return -(-pods[part] // GPUS)


QUICK = Sizes(gangs=((16, 3), (64, 3)), jobs=20, restart_jobs=2, restart_workers=100)


async def gangs(
    bench: Bench, directory: Path, kubeconfig: Path, run: str, workers: int, rounds: int, numbers: Numbers
) -> None:
    """One size, several times."""
    found = []
    for number in range(rounds):
        namespace = f"bench-{run}-{workers}-{number}"
        await bench.namespace(namespace)
        found.append(await gang(bench, directory, kubeconfig, namespace, workers))
        await delete_quietly(bench.client, NAMESPACES.path(None, namespace))
    size = str(workers)
    numbers.raw_create_s[size], numbers.created_s[size], numbers.bound_s[size] = (
        statistics.median(column) for column in zip(*found, strict=True)
    )


async def gang(
    bench: Bench, directory: Path, kubeconfig: Path, namespace: str, workers: int
) -> tuple[float, float, float]:
    """From apply to all pods made, and to all pods bound; then how long the same pods take a bare client."""
    async with operator(directory, kubeconfig) as running:

        async def ready() -> bool:
            return "ptj_leader 1.0" in await running.metrics()

        await until(ready, SLOW, 0.1)
        await asyncio.sleep(2)
        async with bench.pods_made(namespace, workers) as made, asyncio.timeout(SLOW):
            started = time.monotonic()
            await bench.client.create(JOBS, job("gang", namespace, workers), namespace)
            created_s = await made - started

        async def bound() -> bool:
            return await bench.unbound(namespace) == 0

        bound_s = await until(bound, SLOW, 0.1) - started
        sample = (await bench.client.request("GET", PODS.path(namespace), params={"limit": "1"}))["items"][0]
    await bench.clear(namespace)
    raw_s = await raw(bench, namespace, sample, workers)
    await bench.clear(namespace)
    log.info("%d pods: raw %.2f s, created %.2f s, bound %.2f s", workers, raw_s, created_s, bound_s)
    return raw_s, created_s, bound_s


async def raw(bench: Bench, namespace: str, sample: KubeObject, workers: int) -> float:
    """The server's own speed: the same pods, gated as the operator's, counted in the same way."""
    spec = {k: v for k, v in sample["spec"].items() if k != "nodeName"}
    spec["schedulingGates"] = [{"name": labels.GANG_GATE}]
    metadata = {"annotations": sample["metadata"]["annotations"], "labels": {**sample["metadata"]["labels"]}}
    metadata["labels"].pop(labels.LABEL_JOB)
    bodies = []
    for number in range(workers):
        body = copy.deepcopy({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        body["metadata"]["name"] = f"raw-{number}"
        bodies.append(body)
    async with bench.pods_made(namespace, workers) as made, asyncio.timeout(SLOW):
        started = time.monotonic()
        await at_once([bench.client.create(PODS, body, namespace) for body in bodies], PARALLEL)
        return await made - started


async def many_jobs(bench: Bench, directory: Path, kubeconfig: Path, run: str, jobs: int, numbers: Numbers) -> None:
    """Reconciles while this many jobs of two workers each are applied and started, and while they stand."""
    namespace = f"bench-{run}-jobs"
    await bench.namespace(namespace)
    async with operator(directory, kubeconfig) as running:

        async def ready() -> bool:
            return "ptj_leader 1.0" in await running.metrics()

        await until(ready, SLOW, 0.1)
        base = await running.metrics()
        bodies = [job(f"job-{number}", namespace, 2) for number in range(jobs)]
        await at_once([bench.client.create(JOBS, body, namespace) for body in bodies], 8)

        async def bound() -> bool:
            return await bench.count(namespace) == 2 * jobs and await bench.unbound(namespace) == 0

        await until(bound, SLOW, 0.5)
        page = await running.metrics()
        numbers.reconcile_p50_s = quantile(page, "ptj_reconcile_duration_seconds", 0.5, base)
        numbers.reconcile_p99_s = quantile(page, "ptj_reconcile_duration_seconds", 0.99, base)
    log.info("reconciles of %d jobs: p50 %.3f s, p99 %.3f s", jobs, numbers.reconcile_p50_s, numbers.reconcile_p99_s)
    await bench.clear(namespace)
    await delete_quietly(bench.client, NAMESPACES.path(None, namespace))


async def restart(bench: Bench, directory: Path, kubeconfig: Path, run: str, sizes: Sizes, numbers: Numbers) -> None:
    """An operator that starts while all these pods exist: until it has looked at every job and has nothing to do."""
    namespace = f"bench-{run}-restart"
    await bench.namespace(namespace)
    pods = sizes.restart_jobs * sizes.restart_workers
    async with operator(directory, kubeconfig):
        for number in range(sizes.restart_jobs):
            await bench.client.create(JOBS, job(f"big-{number}", namespace, sizes.restart_workers), namespace)

        async def created() -> bool:
            return await bench.count(namespace) >= pods

        await until(created, 2 * SLOW, 0.5)

        async def bound() -> bool:
            return await bench.unbound(namespace) == 0

        await until(bound, SLOW, 1.0)
    started = time.monotonic()
    async with operator(directory, kubeconfig) as running:
        numbers.restart_10k_s = await running.quiet(started, sizes.restart_jobs, SLOW) - started
        numbers.restart_10k_rss_mib = running.peak_mib()
    log.info("restart: %.1f s, %.0f MiB", numbers.restart_10k_s, numbers.restart_10k_rss_mib)
    await bench.clear(namespace)
    await delete_quietly(bench.client, NAMESPACES.path(None, namespace))


async def measure(kubeconfig: Path, directory: Path, sizes: Sizes, only: tuple[str, ...]) -> Numbers:
    """Everything that was asked for, on a cluster that is there."""
    numbers, run = Numbers(), uuid.uuid4().hex[:6]
    async with setup.connect(kubeconfig) as client:
        bench = Bench(client)
        if "gangs" in only:
            await bench.prepare(sizes.nodes("gangs"))
            await until(bench.nodes_accept_pods, SLOW, 0.5)
            for workers, rounds in sizes.gangs:
                await gangs(bench, directory, kubeconfig, run, workers, rounds, numbers)
        if "jobs" in only:
            await bench.prepare(sizes.nodes("jobs"))
            await until(bench.nodes_accept_pods, SLOW, 0.5)
            await many_jobs(bench, directory, kubeconfig, run, sizes.jobs, numbers)
        if "restart" in only:
            await bench.prepare(sizes.nodes("restart"))
            await until(bench.nodes_accept_pods, SLOW, 0.5)
            await restart(bench, directory, kubeconfig, run, sizes, numbers)
        await at_once(
            [delete_quietly(client, NODES.path(None, f"bench-{n:04d}")) for n in range(max(map(sizes.nodes, only)))]
        )
    return numbers


def show(numbers: Numbers, sizes: Sizes) -> None:
    """Prints both tables."""
    rows: list[list[Any]] = [
        [size, raw_s, numbers.created_s[size], numbers.created_s[size] / raw_s, numbers.bound_s[size]]
        for size, raw_s in numbers.raw_create_s.items()
    ]
    table("apply to a whole gang", ["pods", "raw create s", "created s", "created / raw", "bound s"], rows)
    rest = [
        [f"reconcile p50, {sizes.jobs} jobs (s)", numbers.reconcile_p50_s],
        [f"reconcile p99, {sizes.jobs} jobs (s)", numbers.reconcile_p99_s],
        [f"restart with {sizes.restart_jobs * sizes.restart_workers} pods (s)", numbers.restart_10k_s],
        ["memory of that restart at its peak (MiB)", numbers.restart_10k_rss_mib],
    ]
    table("many jobs and a restart", ["", "measured"], [row for row in rest if row[1] is not None])


async def start_and_measure(provider: str, kubeconfig: Path | None, sizes: Sizes, only: tuple[str, ...]) -> Numbers:
    """The same, on a cluster of its own unless one was given."""
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as name:
        directory = Path(name)
        if kubeconfig is not None:
            return await measure(kubeconfig, directory, sizes, only)
        async with Programs() as programs:
            home = directory / "cluster"
            home.mkdir()
            argv = [sys.executable, str(Path(__file__).with_name("_control_plane.py")), str(home), provider]
            program = await programs.start("control plane", argv, directory / "cluster.log")

            async def ready() -> bool:
                return (home / "ready").exists()

            await setup.wait_until_ready(ready, program)
            return await measure(home / "kubeconfig", directory, sizes, only)


@click.command()
@click.option("--provider", type=click.Choice(["embedded", "assets"]), default="embedded", show_default=True)
@click.option("--kubeconfig", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="An existing cluster.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the numbers here.")
@click.option("--quick", is_flag=True, help="Small sizes, for a first look.")
@click.option("--pods", multiple=True, type=int, help="Only gangs of this many pods. Repeat for several.")
@click.option("--only", multiple=True, type=click.Choice(["gangs", "jobs", "restart"]), help="Repeat for several.")
def main(
    provider: str,
    kubeconfig: Path | None,
    json_file: Path | None,
    quick: bool,
    pods: tuple[int, ...],
    only: tuple[str, ...],
) -> None:
    """Measure the operator at scale."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sizes = QUICK if quick else Sizes()
    if pods:
        sizes.gangs = tuple((number, 5) for number in pods)
    numbers = asyncio.run(start_and_measure(provider, kubeconfig, sizes, only or ("gangs", "jobs", "restart")))
    show(numbers, sizes)
    kept = {name: value for name, value in vars(numbers).items() if name != "reconcile_p50_s"}
    write_json(json_file, kept)


if __name__ == "__main__":
    main()
