"""Elastic jobs after any history: they use all nodes that they want, and none of them is smaller than it has to be."""

from __future__ import annotations

from typing import Any

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


TestElasticSettling = chaos_test(ElasticSettling, 4)
