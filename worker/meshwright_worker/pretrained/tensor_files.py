"""A directory of safetensors files as one set of named tensors, mapped into memory: only accessed parts are read."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright_worker.checkpoint.safetensors_format import DTYPES, map_tensor
from meshwright_worker.rank.failures import PretrainedError

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
_LARGEST_HEADER = 100 * 1024 * 1024
_PREFIXES = ("", "model.", "transformer.")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of a tensor's bytes."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: torch.Size

    def map(self) -> torch.Tensor:
        """The tensor, mapped into memory."""
        return map_tensor(self.path, self.offset, self.dtype, self.shape)


class TensorFiles:
    """The tensors of a directory, by the index file's list of files, or of the one file without an index.

    Raises:
        PretrainedError: there are no such files, or one is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tensors: dict[str, StoredTensor] = {}
        for file in self._files():
            self._tensors |= _header(directory / file)

    @property
    def names(self) -> list[str]:
        """Every tensor's name."""
        return list(self._tensors)

    @property
    def fingerprint(self) -> str:
        """Hash of names, formats, shapes and offsets: equal if two machines see the same files."""
        lines = (f"{n}\0{t.path.name}\0{t.offset}\0{t.dtype}\0{tuple(t.shape)}" for n, t in self._tensors.items())
        return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()

    def find(self, name: str) -> StoredTensor:
        """Return the tensor of that name. Files of one model may or may not prefix names with `model.` or
        `transformer.`.

        Raises:
            PretrainedError: there is no such tensor.
        """
        for prefix in _PREFIXES:
            found = self._tensors.get(prefix + name)
            if found is not None:
                return found
        raise PretrainedError(f"{self._directory} has no tensor `{name}`, which its `config.json` requires")

    def _files(self) -> list[str]:
        index = self._directory / INDEX
        if not index.is_file():
            if not (self._directory / SINGLE).is_file():
                raise PretrainedError(f"{self._directory} contains neither `{INDEX}` nor `{SINGLE}`")
            return [SINGLE]
        try:
            files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PretrainedError(f"{index} is not an index of safetensors files: {error!r}") from None
        foreign = [file for file in files if not isinstance(file, str) or Path(file).name != file]
        if foreign:
            raise PretrainedError(f"{index} names {foreign[0]!r}, which is not a file in its directory")
        return files


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
            dtype, shape = DTYPES[entry["dtype"]], torch.Size(entry["shape"])
            if not 0 <= begin <= end <= size - 8 - length or end - begin != shape.numel() * dtype.itemsize:
                raise PretrainedError(f"{path} is shorter than its header says, at `{name}`: download it again")
            found[name] = StoredTensor(path, 8 + length + begin, dtype, shape)
    except OSError as error:
        raise PretrainedError(f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, PretrainedError):
            raise
        raise PretrainedError(f"{path} is not a safetensors file with supported formats: {error!r}") from None
    return found
