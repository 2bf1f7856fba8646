"""What a checkpoint directory holds, without the numbers that training came to: those differ from CPU to CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.manifest import MANIFEST
from meshwright_worker.checkpoint.tensor_index import INDEX


def structure(root: Path) -> dict[str, Any]:
    """The checkpoints of a directory and, of the newest, the files, the manifest and every tensor's boxes."""
    newest = CheckpointDirectory(root).path(CheckpointDirectory(root).steps()[0])
    return {
        "checkpoints": sorted(entry.name for entry in root.iterdir()),
        "manifest": _manifest(newest),
        **{f"tensor {name}": entry for name, entry in _tensors(newest).items()},
    }


def exported(output: Path) -> dict[str, Any]:
    """What an exported model holds: the JSON files, and each tensor's type, shape and bytes in its file."""
    found: dict[str, Any] = {}
    for file in output.iterdir():
        if file.suffix == ".json":
            found[file.name] = json.loads(file.read_bytes())
        else:
            found |= {f"{file.name} {name}": entry for name, entry in _header(file)[0].items()}
    return found


def _manifest(checkpoint: Path) -> dict[str, Any]:
    """With sizes, without checksums and the loss. The manifest's own size changes with the digits of those."""
    manifest: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_bytes())
    present = {file.name: file.stat().st_size for file in checkpoint.iterdir() if file.name != MANIFEST}
    assert present == {name: record["size"] for name, record in manifest["files"].items()}
    manifest["files"] = {name: {**record, "crc32": "<crc32>"} for name, record in manifest["files"].items()}
    # It covers the checksums of files, whose last bits are the processor's.
    manifest["checksum"] = "<checksum>"
    if manifest["state"]["loss"]:
        manifest["state"]["loss"] = "<loss>"
    return manifest


def _tensors(checkpoint: Path) -> dict[str, Any]:
    """The index: by name type, shape and boxes, each by its first index, shape, file and first byte there.

    The files' own headers must say the same, and hold nothing else.
    """
    index: dict[str, Any] = json.loads((checkpoint / INDEX).read_bytes())
    headers = {file.name: _header(file) for file in checkpoint.glob("*.safetensors")}
    for name, entry in index.items():
        for first, shape, file, start in entry["boxes"]:
            header, data = headers[file]
            stored = name if shape == entry["shape"] else f"{name}@{','.join(map(str, first))}"
            described = header.pop(stored)
            assert (described["dtype"], described["shape"]) == (entry["dtype"], shape), f"{stored} in {file}"
            assert data + described["data_offsets"][0] == start, f"{stored} in {file}"
    rest = {file: header for file, (header, _) in headers.items() if header}
    assert not rest, f"the index lacks {rest}"
    return index


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file and its first byte after that."""
    content = file.read_bytes()
    data = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:data])
    assert data + max(entry["data_offsets"][1] for entry in header.values() if "dtype" in entry) == len(content)
    return header, data
