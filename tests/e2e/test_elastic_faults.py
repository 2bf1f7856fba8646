"""One elastic job with real ranks trains through random faults, one after the other, and uses every sample once.

The faults are those of `elastic_faults.py`. After some of them the job settles; others follow at once. A few faults
with the long tests; `make chaos` says how many otherwise.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from meshwright.api.conditions import COMPLETE, FAILED, is_true
from meshwright.api.parsing import parse_spec
from meshwright.api.status import ParallelTrainingJobStatus
from meshwright_cli.child_processes import Programs
from meshwright_cli.demo import setup
from meshwright_local.kube.resources import EVENTS, JOBS, NODES, PODS, SECRETS, SERVICES
from meshwright_worker.expected_digest import expected_digest
from tests.e2e.elastic_faults import LEASE, Faults
from tests.e2e.local_stack import (
    NAMESPACE,
    Stage,
    eventually,
    merged,
    operator_ports,
    operators_kubeconfig,
    processes,
    tiny,
)
from tests.e2e.rank_watch import RankWatch
from tests.randomness import first_seed, runs

FAULTS = runs(8)
SEED = first_seed(11)
NAME = "chaos"
REPLICA = {"tensor": 1, "pipeline": 2, "microBatches": 2}
SETTLES = 0.35
"""Part of the faults after which the job settles before the next one."""
SHORTEST, LONGEST = 0.2, 4.0
"""Seconds between the other faults."""
NOTICED_SECONDS = 1.5
"""How long to wait before the job may count as settled: a fault is not in its status at once."""
LAST_STEPS = 200
QUIET_SECONDS = 12
COUNTED = ("rank killed", "agent killed", "node rebooted")
"""Faults of the job's own processes, as far as the operator can see. Others must not count toward the limit."""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """A cluster of five nodes with one GPU each: two replicas of two nodes, and a spare node."""
    directory = tmp_path_factory.mktemp("faults")
    async with Programs() as programs:
        shape = setup.Shape(racks=1, nodes_per_rack=5, gpus_per_node=1)
        kubeconfig = await setup.start_cluster(programs, directory, shape)
        async with setup.connect(kubeconfig) as client:
            await setup.install_crd(client)
            restricted = await operators_kubeconfig(client, directory)
            with operator_ports() as ports:
                operator = await setup.start_operator(programs, directory, restricted, ports, LEASE)
                yield Stage(directory, kubeconfig, client, programs, operator, ports, restricted)


def in_memory(directory: Path) -> dict[str, Any]:
    """Ranks keep their state where they can, and checkpoints are on the claim and in a store, at other intervals."""
    return {
        "recovery": {"inMemory": True},
        "checkpoint": {"everySteps": 100, "uri": f"file://{directory}/store", "store": {"everySteps": 300}},
    }


def continues() -> dict[str, Any]:
    """Replicas go on without a lost one, which joins them again. No other layout is planned."""
    return {
        "recovery": {"inMemory": True, "onReplicaLoss": "Continue"},
        "elastic": {"replan": False},
        "parallelism": {"zeroStage": 0},
    }


def job(changes: dict[str, Any]) -> list[dict[str, Any]]:
    """A job of one or two replicas of two ranks, which trains until `finish`."""
    fields = merged(
        {
            "replicas": 2,
            "elastic": {"maxReplicas": 2, "replacementSeconds": 2, "pauseSeconds": 10, "replan": True},
            "parallelism": REPLICA,
            "workers": {"gpusPerWorker": 1, "terminationGracePeriodSeconds": 10},
            "training": {"steps": 10_000_000},
            "checkpoint": {"everySteps": 100},
            "recovery": {"maxRestarts": 1000},
        },
        changes,
    )
    return tiny(NAME, **fields)


async def finish(stage: Stage, faults: Faults) -> ParallelTrainingJobStatus:
    """Let the job end soon; check that every sample was used once, and return its last status."""
    steps = await faults.step() + LAST_STEPS
    await stage.client.patch(JOBS, NAME, {"spec": {"training": {"steps": steps}}}, NAMESPACE)
    status = await stage.complete(NAME)
    assert not is_true(status.conditions, FAILED)
    saved = await stage.saved(NAME)
    spec = parse_spec(await stage.client.get(JOBS, NAME, NAMESPACE))
    assert spec.data is not None
    assert spec.training is not None
    assert saved["step"] >= steps
    assert saved["samples"] == saved["step"] * spec.training.global_batch_size
    expected = await asyncio.to_thread(expected_digest, spec.data, spec.training, saved["step"])
    assert saved["digest"] == expected
    return status


def check_restarts(status: ParallelTrainingJobStatus, faults: Faults) -> None:
    """Restarts are counted, and only failures of the job's own processes count toward the limit."""
    assert status.mesh is not None
    assert status.restart_count == sum(restart.count for restart in status.restarts)
    assert status.restart_count > 0
    most = sum(faults.done[kind] for kind in COUNTED)
    assert status.restarts_toward_limit <= most, [(r.cause, r.count) for r in status.restarts]


