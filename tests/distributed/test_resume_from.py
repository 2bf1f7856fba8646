"""A run that begins from the checkpoint of another one (`checkpoint.resumeFrom`): which one, and what it ends with."""

from __future__ import annotations

import json
import logging
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from meshwright.api.checkpoint import CheckpointSpec
from meshwright.manifest_checksum import with_checksum
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint import loader
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.inspection import lineage
from meshwright_worker.checkpoint.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    TrainingState,
    read_manifest,
    read_manifest_as,
)
from meshwright_worker.checkpoint.other_run import checkpoint_of_other_run
from meshwright_worker.checkpoint.store import CheckpointStore, open_store
from meshwright_worker.checkpoint_errors import CheckpointVolumeError
from meshwright_worker.rank.failures import classify, describe
from meshwright_worker.rank.task import Outcome, Progress, RankTask, WorkProgress
from meshwright_worker.trainer.train import train
from tests.distributed.cases import Recorder, train_fully
from tests.distributed.configs import small_run
from tests.distributed.mesh_cache import kept_mesh, uses_kept_mesh
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_checkpoint_choice import OF_RANK, _Warnings, manifest_of, save
from tests.distributed.test_learning_rates import assert_same_end
from tests.distributed.test_recovery import losses, tensors_of

LENGTH, BEGUN = 8, 4
"""Steps of the entire run, and of the one that it is begun from."""
ANY_LENGTH: dict[str, Any] = {"optimizer": {"decay": "Constant"}}
"""Rates that do not depend on the number of steps, so that a run can be continued by a longer one."""


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of every file: that of another run is only read."""
    return {str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files_below(root)}


def files_below(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]


# Which checkpoint is chosen: on two ranks, with files of their own.


@uses_kept_mesh
def choose(task: RankTask, claims: list[str], resume_from: str, steps: int) -> tuple[str, list[str]]:
    """The checkpoint from which this rank would begin, or the error, and the warnings. Its claim is `DIR`."""
    warnings = _Warnings()
    warnings.setLevel(logging.WARNING)
    logging.getLogger("meshwright_worker").addHandler(warnings)
    spec, claim = CheckpointSpec(claim_name="c", resume_from=resume_from), claims[task.rank]
    try:
        with kept_mesh(task) as mesh:
            path, manifest = checkpoint_of_other_run(spec, claim, mesh, manifest_of(0, {}), steps)
            assert Path(str(path).removeprefix("file://")).name.startswith(f"step-{manifest.state.step:08d}")
            found = str(path)
    except (OSError, ValueError) as error:
        found = f"{classify(error)}: {describe(error)}"
    finally:
        logging.getLogger("meshwright_worker").removeHandler(warnings)
    for root in claims:
        found = found.replace(root, "DIR")
    return found, warnings.texts


def chosen(
    pool: RankPool, claim: Path, resume_from: str, other: Path | None = None, steps: int = 100
) -> tuple[str, str]:
    """What both ranks choose alike, and what rank 0 warns of. The claim stays as it is."""
    before = snapshot(claim)
    (first, warnings), (second, _) = pool.run(
        choose, small_run(data=2), [str(claim), str(other or claim)], resume_from, steps
    )
    assert first == second
    assert snapshot(claim) == before
    assert not [path for path in claim.rglob("*") if path.name.startswith((".damaged", ".writing", "damaged"))]
    return first, "".join(warnings)


@pytest.fixture
def claim(tmp_path: Path) -> Path:
    """With the run `base-0a1b2c3d`, which has the steps 10, 20 and 30."""
    root = tmp_path / "claim"
    directory = CheckpointDirectory(root / "base-0a1b2c3d")
    for step in (10, 20, 30):
        save(directory, step)
    return root


def step_of(claim: Path, step: int) -> Path:
    return claim / "base-0a1b2c3d" / f"step-{step:08d}"


def change_manifest(claim: Path, step: int, **fields: Any) -> None:
    path = step_of(claim, step) / MANIFEST
    changed = json.loads(path.read_text()) | fields
    path.write_text(json.dumps(with_checksum({name: value for name, value in changed.items() if name != "checksum"})))


@pytest.mark.parametrize(
    ("resume_from", "step"),
    [
        ("base-0a1b2c3d", 30),
        ("base-0a1b2c3d/", 30),
        ("base-0a1b2c3d/step-00000020", 20),
        ("base-0a1b2c3d/step-00000010/", 10),
    ],
)
def test_the_newest_checkpoint_or_the_named_one_is_chosen(
    pool: RankPool, claim: Path, resume_from: str, step: int
) -> None:
    assert chosen(pool, claim, resume_from) == (f"DIR/base-0a1b2c3d/step-{step:08d}", "")


def test_a_damaged_checkpoint_stays_and_the_previous_one_is_chosen(pool: RankPool, claim: Path) -> None:
    (step_of(claim, 30) / OF_RANK[1]).write_bytes(b"other")
    found, warning = chosen(pool, claim, "base-0a1b2c3d")
    assert found == "DIR/base-0a1b2c3d/step-00000020"
    assert "b is damaged" in warning
    assert "trying the previous checkpoint" in warning


def test_nothing_replaces_a_damaged_checkpoint_that_is_named(pool: RankPool, claim: Path) -> None:
    (step_of(claim, 30) / OF_RANK[1]).unlink()
    found, _ = chosen(pool, claim, "base-0a1b2c3d/step-00000030")
    assert found.startswith("InvalidInput: `checkpoint.resumeFrom: base-0a1b2c3d/step-00000030`: DIR/base-0a1b2c3d/")
    assert "b is damaged: the file is missing: name another step, or only the run" in found


@pytest.mark.parametrize(
    ("resume_from", "parts"),
    [
        ("nowhere-0a1b2c3d", ("there is no complete checkpoint in DIR/nowhere-0a1b2c3d: name the directory",)),
        (
            "base-0a1b2c3d/step-00000040",
            ("checkpoint of step 40 in DIR/base-0a1b2c3d, which has those of steps 30, 20",),
        ),
        ("base-0a1b2c3d/step-00000030-g1", ("no complete checkpoint in DIR/base-0a1b2c3d/step-00000030-g1",)),
        (
            "nosuch://bucket/base",
            ("`checkpoint.resumeFrom: nosuch://bucket/base` cannot be opened", "needs the package"),
        ),
        (
            "base-0a1b2c3d/step-00000030/a",
            ("cannot use the checkpoints' volume", "Not a directory", "name the directory"),
        ),
    ],
)
def test_a_checkpoint_that_is_not_there_is_an_invalid_input(
    pool: RankPool, claim: Path, resume_from: str, parts: tuple[str, ...]
) -> None:
    found, _ = chosen(pool, claim, resume_from)
    assert found.startswith(f"InvalidInput: `checkpoint.resumeFrom: {resume_from}`: ")
    assert all(part in found for part in parts), found


def test_a_run_with_one_checkpoint_is_described_as_such(pool: RankPool, claim: Path) -> None:
    for step in (10, 20):
        shutil.rmtree(step_of(claim, step))
    found, _ = chosen(pool, claim, "base-0a1b2c3d/step-00000040")
    assert found.endswith("which has that of step 30: name it, or only the run for the newest one")
    assert chosen(pool, claim, "base")[0].endswith("in DIR/base: name the run `base-0a1b2c3d`")


def test_if_every_checkpoint_is_damaged_training_does_not_begin_at_step_0(pool: RankPool, claim: Path) -> None:
    for step in (10, 20, 30):
        (step_of(claim, step) / MANIFEST).write_text("{")
    found, warning = chosen(pool, claim, "base-0a1b2c3d")
    assert found.startswith("InvalidInput: ")
    assert "every checkpoint in DIR/base-0a1b2c3d is damaged (steps 30, 20, 10); the newest: " in found
    assert warning.count("trying the previous checkpoint") == 3


def test_a_run_without_a_step_to_train_is_an_invalid_input(pool: RankPool, claim: Path) -> None:
    found, _ = chosen(pool, claim, "base-0a1b2c3d", steps=30)
    assert found.startswith(
        "InvalidInput: `checkpoint.resumeFrom: base-0a1b2c3d`: that run has completed 30 steps, and"
    )
    assert "`training.steps`, which includes them, is 30: set it above 30, or name an earlier checkpoint" in found
    assert chosen(pool, claim, "base-0a1b2c3d", steps=31)[0].endswith("step-00000030")


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"format": 99}, "was written by another version of Meshwright"),
        ({"stream": "other"}, "name another run in `checkpoint.resumeFrom`, or use the settings of that run"),
        ({"lora": {"rank": 4}}, "`training.lora` or `training.initialWeights` differ"),
    ],
)
def test_a_checkpoint_of_another_kind_of_run_is_incompatible(
    pool: RankPool, claim: Path, fields: dict[str, Any], part: str
) -> None:
    change_manifest(claim, 30, **fields)
    found, _ = chosen(pool, claim, "base-0a1b2c3d")
    assert found.startswith("CheckpointIncompatible: `checkpoint.resumeFrom: base-0a1b2c3d`: ")
    assert part in found


@pytest.mark.parametrize("rank", OF_RANK)
def test_an_error_of_the_storage_is_retried_on_all_ranks(pool: RankPool, claim: Path, rank: int) -> None:
    broken = step_of(claim, 30) / OF_RANK[rank]
    broken.unlink()
    broken.symlink_to(broken.name)  # Opening it is an error that is not "no such file".
    found, _ = chosen(pool, claim, "base-0a1b2c3d")
    assert found.startswith("Error: `checkpoint.resumeFrom: base-0a1b2c3d`: ")
    assert f"rank {rank} cannot use the checkpoints' volume" in found


def test_ranks_that_see_other_volumes_do_not_begin(pool: RankPool, claim: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    found, _ = chosen(pool, claim, "base-0a1b2c3d", empty)
    assert found.startswith("Error: `checkpoint.resumeFrom: base-0a1b2c3d`: DIR/base-0a1b2c3d/step-00000030 is seen by")
    found, _ = chosen(pool, empty, "base-0a1b2c3d", claim)
    assert found.startswith(
        "Error: `checkpoint.resumeFrom: base-0a1b2c3d`: the checkpoints in DIR/base-0a1b2c3d are seen"
    )


def save_in_store(store: CheckpointStore, step: int) -> None:
    store.prepare(step)
    sink = store.sink(step)
    files: dict[str, FileRecord] = {name: sink.write(name, b"%d" % step) for name in OF_RANK.values()}
    store.commit(manifest_of(step, files))


def test_in_an_object_store_a_mesh_generation_can_be_named(pool: RankPool, tmp_path: Path) -> None:
    root = tmp_path / "store"
    uri = f"file://{root}/base-0a1b2c3d"
    for step, generation in ((10, 1), (20, 1), (20, 3)):
        save_in_store(open_store(uri, generation), step)
    (root / "base-0a1b2c3d" / "step-00000030-g4").mkdir()
    assert chosen(pool, root, uri)[0] == "file://DIR/base-0a1b2c3d/step-00000020-g3"
    assert chosen(pool, root, f"{uri}/step-00000020")[0] == "file://DIR/base-0a1b2c3d/step-00000020-g3"
    assert chosen(pool, root, f"{uri}/step-00000020-g1")[0] == "file://DIR/base-0a1b2c3d/step-00000020-g1"
    missing, _ = chosen(pool, root, f"{uri}/step-00000020-g2")
    assert missing.startswith("InvalidInput: `checkpoint.resumeFrom: file://DIR/base-0a1b2c3d/step-00000020-g2`: ")
    assert (
        "no complete checkpoint step-00000020-g2 in file://DIR/base-0a1b2c3d, which has those of steps 20, 10"
        in missing
    )
    unfinished, _ = chosen(pool, root, f"{uri}/step-00000030")
    assert "no complete checkpoint of step 30 in file://DIR/base-0a1b2c3d (incomplete), which has" in unfinished


@uses_kept_mesh
def choose_while_it_is_removed(task: RankTask, claim: str, late: bool) -> str:
    """The error, if the run that is read removes a file that fails its verification, with the checkpoint around it."""
    spec = CheckpointSpec(claim_name="c", resume_from="base-0a1b2c3d/step-00000030")
    removed = Path(claim) / "base-0a1b2c3d" / "step-00000030"

    class Removal(WorkProgress):
        """Removes the checkpoint once a rank reads it."""

        def begin(self, name: str, total: int) -> Progress:
            if task.rank == 0:
                shutil.rmtree(removed, ignore_errors=True)
            return super().begin(name, total)

    def read_late(*args: Any) -> Manifest:
        while late and task.rank == 1 and removed.exists():
            time.sleep(0.01)
        return read_manifest_as(*args)

    with kept_mesh(task) as mesh, patch.object(loader, "read_manifest_as", read_late):
        try:
            checkpoint_of_other_run(spec, claim, mesh, manifest_of(0, {}), 100, Removal())
        except CheckpointVolumeError as error:
            return describe(error)
        return ""


@pytest.mark.parametrize("late", [False, True])
def test_a_checkpoint_that_its_run_removes_meanwhile_is_not_damaged(pool: RankPool, claim: Path, late: bool) -> None:
    """Rank 1 finds a damaged file, or, `late`, no checkpoint: neither is what is wrong."""
    (step_of(claim, 30) / OF_RANK[1]).write_bytes(b"half removed")
    errors = pool.run(choose_while_it_is_removed, small_run(data=2), str(claim), late)
    assert all("was removed while it was read: name one that its run retains" in error for error in errors), errors


@pytest.mark.parametrize(
    ("resume_from", "meant"),
    [
        ("base", "in DIR/base: name one of these runs: `base-0a1b2c3d`, `base-1a1b2c3d`"),
        ("base-0a1b2c3d/step-20", "in DIR/base-0a1b2c3d/step-20: the name of a checkpoint has eight digits: name "),
        ("bas", "in DIR/bas: name the directory or the URI of a run"),
        ("no/where", "in DIR/no/where: name the directory or the URI of a run"),
    ],
)
def test_the_error_names_what_was_probably_meant(pool: RankPool, claim: Path, resume_from: str, meant: str) -> None:
    for name in ("base-1a1b2c3d", "base-line-0a1b2c3d", "base-x"):
        (claim / name).mkdir()
    found, _ = chosen(pool, claim, resume_from)
    assert found.startswith(f"InvalidInput: `checkpoint.resumeFrom: {resume_from}`: ")
    assert meant in found


# What the run ends with.


def run_of(steps: int, resume_from: str | None = None, every: int = 3, **options: Any) -> NativeRun:
    run = small_run(**{"steps": steps, "every": every, "keep": 9, **ANY_LENGTH, **options})
    assert run.checkpoint is not None
    return run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update={"resume_from": resume_from})})


def trained(pool: RankPool, run: NativeRun, root: Path, text: Path, stop_after: int | None = None) -> list[Recorder]:
    """What the ranks report of a run that ends, or stops early."""
    stop = -1 if stop_after is None else 0
    answers = pool.run(train_fully, run, stop, stop_after, checkpoint_dir=root, data_dir=text)
    assert {outcome for outcome, _ in answers} == {Outcome.COMPLETE if stop_after is None else Outcome.STOPPED}
    return [recorder for _, recorder in answers]


def state_of(root: Path, step: int) -> TrainingState:
    return read_manifest(CheckpointDirectory(root).path(step)).state


@pytest.fixture(scope="module")
def runs(pool: RankPool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """A claim with a run that ends after step 4, `base-0a1b2c3d`, and one that ends after step 8, `straight`."""
    root = tmp_path_factory.mktemp("runs")
    trained(pool, run_of(BEGUN, data=2), root / "base-0a1b2c3d", text)
    straight, *_ = trained(pool, run_of(LENGTH, data=2), root / "straight", text)
    return root, losses(straight)


def test_a_run_that_begins_from_another_ones_end_is_bitwise_the_longer_run(
    pool: RankPool, text: Path, runs: tuple[Path, dict[int, float]]
) -> None:
    """It is stopped in between, when the other run is not there any more, and goes on from its own checkpoint."""
    claim, expected = runs
    source, own = claim / "moved-0a1b2c3d", claim / "longer-1a1b2c3d"
    shutil.copytree(claim / "base-0a1b2c3d", source)
    before = snapshot(source)
    run = run_of(LENGTH, "moved-0a1b2c3d", every=100, data=2)
    first, other = trained(pool, run, own, text, stop_after=6)
    assert snapshot(source) == before
    assert (first.began_at, first.began_from) == (BEGUN, str(source / "step-00000004"))
    assert first.checkpoints == [BEGUN, 6], "what was loaded is saved under the name of this job"
    assert CheckpointDirectory(own).steps() == [6, BEGUN]
    assert state_of(own, BEGUN) == state_of(source, BEGUN)
    shutil.rmtree(source)
    second, _ = trained(pool, run, own, text)
    assert (second.began_at, second.began_from) == (6, "")
    assert losses(first) | losses(second) == {step: loss for step, loss in expected.items() if step > BEGUN}
    assert losses(other) == losses(first)
    assert_same_end(claim / "straight", own, LENGTH)
    shutil.rmtree(own)


def test_the_evaluation_of_the_other_run_does_not_compete_with_those_of_this_one(
    pool: RankPool, text: Path, tmp_path: Path
) -> None:
    def evaluated(steps: int, source: str | None, rate: float) -> NativeRun:
        options = {"optimizer": {"decay": "Constant", "learning_rate": rate}}
        run = run_of(steps, source, **options, training={"evaluation": {"every_steps": 2, "samples": 10}})
        assert run.checkpoint is not None
        checkpoint = run.checkpoint.model_copy(update={"keep_best": 1})
        return run.model_copy(update={"data": run.data.model_copy(update={"held_out": 0.2}), "checkpoint": checkpoint})

    source, own = tmp_path / "base-0a1b2c3d", tmp_path / "longer-1a1b2c3d"
    trained(pool, evaluated(BEGUN, None, 0.01), source, text)
    assert state_of(source, BEGUN).evaluation_loss is not None
    trained(pool, evaluated(LENGTH, source.name, 5.0), own, text)
    losses = CheckpointDirectory(own).evaluation_losses()
    assert losses[BEGUN] is None
    assert losses[6] is not None
    assert state_of(own, BEGUN).digest == state_of(source, BEGUN).digest


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor": 2, "zero": 1},
        pytest.param({"pipeline": 3, "micro_batches": 4}, marks=pytest.mark.long),
        pytest.param({"data": 2, "zero": 3}, marks=pytest.mark.long),
        pytest.param({"data": 2, "training": {"precision": "bf16"}}, marks=pytest.mark.long),
        pytest.param(
            {"pipeline": 3, "micro_batches": 4, "clip": 0.0, "parallelism": {"schedule": "PipeDream2BW"}},
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_another_layout_goes_on_from_the_same_tensors_and_samples(
    pool: RankPool, text: Path, runs: tuple[Path, dict[int, float]], layout: dict[str, Any]
) -> None:
    claim, expected = runs
    own = claim / "other-1a1b2c3d"
    first, *_ = trained(pool, run_of(LENGTH, "base-0a1b2c3d/step-00000004", **layout), own, text)
    assert first.began_at == BEGUN
    want, got = tensors_of(claim / "base-0a1b2c3d", BEGUN), tensors_of(own, BEGUN)
    assert all(torch.equal(want[name], got[name]) for name in want), "the first checkpoint is a copy"
    reached, straight = state_of(own, LENGTH), state_of(claim / "straight", LENGTH)
    assert (reached.samples, reached.digest) == (straight.samples, straight.digest)
    if set(layout) <= {"tensor", "zero", "data", "pipeline", "micro_batches"}:
        wanted = {step: pytest.approx(loss, rel=1e-5) for step, loss in expected.items() if step > BEGUN}
        assert losses(first) == wanted
    shutil.rmtree(own)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"outer": {"method": "DiLoCo", "every_steps": 2}},
        {"training": {"lora": {"rank": 4}}},
        {"zero": 3, "optimizer": {"decay": "Constant", "name": "Muon"}},
        {"mixture": "Mixtral", "expert": 2},
    ],
    ids=str,
)
def test_other_states_are_continued_bitwise_too(
    pool: RankPool, text: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Outer optimizers of islands, adapters on random weights, Muon, experts."""
    every = {"every": 4, "data": 2, **options}
    trained(pool, run_of(BEGUN, **every), tmp_path / "base-0a1b2c3d", text)
    straight, *_ = trained(pool, run_of(LENGTH, **every), tmp_path / "straight", text)
    run = run_of(LENGTH, "base-0a1b2c3d", **every)
    continued, *_ = trained(pool, run, tmp_path / "longer-1a1b2c3d", text)
    assert losses(continued) == {step: loss for step, loss in losses(straight).items() if step > BEGUN}
    for step in (BEGUN, LENGTH):
        assert_same_end(tmp_path / "straight", tmp_path / "longer-1a1b2c3d", step)


