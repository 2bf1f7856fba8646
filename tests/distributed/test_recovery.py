"""Whole runs: interrupted, stopped, resumed, loaded into other layouts, from damaged checkpoints."""

from __future__ import annotations

import json
import pickletools
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.data import DataFormat, DataSpec
from meshwright.api.precision import Precision
from meshwright.data.files import open_directory
from meshwright.data.tokenize import TextSource, tokenize
from meshwright.data.tokenizers import ByteTokenizer
from meshwright.protocol.messages import FailureKind
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.dcp_storage import CheckpointReader
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.full_tensors import FullTensorReader, find_checkpoint
from meshwright_worker.checkpoint.loader import load_tensors
from meshwright_worker.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from meshwright_worker.inference.model import load_full_model
from meshwright_worker.inference.sampling import sample
from meshwright_worker.rank.task import Outcome
from tests.distributed.cases import Recorder, load_only, lose_a_rank, train_fully, train_on_own_text
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import DEATH, RankFailedError, RankPool
from tests.tiers import mostly_long


def losses(recorder: Recorder) -> dict[int, float]:
    return {report.step: report.loss for report in recorder.reports}


def manifest_of(root: Path, step: int) -> Manifest:
    return read_manifest(CheckpointDirectory(root).path(step))


def tensors_of(root: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, read in this process alone."""
    path = CheckpointDirectory(root).path(step)
    index = CheckpointReader(path).read_metadata().state_dict_metadata
    tensors = {name: torch.full(entry.size, float("nan")) for name, entry in index.items()}  # type: ignore[union-attr]
    load_tensors(tensors, path, None)
    return tensors


def complete(
    pool: RankPool, run: NativeRun, root: Path, text: Path, **arguments: Any
) -> list[tuple[Outcome | None, Recorder]]:
    arguments = {"stop_rank": -1, "stop_after": None, "die_after": None, **arguments}
    answers: list[tuple[Outcome | None, Recorder]] = pool.run(
        train_fully, run, *arguments.values(), checkpoint_dir=root, data_dir=text
    )
    return answers


def is_pickle(content: bytes) -> bool:
    try:
        return bool(list(pickletools.genops(content)))
    except ValueError:
        return False


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 0xFF
    path.write_bytes(content)


def test_a_run_from_start_to_end(pool: RankPool, tmp_path: Path, text: Path) -> None:
    (outcome, recorder), *others = complete(pool, small_run(data=2, steps=8, every=3), tmp_path, text)
    assert outcome is Outcome.COMPLETE
    assert recorder.phases == ["data", "rendezvous", "build", "load", "first-step"]
    assert recorder.began_at == 0
    assert [report.step for report in recorder.reports] == list(range(1, 9))
    assert [report.samples for report in recorder.reports] == [8 * step for step in range(1, 9)]
    stalls = [report.checkpoint_stall_seconds for report in recorder.reports]
    assert stalls[:3] == [0.0] * 3, "nothing is saved before step 3"
    # Step 6, after which another save is due, waits for the one of step 3.
    assert 0 < stalls[3] <= stalls[5] < stalls[6] <= stalls[7], "steps 3 and 6 were saved"
    assert recorder.checkpoints == [3, 6, 8]
    assert [other.checkpoints for _, other in others] == [[]]
    assert recorder.reports[-1].loss < recorder.reports[0].loss
    assert CheckpointDirectory(tmp_path).steps() == [8, 6]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert manifest_of(tmp_path, 8).state.loss == recorder.reports[-1].loss.hex()


@pytest.mark.parametrize(
    "layout",
    [
        *(pytest.param(layout, marks=pytest.mark.long) for layout in ((1, 1, 1, 0), (2, 1, 1, 0), (2, 2, 1, 0))),
        (1, 1, 2, 3),
    ],
    ids=str,
)
def test_an_interrupted_run_ends_bitwise_where_an_uninterrupted_one_does(
    pool: RankPool, tmp_path: Path, text: Path, layout: tuple[int, int, int, int]
) -> None:
    tensor, pipeline, data, zero = layout
    run = small_run(tensor, pipeline, data, zero=zero, steps=8, every=3)
    ((_, straight), *_) = complete(pool, run, tmp_path / "straight", text)
    ((outcome, _), *_) = complete(pool, run, tmp_path / "broken", text, die_after=7)
    assert outcome is None
    ((outcome, resumed), *_) = complete(pool, run, tmp_path / "broken", text)
    assert outcome is Outcome.COMPLETE
    assert resumed.began_at in (3, 6)  # the save of step 6 was perhaps not durable yet
    assert losses(resumed) == {s: loss for s, loss in losses(straight).items() if s > resumed.began_at}
    assert manifest_of(tmp_path / "broken", 8).state == manifest_of(tmp_path / "straight", 8).state
    want, got = tensors_of(tmp_path / "straight", 8), tensors_of(tmp_path / "broken", 8)
    assert set(want) == set(got)
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_a_stop_of_any_rank_stops_all_after_the_same_step_and_saves_it(
    pool: RankPool, tmp_path: Path, text: Path
) -> None:
    run = small_run(tensor=2, pipeline=2, steps=8, every=100)
    answers = complete(pool, run, tmp_path, text, stop_rank=3, stop_after=4)
    assert {outcome for outcome, _ in answers} == {Outcome.STOPPED}
    assert {recorder.reports[-1].step for _, recorder in answers} == {4}
    assert answers[0][1].checkpoints == [4]
    answers = complete(pool, run, tmp_path, text)
    assert {(outcome, recorder.began_at) for outcome, recorder in answers} == {(Outcome.COMPLETE, 4)}


def test_a_stop_during_the_last_step_completes(pool: RankPool, tmp_path: Path, text: Path) -> None:
    ((outcome, _), *_) = complete(pool, small_run(steps=4), tmp_path, text, stop_rank=0, stop_after=4)
    assert outcome is Outcome.COMPLETE


def test_a_finished_run_is_complete_at_once(pool: RankPool, tmp_path: Path, text: Path) -> None:
    complete(pool, small_run(steps=3), tmp_path, text)
    ((outcome, recorder), *_) = complete(pool, small_run(steps=3), tmp_path, text)
    assert (outcome, recorder.began_at, recorder.reports) == (Outcome.COMPLETE, 3, [])


def test_a_flipped_bit_ends_the_run_before_it_is_trained_on(pool: RankPool, tmp_path: Path, text: Path) -> None:
    tokens = tmp_path / "tokens"
    tokenize(TextSource(open_directory(str(text)), "**/*.py"), ByteTokenizer(), tokens)
    run = small_run(steps=2)
    run = run.model_copy(update={"data": DataSpec(claim_name="v", format=DataFormat.TOKENS)})
    ((outcome, _),) = pool.run(train_fully, run, data_dir=tokens)
    assert outcome is Outcome.COMPLETE
    shard = bytearray((tokens / "00000.tokens").read_bytes())
    shard[-3] ^= 16
    (tokens / "00000.tokens").write_bytes(shard)
    with pytest.raises(
        RankFailedError, match=r"DataError: .*/tokens/00000\.tokens is damaged: wrong checksum of bytes 0 to "
    ):
        pool.run(train_fully, run, data_dir=tokens)


def test_without_checkpoints_nothing_is_written(pool: RankPool, tmp_path: Path, text: Path) -> None:
    ((outcome, recorder),) = pool.run(train_fully, small_run(steps=3), data_dir=text)
    assert (outcome, recorder.checkpoints) == (Outcome.COMPLETE, [])


def test_a_checkpoint_loads_exactly_into_every_layout(pool: RankPool, tmp_path: Path, text: Path) -> None:
    complete(pool, small_run(tensor=2, pipeline=2, steps=4), tmp_path, text)
    want = tensors_of(tmp_path, 4)
    layouts = [(1, 1, 2, 3), (1, 1, 1, 0), (2, 1, 2, 2), (1, 3, 1, 0), (2, 1, 1, 0)]
    for tensor, pipeline, data, zero in layouts:
        run = small_run(tensor, pipeline, data, zero=zero, micro_batches=4, steps=4)
        answers = pool.run(load_only, run, checkpoint_dir=tmp_path, data_dir=text)
        assert set().union(*(tensors for _, tensors in answers)) == set(want)
        for step, tensors in answers:
            assert step == 4
            assert all(torch.equal(tensor, want[name]) for name, tensor in tensors.items())


def test_changing_the_layout_twice_loses_and_repeats_no_sample(pool: RankPool, tmp_path: Path, text: Path) -> None:
    """TP 2 x PP 2, then DP 2 with ZeRO 3, then one process: the digest and the losses of a straight run."""
    ((_, straight), *_) = complete(pool, small_run(steps=9), tmp_path / "straight", text)
    root = tmp_path / "changed"
    seen: dict[int, float] = {}
    for layout, stop_after in (({"tensor": 2, "pipeline": 2}, 3), ({"data": 2, "zero": 3}, 6), ({}, None)):
        ((_, recorder), *_) = complete(
            pool, small_run(**layout, steps=9), root, text, stop_rank=0, stop_after=stop_after
        )
        seen |= losses(recorder)
    assert seen == pytest.approx(losses(straight), rel=1e-4)
    assert manifest_of(root, 9).state.digest == manifest_of(tmp_path / "straight", 9).state.digest
    assert manifest_of(root, 9).state.samples == 72


def test_another_seed_feeds_other_samples(pool: RankPool, tmp_path: Path, text: Path) -> None:
    for seed in (1, 2):
        complete(pool, small_run(steps=2, seed=seed), tmp_path / str(seed), text)
    assert manifest_of(tmp_path / "1", 2).state.digest != manifest_of(tmp_path / "2", 2).state.digest


@pytest.mark.parametrize(
    "victim", mostly_long(["rank-00001.safetensors", "tensors.json", MANIFEST], lambda file: file != "tensors.json")
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    pool: RankPool, tmp_path: Path, text: Path, victim: str
) -> None:
    run = small_run(tensor=2, steps=6, every=2)
    ((_, straight), *_) = complete(pool, run, tmp_path, text)
    assert CheckpointDirectory(tmp_path).steps() == [6, 4]
    damage(CheckpointDirectory(tmp_path).path(6) / victim)
    ((outcome, resumed), *_) = complete(pool, run, tmp_path, text)
    assert (outcome, resumed.began_at) == (Outcome.COMPLETE, 4)
    assert losses(resumed)[6] == losses(straight)[6]
    assert CheckpointDirectory(tmp_path).steps() == [6, 4]


def test_unfinished_checkpoints_are_invisible_and_removed(pool: RankPool, tmp_path: Path, text: Path) -> None:
    unfinished = CheckpointDirectory(tmp_path, generation=1).prepare(2)
    (unfinished / "rank-00000.safetensors").write_bytes(b"half")
    ((_, recorder), *_) = complete(pool, small_run(steps=2), tmp_path, text)
    assert recorder.began_at == 0
    assert not unfinished.exists()


def test_a_checkpoint_of_another_model_or_text_is_rejected(pool: RankPool, tmp_path: Path, text: Path) -> None:
    complete(pool, small_run(steps=2), tmp_path, text)
    with pytest.raises(RankFailedError, match=r"another model \(`layers` 3 there, 2 here\)"):
        complete(pool, small_run(steps=4, layers=2), tmp_path, text)
    with pytest.raises(RankFailedError, match="another stream of samples"):
        complete(pool, small_run(steps=4, seed=5), tmp_path, text)


def test_a_checkpoint_of_another_optimizer_names_the_field(pool: RankPool, tmp_path: Path, text: Path) -> None:
    complete(pool, small_run(steps=2), tmp_path, text)
    muon = small_run(steps=4, optimizer={"name": "Muon"})
    with pytest.raises(RankFailedError, match=r"no `optimizer\..*\.momentum`: .* another `training\.optimizer\.name`"):
        complete(pool, muon, tmp_path, text)


def test_ranks_that_see_different_texts_are_rejected(pool: RankPool, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "text.py").write_text("x = 1\n" * (50 + rank))
    with pytest.raises(RankFailedError, match="the ranks see different texts"):
        pool.run(train_on_own_text, small_run(pipeline=2), data_dir=tmp_path)


@pytest.mark.parametrize(
    ("layout", "lost"),
    mostly_long(
        [
            ((2, 1, 1, 0), 0),
            ((1, 2, 1, 0), 0),
            ((1, 2, 1, 0), 1),
            ((1, 1, 2, 0), 1),
            ((1, 1, 2, 3), 0),
            ((2, 2, 1, 0), 3),
        ],
        lambda case: case[0] != (2, 2, 1, 0) and case != ((1, 2, 1, 0), 0),
    ),
    ids=str,
)
def test_a_lost_rank_is_not_attributed_to_others(
    pool: RankPool, tmp_path: Path, text: Path, layout: tuple[int, int, int, int], lost: int
) -> None:
    tensor, pipeline, data, zero = layout
    run = small_run(tensor, pipeline, data, zero=zero, steps=100, every=100)
    answers = pool.run(lose_a_rank, run, lost, checkpoint_dir=tmp_path, data_dir=text)
    assert answers[lost] == DEATH
    others = [answer.value for rank, answer in enumerate(answers) if rank != lost]
    assert {kind for kind, _ in others} == {FailureKind.PEER_LOST}, others


def test_a_checkpoint_that_cannot_be_written_fails_the_run(pool: RankPool, tmp_path: Path, text: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RankFailedError, match="cannot use the checkpoints' volume: .* Not a directory"):
        complete(pool, small_run(steps=2), tmp_path / "file" / "below", text)


def test_no_file_of_a_checkpoint_is_a_pickle(pool: RankPool, tmp_path: Path, text: Path) -> None:
    complete(pool, small_run(tensor=2, steps=2), tmp_path, text)
    files = list(CheckpointDirectory(tmp_path).path(2).iterdir())
    assert {file.suffix for file in files} == {".json", ".safetensors"}
    for file in files:
        content = file.read_bytes()
        assert not is_pickle(content)
        header = content[8 : 8 + int.from_bytes(content[:8], "little")] if file.suffix == ".safetensors" else content
        json.loads(header)


@pytest.mark.long
def test_text_is_written_from_a_checkpoint_of_any_layout(pool: RankPool, tmp_path: Path, text: Path) -> None:
    complete(pool, small_run(tensor=2, pipeline=2, steps=2), tmp_path, text)
    path, manifest = find_checkpoint(tmp_path)
    want = tensors_of(tmp_path, 2)
    stored = FullTensorReader(path)
    assert all(torch.equal(stored.read(name), tensor) for name, tensor in want.items())
    written = [
        sample(load_full_model(path, manifest, Precision.FP32, 16), [100, 101], 20, 0.8, seed) for seed in (1, 1, 2)
    ]
    assert written[0] == written[1] != written[2]
    assert all(0 <= token <= 256 for token in written[0])
