"""The end of a log in bounded memory, and the bounded directory of records."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from meshwright.printable import printable
from meshwright_worker.evidence import directory
from meshwright_worker.evidence.directory import DIRECTORY, MAX_RECORDS, record_path, write_record
from meshwright_worker.evidence.record import LOG_FILE, RECORD_FILE, STACKS_FILE, FailureRecord, current_thread_first
from meshwright_worker.evidence.tail_buffer import CUT, TailBuffer, last_lines


def record(generation: int = 1, rank: int = 0, log: str = "boom\n", stacks: str = "") -> FailureRecord:
    return FailureRecord(
        job="job", namespace="team", pod="job-w0-0", worker=0, incarnation=0, generation=generation, rank=rank,
        kind="Error", message="LookupError: boom", time="2026-01-01T00:00:00Z", exit_code=1, step=7,
        phases=(("load", 1.25),), log=log, stacks=stacks,
    )  # fmt: skip


def test_a_buffer_keeps_the_end() -> None:
    buffer = TailBuffer(10)
    buffer.feed(b"0123456789")
    assert (buffer.text(), buffer.cut) == ("0123456789", False)
    for byte in b"abcdefgh":
        buffer.feed(bytes([byte]))
    assert (buffer.text(), buffer.cut, buffer.written) == ("89abcdefgh", True, 18)


def test_memory_is_bounded_by_chunks_of_any_size() -> None:
    buffer = TailBuffer(100)
    for size in (1, 1000, 7, 99, 100, 101, 5) * 50:
        buffer.feed(b"x" * size)
        assert sum(map(len, buffer._chunks)) < 100 + 1000
    assert len(buffer.text()) == 100


def test_only_complete_lines_are_kept() -> None:
    text = "".join(f"line {number}\n" for number in range(100))
    kept = last_lines(text, 100)
    assert kept.startswith(CUT + "line ")
    assert kept.endswith("line 98\nline 99\n")
    assert len(kept.encode()) <= 100
    assert last_lines("short\n", 100) == "short\n"
    assert last_lines("rt of a secret\nnext\n", 100, cut=True) == CUT + "next\n"
    assert len(last_lines("ü" * 5000, 300).encode()) <= 300


def test_control_characters_do_not_reach_reports() -> None:
    assert printable("a\x1b[31mb\x00\tc\n") == "a?[31mb?\tc\n"


def test_the_thread_that_trains_comes_first() -> None:
    dump = (
        'Thread 0x01 (most recent call first):\n  File "a.py"\n\nCurrent thread 0x02 (most recent call first):\n  b\n'
    )
    assert current_thread_first("Fatal Python error: Aborted\n\n" + dump).splitlines()[2].startswith("Current thread")
    assert current_thread_first("no dump") == "no dump"


def test_a_record_is_complete_or_invisible(tmp_path: Path) -> None:
    path = write_record(tmp_path, record(stacks="Thread 0x1\n"))
    assert path == record_path(tmp_path, 1, 0)
    assert sorted(file.name for file in path.iterdir()) == sorted([RECORD_FILE, LOG_FILE, STACKS_FILE])
    described = json.loads((path / RECORD_FILE).read_text())
    assert described["phases"] == [{"name": "load", "seconds": 1.25}]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    write_record(tmp_path, record(log="again\n"))
    assert (path / LOG_FILE).read_text() == "again\n"


def test_the_oldest_records_are_removed(tmp_path: Path) -> None:
    for generation in range(1, MAX_RECORDS + 4):
        write_record(tmp_path, record(generation))
    kept = sorted(entry.name for entry in (tmp_path / DIRECTORY).iterdir())
    assert len(kept) == MAX_RECORDS
    assert kept[0] == "generation-00000004-rank-00000"


def test_what_a_dead_agent_left_is_removed_later(tmp_path: Path) -> None:
    hidden = tmp_path / DIRECTORY / ".writing-1-0-generation-00000001-rank-00001"
    hidden.mkdir(parents=True)
    write_record(tmp_path, record())
    assert hidden.exists()
    old = time.time() - directory._ABANDONED_SECONDS - 60
    os.utime(hidden, (old, old))
    write_record(tmp_path, record(2))
    assert not hidden.exists()