def test_the_lineage_leads_through_the_other_run(
    pool: RankPool, text: Path, runs: tuple[Path, dict[int, float]]
) -> None:
    claim, _ = runs
    base, longer, longest = (claim / name for name in ("named-0a1b2c3d", "named-1a1b2c3d", "named-2a1b2c3d"))
    for steps, source, root in ((2, None, base), (4, base.name, longer), (6, longer.name, longest)):
        pool.run(train_named, run_of(steps, source), f"team/{root.name}", checkpoint_dir=root, data_dir=text)
    record = lineage(str(longest), None).provenance
    assert record is not None
    assert record["job"] == f"team/{longest.name}"
    (change,) = record["history"]
    assert (change["step"], change["changes"]) == (4, {"spec.training.steps": [4, 6]})
    parent = record["parent"]
    assert (parent["resumed"], parent["step"], parent["path"]) == (True, 4, str(longer / "step-00000004"))
    assert parent["digest"] == state_of(longer, 4).digest
    assert parent["provenance"]["job"] == f"team/{longer.name}"
    first = parent["provenance"]["parent"]
    assert (first["step"], first["provenance"]["job"]) == (2, f"team/{base.name}")
    assert "parent" not in first["provenance"] or first["provenance"]["parent"] is None


def train_named(task: RankTask, job: str) -> Outcome:
    return train(replace(task, job=job), Recorder())


