"""Elastic jobs after any history: they use all nodes that they want, and none of them is smaller than it has to be."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.operator.test_settling import Settling, submitted
from tests.randomness import ASKED
from tests.randomness import runs as histories

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
            name: obj["spec"]["replicas"]
            for name, obj in self.cluster.jobs().items()
            if not obj["spec"].get("suspend")
        }
        usable = len(self.usable_nodes())
        sizes = {name: len(settled[name]["pods"]) for name in wanted}
        for name, size in sizes.items():
            assert size <= wanted[name]
            assert not size or settled[name]["world"][-1] == size, "a gang is whole, or it is not there"
            assert not size or settled[name]["replicas"] == size
            assert not size or settled[name]["Ready"] == ("True", "Running"), settled[name]
        assert sum(sizes.values()) == min(usable, sum(wanted.values())), f"{sizes} of {wanted} on {usable} nodes"
        self.cluster.check_steady()
        self.cluster.close()


class _ElasticSettling(ElasticSettling.TestCase):  # type: ignore[name-defined, misc]
    def setUp(self) -> None:
        # Hypothesis parses this file. In CPython 3.11 that fails if a finalizer of an earlier test runs meanwhile.
        gc.collect()
        super().setUp()


TestElasticSettling = pytest.mark.chaos(_ElasticSettling)
del _ElasticSettling  # else it would be collected under both names
TestElasticSettling.settings = settings(
    max_examples=histories(4),
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking would take longer than finding
    derandomize=not ASKED,
)
