"""Which checkpoints have the lowest evaluation loss: what a manifest records, what stays, and what is saved."""

from __future__ import annotations

import json
import math
import shutil
import threading
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fsspec.core import url_to_fs
from hypothesis import given
from hypothesis import strategies as st

from meshwright.api.checkpoint import CheckpointSpec, Interval, Retention, StoreSpec
from meshwright.protocol.messages import FailureHistory
from meshwright_worker.checkpoint import schedule as schedule_module
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.files import LocalFiles
from meshwright_worker.checkpoint.full_tensors import find_checkpoint
from meshwright_worker.checkpoint.manifest import (
    MANIFEST,
    BaseManifest,
    encode_manifest,
    evaluation_loss_in,
    read_evaluation_loss,
    read_manifest,
)
from meshwright_worker.checkpoint.ranking import is_among_best, ranked
from meshwright_worker.checkpoint.retention import first_of_each, removable
from meshwright_worker.checkpoint.schedule import PATIENCE_SECONDS, CheckpointSchedule
from meshwright_worker.checkpoint.store import CheckpointStore, Tier, open_store
from tests.worker.checkpoint.test_checkpoint_files import manifest_at

LOSSES = st.one_of(st.none(), st.just(math.nan), st.just(math.inf), st.sampled_from([1.0, 1.5, 2.0]), st.floats(0, 9))


def evaluated(step: int, loss: float | None) -> BaseManifest:
    manifest = manifest_at(step)
    return manifest.model_copy(update={"state": manifest.state.model_copy(update={"evaluation_loss": loss})})


def save(store: CheckpointStore, step: int, loss: float | None = None) -> None:
    store.prepare(step)
    store.sink(step).write("file", b"content")
    store.commit(evaluated(step, loss))


