"""Prompts with completions: what is predicted, what is refused, and that nothing else is learned from."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import pytest
import torch

from meshwright.api.data import DataFormat, DataSpec, OnCorrupt, Tokenizer
from meshwright.data.errors import CorruptRecordError, DataError
from meshwright_worker.data.batch import IGNORED, Batch
from meshwright_worker.data.corpus import CorpusError
from meshwright_worker.data.mixture import open_stream
from meshwright_worker.data.sft import PromptCompletionStream

RECORDS = [{"prompt": f"{number}+{number}=", "completion": str(2 * number)} for number in range(20)]


def data_of(directory: Path, lines: list[str], **fields: object) -> DataSpec:
    directory.mkdir(exist_ok=True)
    (directory / "a.jsonl").write_text("\n".join(lines))
    return DataSpec.model_validate({"claim_name": "v", "format": DataFormat.PROMPT_COMPLETION, **fields})


@pytest.fixture
def data(tmp_path: Path) -> DataSpec:
    return data_of(tmp_path / "v", [json.dumps(record) for record in RECORDS])


def test_only_completions_are_predicted(tmp_path: Path, data: DataSpec) -> None:
    stream = open_stream(data, str(tmp_path / "v"), 12, 0)
    batch = Batch.of(stream.batch(0, 20))
    assert batch.tokens.min() >= 0
    seen = set()
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        completion = bytes(t for t in targets if t not in (IGNORED, 256)).decode()
        text = bytes(t for t in tokens if t < 256).decode()
        assert text == f"{text.split('=')[0]}={completion}"
        assert [t for t in targets if t != IGNORED][-1] == 256
        seen.add(text)
    assert seen == {r["prompt"] + r["completion"] for r in RECORDS}


def test_a_long_record_is_cut_at_its_end(tmp_path: Path) -> None:
    data = data_of(tmp_path / "v", [json.dumps({"prompt": "abcdef", "completion": "0123456789"})])
    batch = Batch.of(open_stream(data, str(tmp_path / "v"), 8, 0).batch(0, 1))
    assert bytes(batch.tokens[0].tolist()) == b"abcdef01"
    assert batch.targets[0].tolist() == [IGNORED] * 5 + list(b"012")


def test_records_are_held_out(tmp_path: Path, data: DataSpec) -> None:
    data = data.model_copy(update={"held_out": 0.25})
    parts = [open_stream(data, str(tmp_path / "v"), 12, 0, held_out=held) for held in (False, True)]
    rows = [{tuple(row) for row in part.batch(0, count).tolist()} for part, count in zip(parts, (15, 5), strict=True)]
    assert [len(part) for part in rows] == [15, 5]
    assert not rows[0] & rows[1]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", r"a.jsonl:2: not JSON"),
        ('{"prompt": "a"}', r"a.jsonl:2: a record needs the texts"),
        ('{"prompt": "a", "completion": ""}', r"a.jsonl:2: a record needs the texts .*; `completion` is empty"),
        ('{"prompt": "a", "completion": ["b"]}', r"a.jsonl:2: a record needs the texts .*; `completion` is not a text"),
        ("[1]", r"a.jsonl:2: a record needs the texts"),
        (r'{"prompt": "a", "completion": "\ud800"}', r"a.jsonl:2: half a surrogate pair at character 0"),
        (json.dumps({"prompt": "x" * 13, "completion": "y"}), r"a.jsonl:2: the prompt's 13 tokens .* of 12"),
    ],
)
def test_a_corrupt_record_fails_or_is_reported(
    tmp_path: Path, line: str, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = json.dumps(RECORDS[0])
    data = data_of(tmp_path / "v", [good, line])
    with pytest.raises(CorruptRecordError, match=named):
        open_stream(data, str(tmp_path / "v"), 12, 0)
    skipping = data.model_copy(update={"on_corrupt_record": OnCorrupt.SKIP})
    assert len(open_stream(skipping, str(tmp_path / "v"), 12, 0).batch(0, 3)) == 3
    assert "skipped 1 records" in caplog.text


def test_records_in_an_archive(tmp_path: Path, data: DataSpec) -> None:
    plain = (tmp_path / "v" / "a.jsonl").read_bytes()
    (tmp_path / "gz").mkdir()
    (tmp_path / "gz" / "a.jsonl.gz").write_bytes(gzip.compress(plain))
    packed = open_stream(data, str(tmp_path / "gz"), 12, 0)
    assert packed.identity == open_stream(data, str(tmp_path / "v"), 12, 0).identity
    (tmp_path / "gz" / "a.jsonl.gz").write_bytes(gzip.compress(plain)[:-9])
    skipping = data.model_copy(update={"on_corrupt_record": OnCorrupt.SKIP})
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be read to its end"):
        open_stream(skipping, str(tmp_path / "gz"), 12, 0)


@pytest.mark.parametrize("ending", ["gz", "zst", "xz", "bz2"])
def test_an_empty_file_has_no_records(data: DataSpec, tmp_path: Path, ending: str) -> None:
    before = open_stream(data, str(tmp_path), 8, seed=0).identity
    (tmp_path / f"empty.jsonl.{ending}").touch()
    assert open_stream(data, str(tmp_path), 8, seed=0).identity == before


def test_no_record_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"`data.pattern: \*\*/\*` matches only empty files"):
        open_stream(data_of(tmp_path / "v", [""]), str(tmp_path / "v"), 12, 0)


def test_samples_without_complements_are_predicted_in_full() -> None:
    samples = torch.arange(6).view(1, 6)
    assert torch.equal(Batch.of(samples).targets, samples[:, 1:])


def test_the_tokenizers_file_is_not_a_record(tmp_path: Path, data: DataSpec, bpe_file: Path) -> None:
    (tmp_path / "v" / "tokenizer.json").write_bytes(bpe_file.read_bytes())
    bpe = data.model_copy(update={"tokenizer": Tokenizer.BPE, "tokenizer_file": "tokenizer.json"})
    assert isinstance(open_stream(bpe, str(tmp_path / "v"), 12, 0), PromptCompletionStream)


def test_truncated_completions_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [json.dumps({"prompt": "ab", "completion": "c" * count}) for count in (5, 6, 7)]
    open_stream(data_of(tmp_path / "v", lines), str(tmp_path / "v"), 8, 0)
    assert "truncated 1 of 3 completions" in caplog.text


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"messages": []}, "with the chat template of the model"),
        ({"instruction": "a", "output": "b"}, "it has `instruction`, `output`"),
        ([{"prompt": "a", "completion": "b"}], "each line must be one JSON object"),
    ],
)
def test_records_of_another_form_say_what_to_do(tmp_path: Path, record: object, says: str) -> None:
    with pytest.raises(CorruptRecordError, match=says):
        open_stream(data_of(tmp_path / "v", [json.dumps(record)]), str(tmp_path / "v"), 8, 0)


def test_padding_is_not_stored(tmp_path: Path, data: DataSpec) -> None:
    """Rows were stored in full: a million records of 4,096 tokens took 32 GiB on each rank."""
    stream = open_stream(data, str(tmp_path / "v"), 1 << 16, 0)
    assert isinstance(stream, PromptCompletionStream)
    stored = [value for value in vars(stream).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in stored) < 1024
    assert stream.batch(0, 1).shape == (1, (1 << 16) + 1)


def test_the_identity_is_that_of_padded_rows(tmp_path: Path, data: DataSpec) -> None:
    """Checkpoints of version 0.1.0 contain it: the hash of every record's row, in the order of the file."""
    rows = []
    for record in RECORDS:
        prompt, completion = (list(record[name].encode()) for name in ("prompt", "completion"))
        row = [*(-1 - token for token in prompt), *completion, 256]
        rows.append(row + [-257] * (13 - len(row)))
    digest = hashlib.sha256(torch.tensor(rows, dtype=torch.int64).numpy().tobytes()).hexdigest()
    assert open_stream(data, str(tmp_path / "v"), 12, 0).identity == f"{digest[:32]}/12/0"
