"""The stages of a job's life, as objects that the operator wrote in virtual time."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.operator.support import node
from tests.operator.test_elastic import edit, elastic, set_ready
from tests.operator.test_gang_races import small
from tests.operator.world import JOBS, PODS, World

HEALTHY, PROGRESSING, DEGRADED, SUSPENDED = "Healthy", "Progressing", "Degraded", "Suspended"


@dataclass(frozen=True, slots=True)
class Stage:
    """A job at one stage, and what tools must make of it."""

    name: str
    job: Mapping[str, Any]
    argocd: str
    """Health of the resource for Argo CD."""
    ended: bool | None = None
    """Whether the job completed (True) or failed or cannot go on (False). None while it may still go on."""


def snapshot(world: World, job: str) -> Mapping[str, Any]:
    """The job as the API server has it."""
    return copy.deepcopy(dict(world.cluster.objects[f"{JOBS}/{job}"]))


async def stages() -> list[Stage]:
    """At least twelve stages, in different worlds."""
    return [*await _ordinary(), *await _waiting(), *await _elastic(), *await _ends(), *await _faulty()]


async def _ordinary() -> list[Stage]:
    world = World(1, nodes=4, work=10**6)
    body = small("job", 2)
    applied = {**copy.deepcopy(body), "status": {"observedGeneration": -1}}
    applied["metadata"]["generation"] = 1
    found = [Stage("applied", applied, PROGRESSING)]
    world.submit(body)
    await world.run(2)
    found.append(Stage("starts", snapshot(world, "job"), PROGRESSING))
    await world.run(40)
    found.append(Stage("trains", snapshot(world, "job"), HEALTHY))
    await world.evict(f"{world.pods('job')[0].name}")
    await world.run(3)
    found.append(Stage("restarts", snapshot(world, "job"), PROGRESSING))
    await world.run(60)
    edited = dict(snapshot(world, "job"))
    edited["metadata"] = {**edited["metadata"], "generation": edited["metadata"]["generation"] + 1}
    found.append(Stage("edit not read yet", edited, PROGRESSING))
    edit(world, "job", suspend=True)
    await world.run(60)
    found.append(Stage("suspended", snapshot(world, "job"), SUSPENDED))
    edit(world, "job", suspend=False)
    await world.run(3)
    found.append(Stage("resumes", snapshot(world, "job"), PROGRESSING))
    await world.run(60)
    edit(world, "job", replicas=6)
    await world.run(10)
    found.append(Stage("edit does not fit", snapshot(world, "job"), PROGRESSING))
    deleted = copy.deepcopy(dict(snapshot(world, "job")))
    deleted["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    found.append(Stage("being deleted", deleted, PROGRESSING))
    return found


async def _waiting() -> list[Stage]:
    world = World(2, nodes=1, work=10**6)
    world.submit(small("waits", 3))
    await world.run(30)
    return [Stage("queued", snapshot(world, "waits"), PROGRESSING)]


async def _elastic() -> list[Stage]:
    world = World(3, nodes=2, gpus=2, work=10**6)
    world.submit(elastic("job", 2, replacementSeconds=1))
    await world.run(60)
    set_ready(world, "n1", ready=False)
    await world.run(120)
    found = [Stage("trains with fewer replicas", snapshot(world, "job"), _by_ready(world, "job"))]
    world.nodes["n2"] = node("n2", "r0")
    for operator in world.operators:
        operator.cache.put_node(world.nodes["n2"])
    for _ in range(200):
        await world.run(1)
        if world.true("job", "Rescaling"):
            found.append(Stage("rescales", snapshot(world, "job"), _by_ready(world, "job")))
            break
    await world.run(120)
    found.append(Stage("trains with all replicas", snapshot(world, "job"), HEALTHY))
    return found


def _by_ready(world: World, job: str) -> str:
    """An elastic job may count as ready while it is smaller than wanted: kstatus decides."""
    return HEALTHY if world.true(job, "Ready") and not world.true(job, "Reconciling") else PROGRESSING


async def _ends() -> list[Stage]:
    world = World(4, nodes=2, work=20)
    world.submit(small("job", 2))
    await world.run(200)
    found = [Stage("complete", snapshot(world, "job"), HEALTHY, ended=True)]
    world = World(5, nodes=2, work=10**6)
    world.submit(small("job", 2, activeDeadlineSeconds=30))
    await world.run(120)
    return [*found, Stage("failed", snapshot(world, "job"), DEGRADED, ended=False)]


async def _faulty() -> list[Stage]:
    world = World(6, nodes=2, work=10**6)
    body = small("job", 2)
    body["spec"]["training"]["globalBatchSize"] = 23
    world.submit(body)
    await world.run(20)
    found = [Stage("invalid", snapshot(world, "job"), DEGRADED, ended=False)]
    world = World(7, nodes=2, work=10**6)
    world.broken_image = True
    world.submit(small("job", 2))
    await world.run(60)
    assert [path for path in world.cluster.objects if path.startswith(PODS)]
    return [*found, Stage("image cannot be pulled", snapshot(world, "job"), PROGRESSING)]
