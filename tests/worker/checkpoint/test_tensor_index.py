"""The index of a checkpoint: both encodings say the same, a rank reads its part, and damage is seen."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright_worker.checkpoint import dcp_storage, save_plan
from meshwright_worker.checkpoint.binary_index import BINARY_INDEX, BinaryIndex, encode_binary
from meshwright_worker.checkpoint.dcp_storage import file_of_rank, metadata_of
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.files import LocalFiles, open_index
from meshwright_worker.checkpoint.full_tensors import FullTensorReader, find_checkpoint
from meshwright_worker.checkpoint.loader import load_tensors
from meshwright_worker.checkpoint.manifest import (
    BINARY_INDEX_FORMAT,
    FileRecord,
    LayoutRecord,
    Manifest,
    TrainingState,
    read_manifest,
)
from meshwright_worker.checkpoint.tensor_index import (
    IndexedTensor,
    IndexInMemory,
    TensorIndex,
    decode,
    encode,
    make_boxes,
)
from tests.worker.checkpoint.saving import save_alone
from tests.worker.checkpoint.test_checkpoint_files import ARCHITECTURE

RANKS = 1300


def grid(rows: int, columns: int) -> IndexedTensor:
    """A matrix in rows x columns boxes of 4 x 3, each in the file of another rank."""
    places = [(row, column) for row in range(rows) for column in range(columns)]
    boxes = make_boxes(
        [[row * 4, column * 3] for row, column in places],
        [[4, 3]] * len(places),
        [number % RANKS for number in range(len(places))],
        [64 + 48 * (number // RANKS) for number in range(len(places))],
        2,
    )
    return IndexedTensor(torch.float32, torch.Size([rows * 4, columns * 3]), boxes)


INDEX = IndexInMemory(
    [file_of_rank(rank) for rank in range(RANKS)],
    {
        "matrix": grid(130, 10),
        "scalar": IndexedTensor(torch.int64, torch.Size([]), make_boxes([[]], [[]], [3], [8], 0)),
        "empty": IndexedTensor(torch.bfloat16, torch.Size([0, 3]), make_boxes([[0, 0]], [[0, 3]], [7], [80], 2)),
        "nothing": IndexedTensor(torch.bool, torch.Size([2]), make_boxes([], [], [], [], 1)),
    },
)


def binary(content: bytes) -> BinaryIndex:
    return BinaryIndex(lambda offset, length: content[offset : offset + length])


def described(index: TensorIndex) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in index.names:
        boxes = index.boxes(name)
        places = [(index.files[file], start) for file, start in zip(boxes.files, boxes.starts, strict=True)]
        found[name] = (index.dtype(name), index.shape(name), boxes.offsets.tolist(), boxes.sizes.tolist(), places)
    return found


def test_both_encodings_say_the_same() -> None:
    assert described(binary(encode_binary(INDEX))) == described(decode(encode(INDEX))) == described(INDEX)


def test_a_grid_takes_little_space() -> None:
    assert len(encode_binary(INDEX)) < len(encode(INDEX)) / 8


def test_only_the_boxes_of_the_tensors_that_are_loaded_are_read() -> None:
    random = np.random.default_rng(0).integers(0, 1 << 40, (2, 200_000)).tolist()
    boxes = make_boxes([[0]] * 200_000, [[1]] * 200_000, [0] * 200_000, random[0], 1)
    large = IndexInMemory(["f"], {str(n): IndexedTensor(torch.uint8, torch.Size([1]), boxes) for n in range(4)})
    content = encode_binary(large)
    reads: list[int] = []

    def read(offset: int, length: int) -> bytes:
        reads.append(length)
        return content[offset : offset + length]

    index = BinaryIndex(read)
    assert (len(reads), index.names) == (1, ["0", "1", "2", "3"])
    assert index.boxes("3").starts.tolist() == random[0]
    assert sum(reads) < 0.55 * len(content)


@pytest.mark.parametrize(("offsets", "sizes"), [((5, 4), (7, 2)), ((0, 0), (520, 30)), ((519, 29), (1, 1))])
def test_the_boxes_of_a_part_are_those_that_overlap_it(offsets: tuple[int, int], sizes: tuple[int, int]) -> None:
    matrix = INDEX.boxes("matrix")
    wanted = [
        tuple(first)
        for first in matrix.offsets.tolist()
        if all(a < o + s and o < a + b for a, b, o, s in zip(first, (4, 3), offsets, sizes, strict=True))
    ]
    assert [tuple(first) for first in matrix.overlapping(offsets, sizes).offsets.tolist()] == wanted != []


def test_torch_plans_from_the_boxes_of_the_local_parts_only() -> None:
    full = metadata_of(INDEX)
    assert len(full.storage_data) == INDEX.box_count
    part = metadata_of(INDEX, {"scalar": torch.zeros((), dtype=torch.int64)})
    assert set(part.state_dict_metadata) == set(full.state_dict_metadata)
    assert [index.fqn for index in part.storage_data] == ["scalar"]


def test_every_flipped_byte_of_a_binary_index_is_seen() -> None:
    small = IndexInMemory(["f"], {"a": INDEX._tensors["scalar"], "b": INDEX._tensors["empty"]})
    content = encode_binary(IndexInMemory(INDEX.files[:8], dict(small.items())))
    expected = described(binary(content))
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        with pytest.raises(ValueError, match="index"):
            described(binary(bytes(flipped)))
    for length in range(len(content)):
        with pytest.raises(ValueError, match="index"):
            described(binary(content[:length]))
    assert described(binary(content)) == expected


def test_a_block_that_expands_to_more_than_it_should_is_rejected() -> None:
    content = bytearray(encode_binary(IndexInMemory(["f"], {"a": INDEX._tensors["scalar"]})))
    bomb = zlib.compress(b"\0" * (1 << 20))
    index = binary(bytes(content))
    index._tensors["a"][4:] = [len(bomb), zlib.crc32(bomb)]
    index._read = lambda offset, length: bomb
    index._beginning = b""
    with pytest.raises(ValueError, match="another number of boxes"):
        index.boxes("a")


def test_files_of_many_ranks_are_in_subdirectories() -> None:
    assert file_of_rank(1023) == "rank-01023.safetensors"
    assert file_of_rank(16383) == "ranks-015/rank-16383.safetensors"


def test_a_checkpoint_with_a_binary_index_is_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_storage, "MAX_JSON_BOXES", 1)
    monkeypatch.setattr(save_plan, "file_of_rank", lambda rank: file_of_rank(1999 + rank))
    tensors = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.tensor([True, False])}
    directory = CheckpointDirectory(tmp_path)
    manifest = Manifest(
        format=BINARY_INDEX_FORMAT,
        state=TrainingState(step=5),
        architecture=ARCHITECTURE,
        seed=0,
        sequence_length=8,
        stream="s",
        layout=LayoutRecord(tensor=1, pipeline=1, data=2000, zero_stage=0),
    )

    def commit(files: dict[str, FileRecord]) -> None:
        assert sorted(files) == ["ranks-001/rank-01999.safetensors", BINARY_INDEX]
        directory.commit(manifest.model_copy(update={"files": files}))

    save_alone(tensors, directory.prepare(5), commit)
    path, found = find_checkpoint(tmp_path)
    assert (path, found.format) == (directory.path(5), BINARY_INDEX_FORMAT)
    assert read_manifest(path).files.keys() == found.files.keys()
    assert open_index(LocalFiles(path)).names == ["a", "b"]
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_tensors(loaded, path, None)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert torch.equal(FullTensorReader(path).read("a"), tensors["a"])
