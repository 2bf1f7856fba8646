"""A run that goes back to an older checkpoint removes the later ones, and never the last one that is intact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.checkpoint import Retention
from meshwright_worker.checkpoint.loader import newest_of_all
from meshwright_worker.checkpoint.manager import CheckpointManager
from meshwright_worker.checkpoint.manifest import Manifest, TrainingState, check_files, read_manifest
from meshwright_worker.checkpoint.object_store import ObjectDirectory
from meshwright_worker.checkpoint.store import CheckpointStore, Tier, open_store
from meshwright_worker.distributed.mesh import Mesh
from tests.worker.checkpoint.saving import save_alone
from tests.worker.checkpoint.test_checkpoint_files import manifest_at
from tests.worker.checkpoint.test_killed_saves import mesh

__all__ = ["mesh"]


def manager_of(stores: list[CheckpointStore], mesh: Mesh) -> CheckpointManager:
    found = object.__new__(CheckpointManager)
    found._tiers, found._mesh = [Tier(store, Retention(9)) for store in stores], mesh
    found.report = lambda *, wait=False: []  # type: ignore[method-assign]
    events: Any = None
    found._events = events
    return found


def save(store: CheckpointStore, step: int) -> None:
    store.prepare(step)
    tensors = {"weight": torch.arange(4.0) + step}
    save_alone(
        tensors, store.sink(step), lambda files: store.commit(manifest_at(step).model_copy(update={"files": files}))
    )


def damage(store: CheckpointStore, step: int) -> None:
    path = Path(str(store.files(step)).removeprefix("file://")) / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def changed(state: TrainingState) -> TrainingState:
    return state.model_copy(update={"samples": state.samples + 1000})


@pytest.fixture(params=["volume", "store", "both"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> list[CheckpointStore]:
    """With the checkpoints of steps 10, 20, 30 and 40, of the generation that goes back."""
    places = {"volume": [str(tmp_path / "volume")], "store": [f"file://{tmp_path}/store"]}
    found = [open_store(place, 3) for place in places.get(request.param) or [*places["volume"], *places["store"]]]
    for store in found:
        for step in (10, 20, 30, 40):
            save(store, step)
    return found


def test_the_state_of_the_older_one_changes_and_its_files_stay(stores: list[CheckpointStore], mesh: Mesh) -> None:
    before = [store.files(20).read("rank-00000.safetensors") for store in stores]
    state = manager_of(stores, mesh).go_back(45, 20, changed)
    assert state is not None
    assert (state.step, state.samples) == (20, 1160)
    for store, content in zip(stores, before, strict=True):
        assert store.steps() == [20, 10]
        manifest = read_manifest(store.files(20))
        assert manifest.state == state
        check_files(store.files(20), manifest)
        assert store.files(20).read("rank-00000.safetensors") == content
        assert read_manifest(store.files(10)).state.samples == 80


def test_later_checkpoints_stay_until_an_older_one_is_found_intact(stores: list[CheckpointStore], mesh: Mesh) -> None:
    for store in stores:
        damage(store, 20)
        damage(store, 10)
    state = manager_of(stores, mesh).go_back(45, 20, changed)
    assert state is not None
    assert state.step == 30, "the oldest one that is left"
    assert all(store.steps() == [30] for store in stores)


def test_without_an_intact_one_nothing_is_removed(stores: list[CheckpointStore], mesh: Mesh) -> None:
    for store in stores:
        for step in store.steps():
            damage(store, step)
    assert manager_of(stores, mesh).go_back(45, 20, changed) is None
    for store in stores:
        found = store.unfinished()
        assert found == dict.fromkeys((10, 20, 30, 40), "damaged")


def test_a_kill_while_it_goes_back_leaves_the_older_one(
    stores: list[CheckpointStore], mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint was saved again once, below the name that it had in the store: first its objects were removed."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(stores[0]), "amend", killed)
    with pytest.raises(KeyboardInterrupt):
        manager_of(stores, mesh).go_back(45, 20, changed)
    for store in stores:
        check_files(store.files(20), read_manifest(store.files(20)))
        assert store.steps() == [20, 10]


def test_a_damaged_copy_on_one_tier_is_not_the_one_to_go_back_to(tmp_path: Path, mesh: Mesh) -> None:
    volume, store = open_store(str(tmp_path / "volume"), 3), open_store(f"file://{tmp_path}/store", 3)
    assert isinstance(store, ObjectDirectory)
    for one in (volume, store):
        save(one, 10)
        save(one, 20)
    damage(volume, 10)
    state = manager_of([volume, store], mesh).go_back(25, 15, changed)
    assert state is not None
    assert state.step == 10
    assert (volume.steps(), store.steps()) == ([], [10])
    assert read_manifest(store.files(10)).state == state


def test_of_the_same_step_on_two_tiers_the_faster_one_is_loaded(tmp_path: Path, mesh: Mesh) -> None:
    volume, store = open_store(str(tmp_path / "volume"), 3), open_store(f"file://{tmp_path}/store", 3)
    for one in (volume, store):
        save(one, 10)
    for tiers in ([volume, store], [store, volume]):
        found = newest_of_all(tiers, mesh, Manifest)
        assert found is not None
        assert found[0] is tiers[0]
    save(store, 20)
    newest = newest_of_all([volume, store], mesh, Manifest)
    assert newest is not None
    assert newest[0] is store
