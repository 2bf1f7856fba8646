"""Trackers of whole runs with real ranks: what is written is what the ranks reported, each step once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.api.tracking import TrackingSpec
from meshwright_worker.tracking.records import LINES, tracking_directory
from tests.distributed.cases import Recorder, train_fully
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool


def losses(recorder: Recorder) -> dict[int, float]:
    return {report.step: report.loss for report in recorder.reports}


def test_the_files_are_those_of_the_ranks_across_a_restart(pool: RankPool, tmp_path: Path, text: Path) -> None:
    run = small_run(data=2, steps=8, every=3, training={"tracking": TrackingSpec(tensor_board=True)})
    (_, first), _ = pool.run(train_fully, run, -1, None, 7, checkpoint_dir=tmp_path, data_dir=text)
    assert list(losses(first)) == [1, 2, 3, 4, 5, 6, 7]
    (_, second), (_, other) = pool.run(train_fully, run, -1, None, None, checkpoint_dir=tmp_path, data_dir=text)
    assert second.began_at in (3, 6)  # the save of step 6 was perhaps not durable yet
    assert list(losses(second)) == list(range(second.began_at + 1, 9))
    expected = losses(first) | losses(second)
    directory = tracking_directory(str(tmp_path))
    written = [json.loads(line) for line in (directory / LINES).read_text().splitlines()]
    assert [(one["step"], one["loss"]) for one in written if "event" not in one] == list(expected.items())
    assert not any(report.tracking_failures for report in (*second.reports, *other.reports))
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulator.EventAccumulator(str(directory / "tensorboard"), purge_orphaned_data=True)
    reader.Reload()
    scalars = [(event.step, event.value) for event in reader.Scalars("loss")]
    assert [step for step, _ in scalars] == list(expected)
    assert dict(scalars) == pytest.approx(expected, rel=1e-6)