@pytest.mark.parametrize(
    ("options", "kind", "part"),
    [
        ({"layers": 2}, "CheckpointIncompatible", "the checkpoint contains another model (`layers` 3 there, 2 here)"),
        pytest.param(
            {"seed": 1}, "CheckpointIncompatible", "trained on another stream of samples", marks=pytest.mark.long
        ),
        pytest.param({"steps": BEGUN}, "InvalidInput", "that run has completed 4 steps", marks=pytest.mark.long),
    ],
)
def test_a_run_that_does_not_fit_fails_before_its_first_step_and_saves_nothing(
    pool: RankPool,
    text: Path,
    runs: tuple[Path, dict[int, float]],
    options: dict[str, Any],
    kind: str,
    part: str,
) -> None:
    claim, _ = runs
    run = run_of(**{"steps": LENGTH, "resume_from": "base-0a1b2c3d", "data": 2, **options})
    errors = pool.run(fail, run, checkpoint_dir=claim / "bad-1a1b2c3d", data_dir=text)
    assert all(error.startswith(f"{kind}: `checkpoint.resumeFrom: base-0a1b2c3d`: ") for error in errors), errors
    assert all(part in error for error in errors)
    assert not (claim / "bad-1a1b2c3d").exists()


def fail(task: RankTask) -> str:
    try:
        train(task, Recorder())
    except (OSError, ValueError) as error:
        return f"{classify(error)}: {describe(error)}"
    return ""
