"""What a checkpoint costs: how long training waits for a save, how fast the save is, and how fast it is opened.

    .venv/bin/python benchmarks/checkpoint.py [--quick] [--json FILE] [--directory DIR] [--mib MIB] [--rounds N]

Saves are compared with raw sequential writes of the same bytes and with a synchronous save, taking turns in the same
run, each until fsync has returned. The index is that of 405B parameters on 16,384 ranks, which is made, not trained; it
is compared with the same index as JSON, of which a rank reads everything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _report import table, write_json
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from meshwright.models.presets import PRESETS
from meshwright_worker.checkpoint.binary_index import BINARY_INDEX, encode_binary
from meshwright_worker.checkpoint.dcp_storage import file_of_rank, metadata_of
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.files import LocalFiles, open_index
from meshwright_worker.checkpoint.manifest import (
    BINARY_INDEX_FORMAT,
    FileRecord,
    LayoutRecord,
    Manifest,
    TrainingState,
    encode_manifest,
    read_manifest,
)
from meshwright_worker.checkpoint.tensor_index import INDEX, Boxes, IndexedTensor, IndexInMemory, encode

TENSOR, PIPELINE, DATA = 8, 16, 128
"""The layout of 405B parameters: 16,384 ranks, with ZeRO-3 over the replicas."""
LIMIT_SECONDS, LIMIT_MIB = 2.0, 100.0
LIMIT_STALL, LIMIT_THROUGHPUT = 0.05, 0.80
"""Stall as a part of the synchronous save, and throughput as a part of that of raw writes."""
HIDDEN, INTERMEDIATE, VOCABULARY, LAYERS = 16384, 53248, 128256, 126
KEYS_AND_VALUES = 8 * 128
COLUMN, ROW, WHOLE = 0, 1, None
"""Which dimension tensor parallelism splits."""


def shapes() -> Iterator[tuple[str, int, tuple[int, ...], int | None]]:
    """(name, pipeline stage, shape, split dimension) of every parameter of Llama 3.1 405B."""
    yield "embedding.weight", 0, (VOCABULARY, HIDDEN), COLUMN
    for layer in range(LAYERS):
        stage, name = layer * PIPELINE // LAYERS, f"layers.{layer}"
        yield f"{name}.attention_norm.weight", stage, (HIDDEN,), WHOLE
        yield f"{name}.mlp_norm.weight", stage, (HIDDEN,), WHOLE
        yield f"{name}.attention.query.weight", stage, (HIDDEN, HIDDEN), COLUMN
        yield f"{name}.attention.key.weight", stage, (KEYS_AND_VALUES, HIDDEN), COLUMN
        yield f"{name}.attention.value.weight", stage, (KEYS_AND_VALUES, HIDDEN), COLUMN
        yield f"{name}.attention.output.weight", stage, (HIDDEN, HIDDEN), ROW
        yield f"{name}.mlp.gate.weight", stage, (INTERMEDIATE, HIDDEN), COLUMN
        yield f"{name}.mlp.up.weight", stage, (INTERMEDIATE, HIDDEN), COLUMN
        yield f"{name}.mlp.down.weight", stage, (HIDDEN, INTERMEDIATE), ROW
    yield "norm.weight", PIPELINE - 1, (HIDDEN,), WHOLE
    yield "output.weight", PIPELINE - 1, (VOCABULARY, HIDDEN), COLUMN


def box(shape: tuple[int, ...], split: int | None, data: int, tensor: int) -> tuple[list[int], list[int]]:
    """First index and size of a rank's part: the split dimension over tensor ranks, then the first over replicas."""
    offsets, sizes = [0] * len(shape), list(shape)
    if split is not None:
        sizes[split] //= TENSOR
        offsets[split] = tensor * sizes[split]
    rows = -(-sizes[0] // DATA)
    offsets[0] += data * rows
    sizes[0] = max(0, min(rows, sizes[0] - data * rows))
    return offsets, sizes


def made_index(data: int) -> IndexInMemory:
    """The index of parameters and both moments, as `data` replicas of the layout have saved them."""
    ends = np.zeros(data * PIPELINE * TENSOR, np.int64)
    tensors = {}
    for name, stage, shape, split in shapes():
        parts = [(d, t) for d in range(data) for t in range(TENSOR if split is not None else 1)]
        rows = [(*box(shape, split, d, t), (d * PIPELINE + stage) * TENSOR + t) for d, t in parts]
        offsets, sizes, ranks = (np.array(column, np.int64) for column in zip(*rows, strict=True))
        for copy in (f"model.{name}", f"optimizer.{name}.exp_avg", f"optimizer.{name}.exp_avg_sq"):
            boxes = Boxes(offsets, sizes, ranks, 65536 + ends[ranks])
            tensors[copy] = IndexedTensor(torch.float32, torch.Size(shape), boxes)
            ends[ranks] += 4 * sizes.prod(axis=1)
    return IndexInMemory([file_of_rank(rank) for rank in range(len(ends))], tensors)


def write_checkpoint(directory: Path, index: IndexInMemory, name: str, content: bytes) -> None:
    """A checkpoint without the files of tensors."""
    files = {file: FileRecord(size=1 << 40, crc32=number) for number, file in enumerate(index.files)}
    manifest = Manifest(
        format=BINARY_INDEX_FORMAT,
        state=TrainingState(step=1),
        architecture=PRESETS["tiny"],
        seed=0,
        sequence_length=8192,
        stream="made",
        layout=LayoutRecord(tensor=TENSOR, pipeline=PIPELINE, data=DATA, zero_stage=3),
        files={**files, name: FileRecord(size=len(content), crc32=0)},
    )
    path = CheckpointDirectory(directory).path(1)
    path.mkdir(parents=True)
    (path / name).write_bytes(content)
    (path / "meshwright.json").write_bytes(encode_manifest(manifest))


class LocalPart:
    """What torch asks a distributed tensor for: the box of this rank."""

    def __init__(self, offsets: list[int], sizes: list[int]) -> None:
        self._chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk]


