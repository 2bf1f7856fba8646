"""What a rank reports while it opens its data, which may take hours: how many bytes of how many are tokenized."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from meshwright.api.data import DataFormat, DataSpec, MixturePart, Tokenizer
from meshwright.data import files, tokenize
from meshwright.data.files import LocalDirectory
from meshwright_worker.data.mixture import open_streams
from meshwright_worker.data.token_cache import ENV_CACHE_DIR
from meshwright_worker.rank import task
from meshwright_worker.rank.task import AT_WORK_SECONDS, Work, WorkProgress
from meshwright_worker.trainer.train import open_run
from tests.distributed.cases import Recorder
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import tasks_of

TEXTS = [f"document number {number} " * 9 for number in range(64)]
RECORDS = [{"text": text, "prompt": "?", "completion": text[:9]} for text in TEXTS]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ENV_CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr(tokenize, "_BATCH", 4)
    return tmp_path / "cache"


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "\n".join(map(json.dumps, RECORDS)).encode()
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.table({"text": TEXTS}), path)
    else:
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


def told(root: Path, data: DataSpec, seconds: float = AT_WORK_SECONDS) -> list[Work]:
    """What is reported if each small part of the work takes so long."""
    recorder, now = Recorder(), [0.0]

    def clock() -> float:
        now[0] += seconds
        return now[0]

    open_streams(data, str(root), 8, 0, evaluates=True, progress=WorkProgress(recorder, clock))
    return recorder.work


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (DataFormat.JSON_LINES, "b.jsonl"),
        (DataFormat.JSON_LINES, "b.jsonl.gz"),
        (DataFormat.PARQUET, "b.parquet"),
        (DataFormat.TEXT, "b.txt"),
        (DataFormat.PROMPT_COMPLETION, "b.jsonl"),
        (DataFormat.PROMPT_COMPLETION, "b.jsonl.gz"),
    ],
)
def test_each_format_counts_the_bytes_of_its_files(tmp_path: Path, bpe_file: Path, kind: DataFormat, name: str) -> None:
    root = tmp_path / "volume"
    for file in ("a", name[:1]):
        write(root / f"{file}{name[1:]}")
    (root / "tokenizer.json").write_bytes(bpe_file.read_bytes())
    bpe: dict[str, Any] = {"tokenizer": Tokenizer.BPE, "tokenizer_file": "tokenizer.json"}
    works = told(root, DataSpec(claim_name="v", format=kind, held_out=0.5, **bpe))
    sizes = [(root / f"{file}{name[1:]}").stat().st_size for file in ("a", "b")]
    assert {(work.name, work.total, work.part, work.parts) for work in works} == {("tokenize", sum(sizes), 1, 1)}
    done = [work.done for work in works]
    assert done == sorted(done)
    assert done[0] <= sizes[0], "small archives are read at once"
    assert done[-1] == sum(sizes)
    assert len({*done}) >= (2 if kind is DataFormat.TEXT or name.endswith(".gz") else 10)
    assert [work.seconds for work in works] == sorted(work.seconds for work in works)


def test_nothing_is_reported_of_short_work(tmp_path: Path) -> None:
    write(tmp_path / "volume" / "a.jsonl")
    assert told(tmp_path / "volume", DataSpec(claim_name="v", format=DataFormat.JSON_LINES, held_out=0.2), 0.01) == []


def test_records_that_give_no_document_are_progress_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of them would look like a hang."""
    monkeypatch.setattr(tokenize, "_BATCH_CHARACTERS", 100)
    root = tmp_path / "volume"
    root.mkdir()
    (root / "a.jsonl").write_text('{"text": ""}\n' * 1000 + '{"text": "the only one"}\n' * 3)
    works = told(root, DataSpec(claim_name="v", format=DataFormat.JSON_LINES, held_out=0.4))
    assert len(works) > 50


def test_the_corpora_of_a_mixture_are_counted(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / "volume" / name / "part.jsonl")
    mixture = [MixturePart(path=name, weight=1) for name in ("a", "b")]
    works = told(
        tmp_path / "volume", DataSpec(claim_name="v", format=DataFormat.JSON_LINES, mixture=mixture, held_out=0.2)
    )
    size = (tmp_path / "volume" / "a" / "part.jsonl").stat().st_size
    assert {(work.part, work.parts, work.total) for work in works} == {(1, 2, size), (2, 2, size)}
    (second, *_) = (work for work in works if work.part == 2)
    assert second.seconds < works[-1].seconds


def test_listing_many_files_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file server each file takes a request."""
    monkeypatch.setattr(files, "_LISTED", 10)
    root = tmp_path / "volume"
    root.mkdir()
    for number in range(35):
        (root / f"{number}.txt").write_text("a text of its own")
    works = told(root, DataSpec(claim_name="v", held_out=0.2))
    assert [(work.name, work.done, work.total) for work in works] == [("list", n, None) for n in (10, 20, 30)]


def test_the_files_are_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For training and held-out samples, for the name of the tokens, and to tokenize."""
    write(tmp_path / "volume" / "a.jsonl")
    listed, real = [], LocalDirectory.files

    def counted(self: LocalDirectory, *arguments: Any) -> Any:
        listed.append(self.root.name)
        return real(self, *arguments)

    monkeypatch.setattr(LocalDirectory, "files", counted)
    data = DataSpec(claim_name="v", format=DataFormat.JSON_LINES, held_out=0.2)
    open_streams(data, str(tmp_path / "volume"), 8, 0, evaluates=True)
    assert listed.count("volume") == 1


def test_a_rank_reports_its_work_before_it_meets_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "AT_WORK_SECONDS", 0.0)
    write(tmp_path / "volume" / "a.jsonl")
    run = small_run()
    run = run.model_copy(update={"data": DataSpec(claim_name="v", format=DataFormat.JSON_LINES)})
    recorder = Recorder()
    open_run(tasks_of(run, None, str(tmp_path / "volume"), port=1)[0], recorder)
    assert recorder.work[-1].done == recorder.work[-1].total
    assert recorder.phases == ["data"]