async def check_time(stage: Stage, status: ParallelTrainingJobStatus) -> tuple[float, dict[str, float]]:
    """Booked seconds add up to the life of the job within 1%. Return its seconds, and those of each cause."""
    created = (await stage.client.get(JOBS, NAME, NAMESPACE))["metadata"]["creationTimestamp"]
    ended = next(c.last_transition_time for c in status.conditions if c.type == COMPLETE)
    wall = (moment(ended) - moment(created)).total_seconds()
    assert status.goodput is not None
    booked = {entry.cause: entry.milliseconds / 1000 for entry in status.goodput.booked}
    assert sum(booked.values()) == pytest.approx(wall, rel=0.01, abs=1.5), booked
    return wall, booked


def moment(text: str | None) -> datetime:
    """A time of the API."""
    assert text is not None
    return datetime.fromisoformat(text)


async def check_steady(stage: Stage, uid: str) -> None:
    """The finished job has no process, and the operator writes nothing about it."""

    async def versions() -> dict[str, str]:
        found = [
            item
            for kind in (JOBS, PODS, SERVICES, SECRETS)
            for item in (await stage.client.list(kind, NAMESPACE)).items
        ]
        events = [
            e
            for e in (await stage.client.list(EVENTS, NAMESPACE)).items
            if e.get("involvedObject", {}).get("name") == NAME
        ]
        return {item["metadata"]["uid"]: item["metadata"]["resourceVersion"] for item in found + events}

    async def no_process() -> bool:
        return not processes(uid)

    await eventually("no process is left", no_process)
    await asyncio.sleep(2)
    before = await versions()
    await asyncio.sleep(QUIET_SECONDS)
    assert await versions() == before
    page = await stage.scrape(f"{stage.ports.metrics_url}/metrics")
    assert "ptj_workqueue_depth 0.0" in page


CHOSEN = {
    "restarts": {3: "all nodes but one removed"},
    "in memory": {0: "rank killed", 3: "all nodes but one removed"},
    "continues": {},
}
"""Faults that are not drawn: at least one recovery in memory and one plan for what is left, in short runs too."""


async def one_fault(faults: Faults, number: int, kind: str | None, begin: float) -> None:
    """Do a fault, one that is drawn if not `kind`, and wait for as long as chance has it."""
    settles = kind is not None
    if kind is None:
        kind = await faults.draw()
        settles = faults.chance.random() < SETTLES
    else:
        await faults.undo()
        await faults.do(kind)
    print(f"{time.monotonic() - begin:7.1f} s  {number:3} {kind}", flush=True)
    if settles:
        await asyncio.sleep(NOTICED_SECONDS)
        print(f"          settled in {await faults.settled():.1f} s, {len(faults.usable())} nodes", flush=True)
    else:
        await asyncio.sleep(faults.chance.uniform(SHORTEST, LONGEST))


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.timeout(600 + 60 * FAULTS)
@pytest.mark.parametrize("recovery", CHOSEN)
async def test_an_elastic_job_survives_random_faults(stage: Stage, recovery: str) -> None:
    chance, begin = random.Random(SEED), time.monotonic()
    ranks = RankWatch(stage.directory / "cluster")
    watching = asyncio.create_task(ranks.run())
    changes = {"restarts": {}, "in memory": in_memory(stage.directory), "continues": continues()}[recovery]
    await stage.apply(job(changes))
    uid = (await stage.client.get(JOBS, NAME, NAMESPACE))["metadata"]["uid"]
    nodes = sorted(node["metadata"]["name"] for node in (await stage.client.list(NODES)).items)
    replans = recovery != "continues"
    faults = Faults(stage, NAME, nodes, chance, ranks, wanted=2, least=1 if replans else 2)
    print(f"seed {SEED}, {FAULTS} faults")
    try:
        await faults.settled()
        for number in range(FAULTS):
            await one_fault(faults, number, CHOSEN[recovery].get(number), begin)
        await faults.undo()
        await faults.settled()
        status = await finish(stage, faults)
        if watching.done():
            await watching  # its error
        ranks.look()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert not {key: n for key, n in ranks.most_at_once.items() if n > 1}, "a rank had two processes at once"
    assert not ranks.started_twice(), "a rank was started twice in a generation"
    check_restarts(status, faults)
    wall, booked = await check_time(stage, status)
    await check_steady(stage, uid)
    recovered = sum(
        event.get("count", 1)
        for event in (await stage.client.list(EVENTS, NAMESPACE)).items
        if event["reason"] == "RecoveringInMemory"
    )
    if replans:  # otherwise the faults that are drawn may all be ones after which ranks restart
        assert (recovered > 0) == (recovery == "in memory")
    await stage.delete(NAME)
    print(f"{recovered} recoveries in memory")
    report(status, faults, ranks, wall, booked, time.monotonic() - begin)


def report(
    status: ParallelTrainingJobStatus,
    faults: Faults,
    ranks: RankWatch,
    wall: float,
    booked: dict[str, float],
    seconds: float,
) -> None:
    """Print what happened."""
    assert status.mesh is not None
    print(f"seed {SEED}: {sum(faults.done.values())} faults in {seconds:.0f} s; {status.step} steps")
    print("faults:", dict(sorted(faults.done.items())))
    print(f"{status.mesh.generation} generations, {len(ranks.started)} rank processes")
    print("restarts:", {r.cause: r.count for r in status.restarts}, "toward the limit:", status.restarts_toward_limit)
    print(f"{wall:.0f} s booked as", {cause: round(value, 1) for cause, value in booked.items()})
