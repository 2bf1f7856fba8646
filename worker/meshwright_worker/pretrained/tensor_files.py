"""A directory of safetensors files as one set of named tensors, mapped into memory: only accessed parts are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright_worker.checkpoint.safetensors_format import DTYPES, map_tensor
from meshwright_worker.rank.failures import PretrainedError

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
FLOATS = ("F64", "F32", "F16", "BF16")
"""The formats of weights, by their names in the files."""
_LARGEST_HEADER = 100 * 1024 * 1024
_PREFIXES = ("", "model.", "transformer.")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of a tensor's bytes."""

    path: Path
    offset: int
    format: str
    """Name of its number format in the file."""
    shape: torch.Size

    def map(self) -> torch.Tensor:
        """The tensor, mapped into memory."""
        return map_tensor(self.path, self.offset, DTYPES[self.format], self.shape)

    def numbers(self, first: int, count: int) -> torch.Tensor:
        """Read `count` numbers from the flat index `first` on, without the read-ahead that a mapped file causes.

        Raises:
            PretrainedError: the file cannot be read.
        """
        dtype = DTYPES[self.format]
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset + first * dtype.itemsize)
                content = file.read(count * dtype.itemsize)
        except OSError as error:
            raise PretrainedError(f"{self.path} cannot be read: {error}") from error
        return torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)


class TensorFiles:
    """The tensors of a directory, by the index file's list of files, or of the one file without an index; or of `file`.

    Raises:
        PretrainedError: there are no such files, or one is damaged.
    """

    def __init__(self, directory: Path, file: str | None = None) -> None:
        self._directory = directory
        self._tensors: dict[str, StoredTensor] = {}
        files, file_of = self._files() if file is None else ([file], {})
        for file in files:
            found = _header(directory / file)
            # A tensor that is in several files is taken from the one that the index names.
            self._tensors |= {name: tensor for name, tensor in found.items() if file_of.get(name, file) == file}

    @property
    def names(self) -> list[str]:
        """Every tensor's name."""
        return list(self._tensors)

    def names_except(self, used: Collection[str]) -> list[str]:
        """The tensors whose names, without a prefix, are not among `used`."""
        return [name for name in self._tensors if not any(name.removeprefix(prefix) in used for prefix in _PREFIXES)]

    def has(self, name: str) -> bool:
        """Whether `find` would find the tensor."""
        return any(prefix + name in self._tensors for prefix in _PREFIXES)

    @property
    def fingerprint(self) -> str:
        """Hash of names, formats, shapes and offsets: equal if two machines see the same files."""
        lines = (f"{n}\0{t.path.name}\0{t.offset}\0{t.format}\0{tuple(t.shape)}" for n, t in self._tensors.items())
        return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()

    def find(self, name: str) -> StoredTensor:
        """Return the tensor of that name. Files of one model may or may not prefix names with `model.` or
        `transformer.`.

        Raises:
            PretrainedError: there is no such tensor, or its numbers are quantized.
        """
        for prefix in _PREFIXES:
            found = self._tensors.get(prefix + name)
            if found is not None and found.format not in FLOATS:
                raise PretrainedError(
                    f"`{name}` in {found.path} has the format {found.format}: use weights in {', '.join(FLOATS)}"
                )
            if found is not None:
                return found
        raise PretrainedError(f"{self._directory} has no tensor `{name}`, which its `config.json` requires")

    def _files(self) -> tuple[list[str], dict[str, str]]:
        """The files, and the file of each tensor that the index names."""
        index = self._directory / INDEX
        if not index.is_file():
            if not (self._directory / SINGLE).is_file():
                raise PretrainedError(
                    f"{self._directory} contains neither `{INDEX}` nor `{SINGLE}`{_what_it_has(self._directory)}"
                )
            return [SINGLE], {}
        try:
            file_of: dict[str, str] = dict(json.loads(index.read_bytes())["weight_map"])
            files = sorted(set(file_of.values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PretrainedError(f"{index} is not an index of safetensors files: {error!r}") from None
        foreign = [file for file in files if not isinstance(file, str) or Path(file).name != file]
        if foreign:
            raise PretrainedError(f"{index} names {foreign[0]!r}, which is not a file in its directory")
        return files, file_of


def _what_it_has(directory: Path) -> str:
    """The weights in another form that a directory has, and what to do. Empty if it has none."""
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    adapters = [name for name in names if name.startswith("adapter_model.")]
    if adapters:
        return f": `{adapters[0]}` is an adapter; name it in `training.lora.initialAdapter`, and its model here"
    parts = [name for name in names if name.endswith(".safetensors")]
    if parts:
        return f": it has `{parts[0]}`; download the index too, or the files of the format of transformers"
    other = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf"))]
    return f": it has `{other[0]}`; convert it to safetensors" if other else ""


def _header(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LARGEST_HEADER:
                raise PretrainedError(f"{path} is not a safetensors file: its header would have {length} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
        size = path.stat().st_size
        found = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            kind, shape = str(entry["dtype"]), torch.Size(entry["shape"])
            # A format that torch does not have here matters only if the model needs the tensor.
            expected = shape.numel() * DTYPES[kind].itemsize if kind in DTYPES else end - begin
            if not 0 <= begin <= end <= size - 8 - length or end - begin != expected:
                raise PretrainedError(f"{path} is shorter than its header says, at `{name}`: download it again")
            found[name] = StoredTensor(path, 8 + length + begin, kind, shape)
    except OSError as error:
        raise PretrainedError(f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, PretrainedError):
            raise
        raise PretrainedError(f"{path} is not a safetensors file with supported formats: {error!r}") from None
    return found
