"""A tokenizer with more ids than the model has rows is refused before ranks meet, whatever the text comes as."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from meshwright.api.data import DataFormat, DataSpec, MixturePart, Tokenizer
from meshwright.data.files import open_directory
from meshwright.data.tokenize import TextSource, tokenize
from meshwright.data.tokenizers import open_tokenizer
from meshwright.manifest_checksum import with_checksum
from meshwright_worker.data.corpus import CorpusError
from meshwright_worker.rank.failures import InvalidRunError
from meshwright_worker.rank.task import RankTask
from meshwright_worker.trainer.train import train
from meshwright_worker.trainer.vocabulary_check import check_vocabulary
from tests.distributed.cases import Recorder
from tests.distributed.configs import small_run

BPE = {"tokenizer": Tokenizer.BPE, "tokenizer_file": "tokenizer.json"}


def task_of(
    root: Path, data: dict[str, Any], *, vocab_size: int = 288, rank: int = 1, replicas: int = 1, **layout: Any
) -> RankTask:
    """A rank of several whose master is nowhere: it fails in another way as soon as it tries to meet anybody."""
    run = small_run(**layout, data=replicas, vocab_size=vocab_size)
    return RankTask(
        run=run.model_copy(update={"data": DataSpec(claim_name="text", **data)}),
        generation=1,
        rank=rank,
        world_size=run.layout.world_size,
        local_rank=0,
        local_world_size=1,
        worker=0,
        master_address="127.0.0.1",
        master_port=1,
        pod_address="127.0.0.1",
        checkpoint_dir=None,
        data_dir=str(root),
    )


@pytest.fixture
def volume(tmp_path: Path, bpe_file: Path, sentencepiece_file: Path) -> Path:
    root = tmp_path / "volume"
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        (root / name / "part.jsonl").write_text(json.dumps({"text": "the quick brown fox", "prompt": "a"}) + "\n")
        source = TextSource(open_directory(str(root / name)), kind=DataFormat.JSON_LINES)
        tokenize(source, open_tokenizer(Tokenizer.BPE, bpe_file), root / f"tokens-{name}")
    shutil.copy(bpe_file, root / "tokenizer.json")
    shutil.copy(sentencepiece_file, root / "text.model")
    return root


@pytest.mark.parametrize(
    "data",
    [
        {"format": DataFormat.TEXT},
        {"format": DataFormat.JSON_LINES, "pattern": "*/*.jsonl"},
        {"format": DataFormat.PROMPT_COMPLETION},
        {"format": DataFormat.TOKENS, "mixture": [MixturePart(path="tokens-a"), MixturePart(path="tokens-b")]},
        {"format": DataFormat.JSON_LINES, "mixture": [MixturePart(path="a"), MixturePart(path="b")]},
    ],
    ids=["text", "records", "instruction", "tokens", "mixture"],
)
def test_too_few_rows_are_rejected_before_ranks_connect(volume: Path, data: dict[str, Any]) -> None:
    message = (
        r"`model.vocabSize: 288` must be at least 300 for the ids of `data.tokenizerFile: tokenizer.json`, and "
        r"divisible by `parallelism.tensor: 2`; nearest: 300"
    )
    with pytest.raises(InvalidRunError, match=message):
        train(task_of(volume, {**BPE, **data}, tensor=2), Recorder())


def test_what_is_named_fits(volume: Path) -> None:
    with pytest.raises(InvalidRunError, match="nearest: 304"):
        check(task_of(volume, BPE, vocab_size=296, tensor=8))
    check(task_of(volume, BPE, vocab_size=304, tensor=8))
    check(task_of(volume, BPE, vocab_size=300, tensor=2))
    check(task_of(volume, {"tokenizer": Tokenizer.SENTENCE_PIECE, "tokenizer_file": "text.model"}, vocab_size=64))


def test_tokens_that_say_more_than_their_tokenizer(volume: Path) -> None:
    manifest = volume / "tokens-b" / "meshwright-tokens.json"
    manifest.write_text(json.dumps(with_checksum({**json.loads(manifest.read_text()), "vocabulary": 310})))
    parts = [MixturePart(path="tokens-a"), MixturePart(path="tokens-b")]
    task = task_of(volume, {**BPE, "format": DataFormat.TOKENS, "mixture": parts}, vocab_size=304)
    with pytest.raises(InvalidRunError, match="at least 310 for the ids of the tokens in tokens-b.*nearest: 310"):
        check(task)


def test_each_island_has_a_tokenizer_of_its_own(volume: Path, tmp_path: Path) -> None:
    islands = tmp_path / "islands"
    shutil.copytree(volume, islands / "island-1")
    outer = {"method": "FedAvg", "every_steps": 2, "islands": 2}
    for rank, named in (
        (0, "island-0 is not a directory"),
        (1, "island-0 is not"),
        (2, "at least 300"),
        (3, "at least 300"),
    ):
        task = task_of(islands, BPE, rank=rank, outer=outer, tensor=2, replicas=2)
        assert task.world_size == 4
        with pytest.raises(ValueError, match=named):
            check(task)


def test_tokenizers_need_a_place_for_their_file(volume: Path) -> None:
    task = task_of(volume, BPE)
    with pytest.raises(CorpusError, match="no data volume is mounted"):
        check(RankTask(**{**{name: getattr(task, name) for name in RankTask.__slots__}, "data_dir": None}))


def check(task: RankTask) -> None:
    check_vocabulary(task)
