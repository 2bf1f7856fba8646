"""Upgrades and rollbacks of the operator: a version with other defaults and fields restarts nobody."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.workers import WorkersSpec
from meshwright.rules.spec_defaults import SCHEME
from tests.operator.support import JOBS, job
from tests.operator.world import World

GRACE = "workers.terminationGracePeriodSeconds"


@contextmanager
def later_build(monkeypatch: pytest.MonkeyPatch, **defaults: Any) -> Iterator[None]:
    """The operator's code with other defaults of the workers' fields."""

    def rebuild() -> None:
        for model in (WorkersSpec, ParallelTrainingJobSpec):
            model.model_rebuild(force=True)

    fields = WorkersSpec.model_fields
    before = {name: fields[name].default for name in defaults}
    tables = importlib.import_module("meshwright.rules.spec_defaults")
    revision = importlib.import_module("meshwright.rules.revision")
    applied_spec = importlib.import_module("meshwright_operator.decide.applied_spec")
    with monkeypatch.context() as patch:
        scheme, known = tables.SCHEME + 1, tables.DEFAULTS
        changed = {f"workers.{fields[name].alias}": value for name, value in defaults.items()}
        later = {**tables.DEFAULTS[tables.SCHEME], **changed}
        for module in (tables, revision, applied_spec):
            patch.setattr(module, "DEFAULTS", {**known, scheme: later})
            patch.setattr(module, "SCHEME", scheme)
        patch.setattr(revision, "NO_RESTART", {**tables.NO_RESTART, scheme: tables.NO_RESTART[scheme - 1]})
        patch.setattr(applied_spec.revision_of, "__defaults__", (scheme,))
        for function in (revision.revision_of_fields, revision.restarting_fields, revision.with_defaults):
            patch.setattr(function, "__defaults__", (scheme,))
        for name, value in defaults.items():
            fields[name].default = value
        rebuild()
        revision._tree.cache_clear()
        applied_spec._decode.cache_clear()
        try:
            yield
        finally:
            for name, value in before.items():
                fields[name].default = value
            rebuild()
            revision._tree.cache_clear()
            applied_spec._decode.cache_clear()


def submitted(name: str = "train", **workers: Any) -> dict[str, Any]:
    """A job as an API server stores it: with the defaults of the day."""
    base = job(name, training={"steps": 10**6, "globalBatchSize": 24, "sequenceLength": 64})
    base["spec"]["workers"] |= {"terminationGracePeriodSeconds": 60, **workers}
    return base


def change(world: World, **workers: Any) -> None:
    """The object has these fields now, in a new version."""
    new = copy.deepcopy(world.cluster.objects[f"{JOBS}/train"])
    new["spec"]["workers"] |= workers
    world.cluster.update(f"{JOBS}/train", new)


def restart(world: World) -> None:
    """The operator's process is replaced: by the code as it is now."""
    world.cluster.watchers.clear()
    world.operators = [world.operator()]


async def running_world() -> World:
    world = World(seed=1, nodes=6, work=1e9)
    world.submit(submitted())
    await world.run(30)
    assert world.true("train", "Ready")
    return world


def pods(world: World) -> dict[str, str]:
    return {pod.name: pod.revision for pod in world.pods()}


@pytest.mark.parametrize("stored", [True, False], ids=["default in the object", "default left out"])
async def test_a_changed_default_restarts_nobody(monkeypatch: pytest.MonkeyPatch, stored: bool) -> None:
    world = await running_world()
    if not stored:
        del world.cluster.objects[f"{JOBS}/train"]["spec"]["workers"]["terminationGracePeriodSeconds"]
    before, status = pods(world), copy.deepcopy(world.status("train"))
    with later_build(monkeypatch, termination_grace_period_seconds=90):
        restart(world)
        await world.run(60)
        assert pods(world) == before
        assert world.status("train")["mesh"] == status["mesh"]
        assert world.status("train")["appliedSpec"] == status["appliedSpec"]
        # A replacement is made as its peers were: with the default of the day.
        world.crash(next(iter(before)))
        await world.run(60)
        assert world.true("train", "Ready")
        specs = [obj["spec"] for obj in world.cluster.of("pods")]
        assert {spec["terminationGracePeriodSeconds"] for spec in specs} == {60}
        assert set(pods(world).values()) == set(before.values())


async def test_a_new_field_that_the_api_server_adds_restarts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """`imagePullPolicy` as if it were new: it gets a default, and a later CRD adds it to stored objects."""
    world = await running_world()
    before = pods(world)
    with later_build(monkeypatch, image_pull_policy="Always"):
        change(world, imagePullPolicy="Always")
        restart(world)
        await world.run(60)
        assert pods(world) == before
        # An edit restarts all of them, with the defaults of today.
        change(world, image="other")
        await world.run(60)
        assert world.true("train", "Ready")
        assert {revision.partition("-")[0] for revision in pods(world).values()} == {str(SCHEME + 1)}
        assert json.loads(world.status("train")["appliedSpec"])["scheme"] == SCHEME + 1
        assert {obj["spec"]["containers"][0]["imagePullPolicy"] for obj in world.cluster.of("pods")} == {"Always"}


async def test_a_spec_that_is_too_large_for_status_restarts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(seed=1, nodes=6, work=1e9)
    env = [{"name": f"V{n}", "value": "x" * 4096} for n in range(64)]
    world.submit(submitted(env=env))
    await world.run(30)
    assert world.status("train")["appliedSpec"] == ""
    before = pods(world)
    with later_build(monkeypatch, termination_grace_period_seconds=90):
        restart(world)
        await world.run(60)
        assert pods(world) == before
