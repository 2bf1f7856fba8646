"""Elastic jobs after any history: they use all nodes that they want, and none of them is smaller than it has to be."""

from __future__ import annotations

from typing import Any

import pytest

from tests.operator.support import job
from tests.operator.test_settling import Settling, chaos_test, submitted

SETTLES_WITHIN = 4000.0
QUIET = 700.0
"""Longer than the pause after some growths that failed."""


def elastic(name: str, workers: int) -> dict[str, Any]:
    """A job that runs with any number of replicas up to the wanted one."""
    body = submitted(name, workers)
    body["spec"] |= {"elastic": {"pauseSeconds": 10}, "checkpoint": {"claimName": "shared"}}
    return body


class ElasticSettling(Settling):
    """Everything that may happen to two elastic jobs on five nodes."""

    submitted = staticmethod(elastic)

    def teardown(self) -> None:
        self.end_faults()
        settled = self.cluster.settle(SETTLES_WITHIN, QUIET)
        wanted = {
            name: obj["spec"]["replicas"] for name, obj in self.cluster.jobs().items() if not obj["spec"].get("suspend")
        }
        usable = {obj["metadata"]["name"] for obj in self.usable_nodes()}
        sizes = {name: len(settled[name]["pods"]) for name in wanted}
        # A job of the smallest size stays on its cordoned node until another one is free.
        live = [pod for pod in self.world.pods() if pod.job in wanted and not pod.terminal]
        staying = {pod.job for pod in live if pod.node not in usable}
        assert all(sizes[name] == 1 for name in staying), f"{staying} with sizes {sizes} stay on cordoned nodes"
        for name, size in sizes.items():
            assert size <= wanted[name]
            assert not size or settled[name]["world"][-1] == size, "a gang is whole, or it is not there"
            assert not size or settled[name]["replicas"] == size
            assert not size or settled[name]["Ready"] == ("True", "Running"), settled[name]
        moved = sum(size for name, size in sizes.items() if name not in staying)
        expected = len(usable) if staying else min(len(usable), sum(wanted.values()))
        assert moved == expected, f"{sizes} of {wanted} on {usable}, and {staying} stay"
        self.cluster.check_steady()
        self.cluster.close()


def replanning(name: str, replicas: int) -> dict[str, Any]:
    """A job whose replicas take two nodes each. On one node, it runs after it was planned anew."""
    return job(
        name,
        replicas=replicas,
        parallelism={"tensor": 2, "pipeline": 2, "microBatches": 2},
        training={"steps": 10**6, "globalBatchSize": 96, "sequenceLength": 64},
        recovery={"maxRestarts": 100000},
        elastic={"replan": True, "pauseSeconds": 10},
        checkpoint={"claimName": "shared"},
    )


class ReplanSettling(Settling):
    """Everything that may happen to two jobs that are planned anew when no replica of two nodes is left."""

    submitted = staticmethod(replanning)

    def teardown(self) -> None:
        self.end_faults()
        settled = self.cluster.settle(SETTLES_WITHIN, QUIET)
        wanted = {
            name: obj["spec"]["replicas"] for name, obj in self.cluster.jobs().items() if not obj["spec"].get("suspend")
        }
        sizes = {name: len(settled[name]["pods"]) for name in wanted}
        free = len(self.usable_nodes()) - sum(sizes.values())
        for name, size in sizes.items():
            allowed = [1, *(2 * replicas for replicas in range(1, wanted[name] + 1))]
            assert size == 0 or size in allowed
            assert not any(size < other <= size + free for other in allowed), f"{sizes} of {wanted}, and {free} free"
            if size:
                pipeline, replicas = (1, 1) if size == 1 else (2, size // 2)
                assert settled[name]["world"] == [2, pipeline, replicas, 2 * size, size]
                assert settled[name]["Ready"] == ("True", "Running"), settled[name]
        self.cluster.check_steady()
        self.cluster.close()


TestElasticSettling = chaos_test(ElasticSettling, 4)
TestReplanSettling = pytest.mark.long(chaos_test(ReplanSettling, 4))