@pytest.fixture(params=["directory", "object store"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    return open_store(str(tmp_path / "run") if request.param == "directory" else f"memory://{uuid.uuid4().hex}/run")


def test_of_equal_losses_the_earlier_step_is_better_and_what_is_no_number_is_not_ranked() -> None:
    losses = {9: 1.0, 3: 1.0, 6: 0.5, 1: math.nan, 2: None, 4: -math.inf, 5: math.inf}
    assert ranked(losses) == [6, 3, 9]
    assert is_among_best(10, 0.9, losses, 2)
    assert not is_among_best(10, 1.0, losses, 2), "a tie: the earlier one stays"
    assert is_among_best(10, 1.0, losses, 4), "there are fewer than four"
    assert not is_among_best(10, math.nan, {}, 4)


@given(
    losses=st.dictionaries(st.integers(1, 60), LOSSES, max_size=20),
    newest=st.integers(1, 4),
    best=st.integers(1, 4),
    every=st.one_of(st.none(), st.integers(2, 20)),
    seconds=st.one_of(st.none(), st.integers(1, 30)),
)
def test_nothing_that_is_among_the_best_is_removed_and_nothing_else_stays_for_it(
    losses: dict[int, float | None], newest: int, best: int, every: int | None, seconds: int | None
) -> None:
    retention = Retention(newest, seconds, every, best)
    now = max(losses, default=0) + 1.0
    gone = set(removable(losses, retention, now, float, losses.get))
    before = set(removable(losses, replace(retention, best=None), now, float, losses.get))
    numbers = sorted(loss for loss in losses.values() if loss is not None and math.isfinite(loss))
    # Without `ranked`: a step is among the best if fewer than that many are better.
    among = {
        step
        for step, loss in losses.items()
        if loss is not None
        and math.isfinite(loss)
        and sum(other < loss for other in numbers)
        + sum(losses[earlier] == loss for earlier in losses if earlier < step)
        < best
    }
    assert gone == before - among
    assert len(among) == min(best, len(numbers))


@given(losses=st.lists(LOSSES, max_size=25), newest=st.integers(1, 3), best=st.integers(1, 3))
def test_one_save_after_the_other_leaves_the_best_of_all(losses: list[float | None], newest: int, best: int) -> None:
    """Retention never needs what it has removed: the best of what is left are the best of all."""
    every = dict(enumerate(losses, 1))
    left: set[int] = set()
    for step in every:
        left.add(step)
        left -= set(removable(left, Retention(newest, best=best), 0.0, lambda _: None, every.get))
    assert left == {*ranked(every)[:best], *sorted(every)[-newest:]}


def test_without_keep_best_no_manifest_is_read() -> None:
    def unread(step: int) -> float | None:
        raise AssertionError(step)

    assert removable([1, 2, 3], Retention(1), 0.0, lambda _: None, unread) == [2, 1]
    assert removable([3], Retention(1, best=1), 0.0, lambda _: None, unread) == [], "nothing is old"


def test_retention_forever_and_by_loss_add_up() -> None:
    losses = {step: abs(step - 30) for step in range(10, 100, 10)}
    gone = removable(losses, Retention(1, every_steps=50, best=2), 0.0, lambda _: None, losses.get)
    assert set(losses) - set(gone) == {90, 50, 30, 20}
    assert first_of_each(losses, 50) == {50}


def test_a_manifest_records_the_loss_exactly_and_only_if_there_is_one(tmp_path: Path) -> None:
    store = CheckpointDirectory(tmp_path)
    save(store, 1, 0.1 + 0.2)
    save(store, 2)
    assert read_manifest(store.path(1)).state.evaluation_loss == 0.1 + 0.2
    assert read_evaluation_loss(store.path(1)) == 0.1 + 0.2
    assert read_evaluation_loss(store.path(2)) is None
    assert "evaluationLoss" not in (store.path(2) / MANIFEST).read_text()
    assert encode_manifest(manifest_at(2)) == (store.path(2) / MANIFEST).read_bytes()


def test_the_loss_is_all_that_the_manifest_has_more_and_its_format_is_the_same() -> None:
    """So versions that do not know the loss read the checkpoint: they ignore unknown fields of the state."""
    with_loss, without = (json.loads(encode_manifest(evaluated(3, loss))) for loss in (1.5, None))
    assert with_loss["format"] == without["format"] == 1
    assert with_loss["state"].pop("evaluationLoss") == 1.5
    assert {**with_loss, "checksum": ""} == {**without, "checksum": ""}


@pytest.mark.parametrize("loss", ["1.5", True, None, [], 3, math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_finite_number_is_none(loss: Any) -> None:
    assert evaluation_loss_in({"state": {"evaluationLoss": loss}}) is None
    assert evaluation_loss_in({"state": loss}) is None


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000, None])
def test_a_damaged_manifest_has_no_loss(tmp_path: Path, content: bytes | None) -> None:
    store = CheckpointDirectory(tmp_path)
    save(store, 1, 1.0)
    path = store.path(1) / MANIFEST
    if content is None:
        fields = json.loads(path.read_text())
        fields["state"]["evaluationLoss"] = 0.5
        content = json.dumps(fields).encode()
    path.write_bytes(content)
    assert read_evaluation_loss(store.path(1)) is None
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_evaluation_loss(store.path(1))


def test_a_store_retains_its_best_and_counts_no_damaged_one(store: CheckpointStore) -> None:
    retention = Retention(1, best=1)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, math.pi)):
        save(store, step, loss)
        store.retain(retention)
    assert store.steps() == [5, 2]
    assert store.evaluation_losses() == {5: math.pi, 2: 1.0}
    store.quarantine(2)
    save(store, 6, 4.0)
    store.retain(retention)
    assert store.steps() == [6, 5], "that of step 2 is hidden, and that of step 5 is the best of the rest"


def test_nothing_is_removed_while_a_manifest_cannot_be_read(tmp_path: Path) -> None:
    """The best checkpoint may be one that the volume does not show at the moment."""

    class Failing(CheckpointDirectory):
        def files(self, step: int) -> LocalFiles:
            if step == 2:
                raise OSError("Stale file handle")
            return super().files(step)

    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        save(CheckpointDirectory(tmp_path), step, loss)
    with pytest.raises(OSError, match="Stale"):
        Failing(tmp_path).retain(Retention(1, best=1))
    assert CheckpointDirectory(tmp_path).steps() == [3, 2, 1]
    CheckpointDirectory(tmp_path).retain(Retention(1, best=1))
    assert CheckpointDirectory(tmp_path).steps() == [3, 2]