def open_as_a_rank(path: Path, data: int) -> dict[str, float]:
    """Read the manifest and the index as a rank in the middle of the layout does. Run in a process of its own."""
    stage, replica, tensor = PIPELINE // 2, data // 2, TENSOR // 2
    tensors: dict[str, Any] = {}
    for name, at, shape, split in shapes():
        if at == stage:
            part = LocalPart(*box(shape, split, replica, tensor))
            tensors |= {f"model.{name}": part, f"optimizer.{name}.exp_avg": part, f"optimizer.{name}.exp_avg_sq": part}
    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak: imports have needed more than is in use now.
    before = peak_mib()
    started = time.perf_counter()
    manifest = read_manifest(path)
    read = time.perf_counter()
    metadata = metadata_of(open_index(LocalFiles(path)), tensors)
    ended = time.perf_counter()
    return {
        "seconds": ended - started,
        "manifest_seconds": read - started,
        "mib": peak_mib() - before,
        "files": len(manifest.files),
        "boxes": len(metadata.storage_data),
    }


def peak_mib() -> float:
    """The most memory that this process has had since the peak was reset."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def opened(path: Path, data: int) -> dict[str, float]:
    """`open_as_a_rank` in a new process, whose memory nothing else has grown."""
    command = [sys.executable, __file__, "--open", str(path), str(data)]
    result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def measure_saves(directory: str | None, mib: int, rounds: int) -> dict[str, Any]:
    """Print how saves compare, and return the numbers."""
    with tempfile.TemporaryDirectory(dir=directory) as root:
        command = [sys.executable, str(Path(__file__).with_name("_saving.py")), root, str(mib), str(rounds)]
        numbers: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    # Other load on the machine only makes writes slower: the fastest ones say most about the code.
    raw, whole = min(numbers["raw_seconds"]), numbers["bytes"]
    ways = numbers["ways"]
    synchronous = statistics.median(ways["synchronous"]["durable_seconds"])
    rows = [["raw writes", "", "", "", whole / raw / 1e6, "100%", ""]]
    for name, way in ways.items():
        stall, durable = statistics.median(way["stall_seconds"]), min(way["durable_seconds"])
        steps = statistics.median(way["step_seconds"]) / numbers["quiet_step_seconds"] if way["step_seconds"] else None
        way |= {"stall_ratio": stall / synchronous, "throughput_ratio": raw / durable, "step_ratio": steps}
        way["within_limits"] = stall <= LIMIT_STALL * synchronous and raw >= LIMIT_THROUGHPUT * durable
        part = [f"{way['stall_ratio']:.1%}", way["first_stall_seconds"], whole / durable / 1e6]
        slower = f"{steps:.2f}x" if steps is not None else ""
        rows.append([name, stall, *part, f"{way['throughput_ratio']:.0%}", slower])
    columns = ["way", "median stall s", "of synchronous", "first stall s", "best MB/s", "of raw", "steps meanwhile"]
    table(f"{rounds} saves of {whole >> 20} MiB by one rank, in each way", columns, rows)
    met = [name for name, way in ways.items() if way["within_limits"]]
    print(f"limits: stall {LIMIT_STALL:.0%}, throughput {LIMIT_THROUGHPUT:.0%}: met by {', '.join(met) or 'none'}")
    return numbers


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the same numbers")
    parser.add_argument("--quick", action="store_true", help="a sixteenth of the ranks, and small saves")
    parser.add_argument("--directory", help="where saves are written (default: the directory of temporary files)")
    parser.add_argument("--mib", type=int, help="MiB of a save (default: 512; 32 with --quick)")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each way (default: 5)")
    parser.add_argument("--open", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.open:
        print(json.dumps(open_as_a_rank(Path(args.open[0]), int(args.open[1]))))
        return
    saves = measure_saves(args.directory, args.mib or (32 if args.quick else 512), args.rounds)
    data = DATA // 16 if args.quick else DATA
    index = made_index(data)
    numbers: dict[str, Any] = {"saves": saves, "ranks": data * PIPELINE * TENSOR, "boxes": index.box_count}
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for key, name, encoder in (("binary", BINARY_INDEX, encode_binary), ("json", INDEX, encode)):
            content = encoder(index)
            write_checkpoint(Path(directory) / key, index, name, content)
            found = opened(CheckpointDirectory(Path(directory) / key).path(1), data)
            numbers[key] = {"bytes": len(content), **found}
            rows.append([key, f"{len(content) / 1e6:.1f} MB", f"{found['seconds']:.2f}", f"{found['mib']:.0f}"])
    title = f"index of 405B on {numbers['ranks']} ranks: {index.box_count} boxes"
    table(title, ["encoding", "size", "s to open by one rank", "MiB"], rows)
    binary = numbers["binary"]
    numbers["within_limits"] = binary["seconds"] <= LIMIT_SECONDS and binary["mib"] <= LIMIT_MIB
    print(f"limits: {LIMIT_SECONDS:.0f} s and {LIMIT_MIB:.0f} MiB: {'met' if numbers['within_limits'] else 'missed'}")
    write_json(args.json, numbers)


if __name__ == "__main__":
    main()
