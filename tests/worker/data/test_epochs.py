"""What the log says about how often a run reads its data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.api.data import DataFormat, DataSpec, MixturePart
from meshwright_worker.data.epochs import DataUse, data_use
from meshwright_worker.data.mixture import open_stream


def used(root: Path, data: DataSpec, samples: int, batch: int, length: int = 8) -> DataUse:
    return data_use(open_stream(data, str(root), length, 0), [part.path for part in data.mixture], samples, batch)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    for name, size in (("web", 799), ("code", 79)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("x" * (size + 1))
    return tmp_path


def test_epochs_of_one_corpus_and_of_each_of_a_mixture(volume: Path) -> None:
    one = used(volume, DataSpec(claim_name="v", pattern="web/*"), 250, 10)
    assert one == DataUse(("data: 100 samples per epoch; the run takes 250, 2.50 epochs",), ())
    parts = [MixturePart(path="web", weight=3), MixturePart(path="code", weight=1)]
    both = used(volume, DataSpec(claim_name="v", mixture=parts), 400, 8)
    assert both.lines == (
        "data in web: 100 samples per epoch; the run takes 300, 3.00 epochs",
        "data in code: 10 samples per epoch; the run takes 100, 10.00 epochs",
    )
    assert not both.warnings


def test_a_batch_larger_than_an_epoch_and_a_long_rest(volume: Path) -> None:
    data = DataSpec(claim_name="v", pattern="code/*")
    assert (
        "each step takes 12 of them: a step has the same sample several times" in used(volume, data, 24, 12).warnings[0]
    )
    (rest,) = used(volume, data, 4, 1, length=50).warnings
    assert "the last 30 of 81 tokens do not fill a sequence" in rest


def test_epochs_of_records(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}))
    data = DataSpec(claim_name="v", format=DataFormat.PROMPT_COMPLETION)
    assert used(tmp_path, data, 3, 1) == DataUse(("data: 1 samples per epoch; the run takes 3, 3.00 epochs",), ())
