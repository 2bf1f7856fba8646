"""The last timeline of a pipeline stays next to the checkpoints, however the volume behaves."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.schedules.measured import STORED_DIRECTORY, RankTimeline, read_stored, stored_name
from meshwright_worker.agent.stored_timelines import TimelineWriter
from meshwright_worker.agent.volume_writes import VolumeWrites

ONE = RankTimeline(3, 1, 2, [("F1.0", -900, 400), ("B1.0", -400, 400)])


async def test_the_last_timeline_of_each_stage_is_stored(tmp_path: Path) -> None:
    writer = TimelineWriter(str(tmp_path))
    for timeline in (None, ONE, ONE, replace(ONE, stage=0), replace(ONE, step=53)):
        writer.write(timeline)
        await writer.flush()
    directory = tmp_path / STORED_DIRECTORY
    assert sorted(path.name for path in directory.iterdir()) == [stored_name(0), stored_name(1)]
    assert read_stored((directory / stored_name(1)).read_text()) == [replace(ONE, step=53)]


async def test_a_timeline_that_is_stored_is_not_written_again(tmp_path: Path) -> None:
    writer = TimelineWriter(str(tmp_path))
    writer.write(ONE)
    await writer.flush()
    file = tmp_path / STORED_DIRECTORY / stored_name(1)
    file.unlink()
    writer.write(ONE)
    await writer.flush()
    assert not file.exists()


async def test_without_a_volume_nothing_is_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = TimelineWriter(None)
    writer.write(ONE)
    await writer.flush()
    (tmp_path / STORED_DIRECTORY).write_text("not a directory")
    broken = TimelineWriter(str(tmp_path))
    broken.write(ONE)
    await broken.flush()
    assert "the timeline of stage 1 is not stored" in caplog.text


async def test_a_volume_that_does_not_answer_delays_nobody_for_long(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    writes = VolumeWrites()
    writes.start("stuck", lambda: fifo.write_text("nobody reads"))
    await writes.flush(0.1)
    fifo.read_text()  # lets the thread end
    await writes.flush()
