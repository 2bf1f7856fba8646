"""A separate copy of a status equals it and shares nothing that can be changed."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from meshwright.api.status import (
    ElasticStatus,
    GoodputStatus,
    MeshStatus,
    ParallelTrainingJobStatus,
    PlacementStatus,
    PlanStatus,
    WorkerPlacement,
)


def status() -> ParallelTrainingJobStatus:
    """A status with models in models, lists and dicts."""
    worker = WorkerPlacement(worker=0, incarnation=1, pod="job-0-1", node="n0", ranks="0-1")
    placement = PlacementStatus(tensor=2, pipeline=1, data=1, workers=[worker], topology={"tensor": "node"})
    return ParallelTrainingJobStatus(
        mesh=MeshStatus(generation=3),
        plan=PlanStatus(tensor=2, pipeline=1, data=1, micro_batches=1, world_size=2, workers=1, reasons=["fits"]),
        placement=placement,
        elastic=ElasticStatus(next_placement=placement.model_copy(deep=True)),
        goodput=GoodputStatus(cause="Training"),
    )


def parts(value: Any) -> list[int]:
    """The identities of everything in a value that can be changed."""
    if isinstance(value, BaseModel):
        return [id(value)] + [part for one in value.__dict__.values() for part in parts(one)]
    if isinstance(value, dict):
        return [id(value)] + [part for one in value.values() for part in parts(one)]
    if isinstance(value, list):
        return [id(value)] + [part for one in value for part in parts(one)]
    return []


def test_a_separate_copy_is_equal_and_shares_nothing_that_can_be_changed() -> None:
    original = status()
    copy = original.separate()
    assert copy == original
    assert copy.wire() == original.model_copy(deep=True).wire() == original.wire()
    assert copy.model_fields_set == original.model_fields_set
    assert not set(parts(copy)) & set(parts(original))


def test_a_change_of_the_copy_leaves_the_original() -> None:
    original = status()
    before = original.wire()
    copy = original.separate()
    assert copy.mesh is not None
    assert copy.placement is not None
    copy.mesh.generation = 4
    copy.placement.workers.clear()
    copy.placement.topology = {}
    assert original.wire() == before != copy.wire()