def test_a_step_that_is_saved_again_has_its_new_loss(store: CheckpointStore) -> None:
    save(store, 1, 1.0)
    assert store.evaluation_losses() == {1: 1.0}
    store.quarantine(1)
    save(store, 1, 2.0)
    assert store.evaluation_losses() == {1: 2.0}


def tier(store: CheckpointStore, best: int | None = 2) -> Tier:
    return Tier(store, Retention(1, best=best), Interval(steps=900))


def schedule_of(*tiers: Tier, resumed: int = 0) -> CheckpointSchedule:
    schedule = CheckpointSchedule(tiers, FailureHistory())
    schedule.resumed(resumed)
    return schedule


def ended(seconds: float) -> bool:
    raise AssertionError("no save is in progress")


def test_an_evaluation_is_saved_if_it_is_among_the_best_so_far(store: CheckpointStore) -> None:
    one = tier(store)
    schedule = schedule_of(one)
    found = []
    for step, loss in enumerate((3.0, 2.0, 2.5, 2.5, 4.0, 1.0, math.nan, 2.0), 1):
        if schedule.best_tiers(step, loss, False, ended):
            schedule.begun([0], 0.0, {step: loss})
            schedule.saved(one, step, 0.0)
            found.append(step)
    assert found == [1, 2, 3, 6]
    (report,) = schedule.reports() or ()
    assert (report.best_step, report.best_loss) == (6, 1.0)


def test_what_is_being_saved_counts_until_it_fails(store: CheckpointStore) -> None:
    one = tier(store, best=1)
    schedule = schedule_of(one)
    schedule.begun([0], 0.0, {4: 1.0})
    assert schedule.best_tiers(6, 2.0, True, ended) == []
    schedule.failed(one, "the volume is full")
    assert schedule.best_tiers(6, 2.0, False, ended) == [0]
    schedule.begun([0], 0.0, {6: 2.0})
    schedule.not_needed(one)
    assert schedule.best_tiers(8, 3.0, False, ended) == [0]
    (report,) = schedule.reports() or ()
    assert report.best_step is None


def test_each_tier_has_its_own_count(tmp_path: Path) -> None:
    tiers = [tier(CheckpointDirectory(tmp_path / str(best)), best) for best in (1, None, 2)]
    schedule = schedule_of(*tiers)
    assert schedule.best_tiers(1, 1.0, False, ended) == [0, 2]
    schedule.begun([0, 1, 2], 0.0, {1: 1.0})
    for one in tiers:
        schedule.saved(one, 1, 0.0)
    assert schedule.best_tiers(2, 2.0, False, ended) == [2]
    assert [report.best_step for report in schedule.reports() or ()] == [1, None, 1]


def test_a_start_reads_the_losses_from_the_manifests(store: CheckpointStore) -> None:
    for step, loss in ((2, 1.0), (4, 2.0), (6, None)):
        save(store, step, loss)
    schedule = schedule_of(tier(store), resumed=6)
    assert schedule.best_tiers(8, 2.0, False, ended) == []
    assert schedule.best_tiers(8, 1.5, False, ended) == [0]
    assert schedule.best_tiers(6, 0.5, False, ended) == [], "the step has a checkpoint, which stays as it is"
    (report,) = schedule.reports() or ()
    assert (report.best_step, report.best_loss) == (2, 1.0)


def remove(store: CheckpointStore, step: int) -> None:
    """What a user does by hand."""
    if isinstance(store, CheckpointDirectory):
        shutil.rmtree(store.path(step))
    else:
        url_to_fs(str(store))[0].rm(store.location(step), recursive=True)


