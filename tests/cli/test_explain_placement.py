"""What `meshwright explain` says about the groups of a placement."""

from __future__ import annotations

import pytest

from meshwright.api.status import PlacementStatus, WorkerPlacement
from meshwright_cli.client.objects import Job
from meshwright_cli.explain.placed import placed_facts
from tests.cli.live_server import job, running


def crossings(domains: list[str], **counts: int) -> str:
    """What is said about two tensor-parallel ranks each, with one rank in each worker."""
    workers = [
        WorkerPlacement(worker=index, incarnation=0, pod=f"lm-w{index}-0", node="n", ranks=str(index), domain=domain)
        for index, domain in enumerate(domains)
    ]
    placement = PlacementStatus(workers=workers, tensor=2, **counts)
    status = {**running(), "placement": placement.model_dump(by_alias=True)}
    return dict(placed_facts(Job({**job("lm"), "status": status})))["Crossings"]


@pytest.mark.parametrize(
    ("domains", "counts", "text"),
    [
        (["a", "a"], {}, "none: no tensor-parallel group leaves its NVLink domain, and no replica its rack"),
        (["a", "b"], {"straddling_tensor_groups": 1}, "1 tensor-parallel group leaves its NVLink domain"),
        (
            ["a", "a"],
            {"straddling_tensor_groups": 1},
            "1 tensor-parallel group spans several pods of a node, without NVLink between them",
        ),
        (
            ["a", "b", "c", "c", "c", "d"],
            {"straddling_tensor_groups": 3, "straddling_replicas": 1},
            "2 tensor-parallel groups leave their NVLink domain, 1 tensor-parallel group spans several pods of a node, "
            "without NVLink between them, 1 replica leaves its rack",
        ),
    ],
)
def test_groups_that_straddle_are_named_by_what_they_cross(
    domains: list[str], counts: dict[str, int], text: str
) -> None:
    assert crossings(domains, **counts) == text
