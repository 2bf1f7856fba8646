"""A pod counts as stuck by how long the operator has seen it being deleted, whatever its clock says."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from meshwright_operator.controller.pod_deletions import PodDeletions
from meshwright_operator.decide.stuck_pods import STUCK_SECONDS, is_stuck
from meshwright_operator.kube.pod_info import Pod, read_pod
from tests.operator.test_elastic import FOREVER, elastic
from tests.operator.world import NOW, PODS, World


def deleting(world: World) -> Pod:
    """A pod that should have ended just now."""
    pod = read_pod(next(iter(world.cluster.of("pods"))))
    assert pod is not None
    return replace(pod, deleting=True, deletion_deadline=NOW)


@pytest.mark.parametrize("ahead", [0.0, 3600.0, -3600.0])
async def test_time_counts_from_when_the_deletion_was_seen(ahead: float) -> None:
    world = World(1, nodes=2, work=FOREVER)
    world.submit(elastic("job", 1))
    await world.run(5)
    monotonic = 100.0
    deletions, pod = PodDeletions(lambda: monotonic), deleting(world)

    def stuck(seconds: float) -> bool:
        now = NOW + timedelta(seconds=seconds + ahead)
        return is_stuck(deletions.as_seen([pod], now)[0], now)

    assert not stuck(0.0)
    monotonic += STUCK_SECONDS - 1.0
    assert not stuck(STUCK_SECONDS - 1.0)
    monotonic += 2.0
    assert stuck(STUCK_SECONDS + 1.0) == (ahead >= 0)


@pytest.mark.parametrize("seed", range(3))
async def test_a_clock_that_is_ahead_starts_no_second_pod_of_a_worker(seed: int) -> None:
    world = World(seed, nodes=4, work=FOREVER)  # it checks that no worker has two live pods
    world.submit(elastic("job", 2))
    await world.run(20)
    world.operators[0].clock_error = timedelta(hours=1)
    pod = next(pod for pod in world.pods("job") if pod.worker == 1)
    world.crash(next(pod.name for pod in world.pods("job") if pod.worker == 0))
    await world.cluster.delete(f"{PODS}/{pod.name}", pod.uid)
    await world.run(60)
    assert world.true("job", "Ready")
