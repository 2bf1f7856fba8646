"""Where a checkpoint comes from: what its record says, and what survives a restart, an export and another version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright_cli.checkpoint.lineage import lineage_lines
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.inspection import lineage
from meshwright_worker.checkpoint.manifest import Manifest, encode_manifest
from meshwright_worker.checkpoint.provenance import (
    EXPORT_RECORD,
    MAX_CHANGES,
    Provenance,
    branched,
    continued,
    export_record,
    parent_at,
    provenance_of,
)
from tests.distributed.configs import small_run
from tests.worker.checkpoint.test_checkpoint_files import manifest_at

IMAGE = "registry.example.com/worker@sha256:1234"


def test_a_restart_without_a_change_adds_nothing_and_an_edit_is_remembered() -> None:
    first = provenance_of(small_run(data=2), "team/lm", IMAGE)
    assert first.spec["training"]["globalBatchSize"] == 8
    assert "checkpoint" not in first.spec
    assert continued(first, provenance_of(small_run(data=2), "team/lm", IMAGE), 10) == first
    resized = continued(first, provenance_of(small_run(data=1), "team/lm", IMAGE), 10)
    (change,) = resized.history
    assert (change.step, change.changes) == (10, {"spec.dataParallel": [2, 1]})
    newer = continued(resized, provenance_of(small_run(data=1), "team/lm", f"{IMAGE}5"), 20)
    assert [one.step for one in newer.history] == [10, 20]
    assert newer.history[1].changes == {"image": [IMAGE, f"{IMAGE}5"]}


def test_only_the_latest_changes_are_remembered() -> None:
    record = provenance_of(small_run(), "team/lm", "0")
    for step in range(1, MAX_CHANGES + 10):
        record = continued(record, provenance_of(small_run(), "team/lm", str(step)), step)
    assert len(record.history) == MAX_CHANGES
    assert record.history[-1].step == MAX_CHANGES + 9


def test_a_chain_is_read_from_its_last_link(tmp_path: Path) -> None:
    base = continued(
        provenance_of(small_run(data=2), "team/base", IMAGE), provenance_of(small_run(), "team/base", IMAGE), 40
    )
    (tmp_path / EXPORT_RECORD).write_text(export_record("s3://b/base/step-00000500-g1", 500, 77, base))
    run = small_run()
    tuned = run.model_copy(update={"training": run.training.model_copy(update={"initial_weights": str(tmp_path)})})
    record = provenance_of(tuned, "team/tuned", None)
    (tmp_path / EXPORT_RECORD).unlink()

    store = CheckpointDirectory(tmp_path / "run")
    store.prepare(6)
    store.commit(manifest_at(6).model_copy(update={"provenance": record}))
    found = lineage(str(tmp_path / "run"), None)
    text = "\n".join(lineage_lines(_fields(found)))
    for part in (
        "step 6",
        "job team/tuned",
        "began with the weights of s3://b/base/step-00000500-g1 (step 500)",
        "job team/base",
        f"image {IMAGE}",
        "after step 40:",
        "spec.dataParallel: 2 → 1",
        "began with random weights",
    ):
        assert part in text, text


def test_the_adapter_that_training_began_from_is_part_of_the_chain(tmp_path: Path) -> None:
    first = provenance_of(small_run(), "team/first", IMAGE)
    (tmp_path / EXPORT_RECORD).write_text(export_record("/c/step-00000009", 9, 3, first, "1-aa"))
    lora = {"lora": {"initial_adapter": str(tmp_path)}, "initial_weights": "/models/a"}
    record = provenance_of(small_run(training=lora), "team/second", IMAGE)
    assert record.adapter is not None
    assert record.adapter.base_fingerprint == "1-aa"
    assert continued(record, provenance_of(small_run(), "team/second", IMAGE), 5).adapter == record.adapter
    text = "\n".join(lineage_lines({"place": "x", "step": 5, "digest": 1, "provenance": fields_of(record)}))
    assert "├─ began with the adapter of /c/step-00000009 (step 9)" in text
    assert text.index("job team/second") < text.index("job team/first") < text.index("the weights of /models/a")
    assert "adapter" not in fields_of(first)


def fields_of(record: Provenance) -> dict[str, object]:
    """As in a checkpoint of a run."""
    return record.model_dump(mode="json", by_alias=True, exclude_none=True)


def test_a_run_that_began_from_another_one_shows_it_in_its_chain(tmp_path: Path) -> None:
    base = provenance_of(small_run(data=2), "team/base", IMAGE)
    record = branched("/c/base/step-00000500", 500, 77, base, provenance_of(small_run(), "team/longer", IMAGE))
    record = continued(record, provenance_of(small_run(), "team/longer", f"{IMAGE}5"), 600)
    store = CheckpointDirectory(tmp_path)
    store.prepare(606)
    store.commit(manifest_at(606).model_copy(update={"provenance": record}))
    lines = lineage_lines(_fields(lineage(str(tmp_path), None)))
    wanted = (
        "job team/longer",
        "after step 600:",
        "after step 500:",
        "spec.dataParallel: 2 → 1",
        "resumed from /c/base/step-00000500 (step 500)",
        "job team/base",
        "began with random weights",
    )
    places = [next(number for number, line in enumerate(lines) if part in line) for part in wanted]
    assert places == sorted(places), lines
    unknown = branched("/c/base/step-00000500", 500, 77, None, provenance_of(small_run(), "team/longer", IMAGE))
    assert (unknown.history, unknown.parent and unknown.parent.provenance) == ([], None)
    assert "resumed" not in parent_at(str(tmp_path)).model_dump(by_alias=True)


def _fields(found: object) -> dict[str, object]:
    return {name: getattr(found, name) for name in ("place", "step", "digest", "provenance", "source")}


def test_an_export_says_which_checkpoint_it_is_of(tmp_path: Path) -> None:
    (tmp_path / EXPORT_RECORD).write_text(export_record("/c/step-00000006", 6, 5, None))
    text = "\n".join(lineage_lines(_fields(lineage(str(tmp_path), None))))
    assert "step 6, exported from /c/step-00000006" in text
    assert "samples 0000000000000005; it has no record" in text
    assert parent_at(str(tmp_path)).step == 6
    (tmp_path / EXPORT_RECORD).write_text("{")
    assert parent_at(str(tmp_path)).step is None


def test_a_manifest_without_a_record_has_no_key_for_it_and_one_of_a_later_version_is_ignored() -> None:
    fields = json.loads(encode_manifest(manifest_at(3)))
    assert "provenance" not in fields
    assert Manifest.model_validate(fields | {"provenance": {"history": "of another kind"}}).provenance is None
    known = Manifest.model_validate(fields | {"provenance": {"job": "a/b", "later": 1}}).provenance
    assert known is not None
    assert known.job == "a/b"


def test_the_record_of_0_1_0_is_none() -> None:
    recorded = Path(__file__).parents[2] / "compatibility" / "0.1.0" / "checkpoints"
    found = lineage(str(recorded), None)
    assert (found.step, found.provenance) == (6, None)
    assert "Meshwright 0.1" in lineage_lines(_fields(found))[-1]
    with pytest.raises(FileNotFoundError):
        lineage(str(recorded), 5)