def test_a_best_checkpoint_that_is_removed_by_hand_is_forgotten_at_the_next_evaluation(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    for step, loss in ((2, 1.0), (4, 2.0), (6, None)):
        save(store, step, loss)
    one = tier(store, best=1)
    schedule = schedule_of(one, resumed=6)
    schedule.reports()
    remove(store, 2)
    assert schedule.best_tiers(8, 1.5, False, ended) == [], "nothing has looked yet"
    schedule.list_best()
    save(store, 8, 1.9)
    schedule.begun([0], 0.0, {8: 1.9})
    schedule.saved(one, 8, 0.0)
    schedule.forget_removed()
    (report,) = schedule.reports() or ()
    assert (report.best_step, report.best_loss) == (8, 1.9), "also if it was saved after the listing"
    assert f"the best checkpoint in {store}, of step 2, has been removed" in caplog.text
    assert schedule.best_tiers(10, 1.95, False, ended) == []
    assert schedule.best_tiers(10, 1.5, False, ended) == [0]
    schedule.list_best()
    schedule.forget_removed()
    assert schedule.reports() is None, "nothing has changed"


def test_no_step_waits_for_a_storage_that_does_not_answer_or_has_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_module, "LISTING_SECONDS", 0.01)
    answers = threading.Event()

    class Hanging(CheckpointDirectory):
        def steps(self) -> list[int]:
            if threading.current_thread() is threading.main_thread():
                return super().steps()
            assert answers.wait(60)
            raise OSError("Input/output error")

    save(CheckpointDirectory(tmp_path), 2, 1.0)
    schedule = schedule_of(tier(Hanging(tmp_path)), resumed=2)
    shutil.rmtree(tmp_path)
    for _ in range(3):
        schedule.list_best()
        schedule.forget_removed()
    listing = [thread for thread in threading.enumerate() if thread.name == "checkpoint-listing"]
    assert len(listing) == 1, "one at a time"
    answers.set()
    listing[0].join(60)
    schedule.reports()
    schedule.forget_removed()
    assert schedule.reports() is None
    assert schedule.best_tiers(2, 0.5, False, ended) == [], "what is not known to be removed is there"


def test_steps_wait_for_a_save_in_progress_once_and_lose_the_best_after_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []

    def after(seconds: float, *, ends: bool) -> bool:
        waits.append(seconds)
        return ends

    one = tier(CheckpointDirectory(tmp_path))
    schedule = schedule_of(one)
    schedule.begun([0], 0.0)
    assert schedule.best_tiers(2, 1.0, True, partial(after, ends=True)) == [0]
    assert schedule.best_tiers(4, 1.0, True, partial(after, ends=False)) == []
    assert schedule.best_tiers(6, 1.0, True, ended) == []
    assert waits == [PATIENCE_SECONDS] * 2
    assert "no checkpoint of step 6 with evaluation loss 1: a save is still in progress" in caplog.text
    schedule.saved(one, 1, 50.0)
    assert schedule.best_tiers(8, 1.0, False, ended) == [0]


def test_a_store_that_cannot_be_listed_costs_a_save_and_not_the_start(tmp_path: Path) -> None:
    class Broken(CheckpointDirectory):
        def evaluation_losses(self) -> dict[int, float | None]:
            raise OSError("Input/output error")

    save(CheckpointDirectory(tmp_path), 2, 1.0)
    schedule = schedule_of(tier(Broken(tmp_path), best=1), resumed=2)
    assert schedule.best_tiers(4, 2.0, False, ended) == [0]


def test_the_store_retains_as_many_as_the_volume_unless_it_has_its_own_number() -> None:
    spec = CheckpointSpec(uri="s3://b/x", keep_best=3)
    assert (spec.retention_of().best, spec.retention_of(StoreSpec()).best) == (3, 3)
    assert spec.retention_of(StoreSpec(keep_best=1)).best == 1
    alone = CheckpointSpec(claim_name="c", uri="s3://b/x", store=StoreSpec(keep_best=1))
    assert (alone.retention_of().best, alone.keeps_best) == (None, True)
    assert not CheckpointSpec(claim_name="c").keeps_best


def test_the_best_intact_one_is_found(store: CheckpointStore) -> None:
    place = str(store)
    with pytest.raises(FileNotFoundError, match="has an evaluation loss, which is recorded with `checkpoint.keepBest`"):
        find_checkpoint(place, best=True)
    for step, loss in ((2, 1.0), (4, 0.5), (6, 2.0), (8, None)):
        save(store, step, loss)
    assert find_checkpoint(place)[1].state.step == 8
    assert find_checkpoint(place, best=True)[1].state.step == 4
    store.quarantine(4)
    assert find_checkpoint(place, best=True)[1].state.step == 2
