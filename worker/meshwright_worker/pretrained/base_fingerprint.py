"""A fingerprint of published weights, by which a checkpoint of adapters recognizes the model that they belong to.

It covers the name and shape of every tensor that the model uses, and a sample of its numbers. It does not depend on
layout, on how the tensors are distributed over files, or on a number format that keeps every value. A model of 8
billion parameters takes about 600 reads of up to 4 KiB.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from meshwright.models.architecture import Architecture
from meshwright_worker.checkpoint.manifest import Manifest, has_other_base
from meshwright_worker.pretrained.load import type_of_weights
from meshwright_worker.pretrained.name_mapping import published_tensors
from meshwright_worker.pretrained.tensor_files import TensorFiles
from meshwright_worker.rank.failures import PretrainedError

_SCHEME = "1"
"""Changes with everything that changes the fingerprint of the same weights. Only fingerprints of one scheme compare."""
_RUNS, _RUN_LENGTH = 2, 512
"""Places in each tensor that are read, and numbers at each."""
_MAX_OF_A_KIND = 128
"""Tensors of each kind that are read: a mixture has tens of thousands of experts, of which any training changes all."""
_NUMBER = re.compile(r"\d+")


def base_fingerprint(model: Architecture, directory: Path) -> str:
    """Return the fingerprint of the weights in a directory, which has been checked to contain this model.

    Raises:
        PretrainedError: a file cannot be read, or a tensor is quantized.
    """
    files, digest = TensorFiles(directory), hashlib.sha256()
    names = published_tensors(model, type_of_weights(directory))
    for name in _sampled(name for name in names if files.has(name)):
        tensor = files.find(name)
        digest.update(f"{name}\0{list(tensor.shape)}\0".encode())
        count = tensor.shape.numel()
        for run in range(_RUNS):
            first = min(count * (run + 1) // (_RUNS + 1), max(0, count - _RUN_LENGTH))
            # In fp64 the numbers of all formats are exact.
            digest.update(tensor.numbers(first, min(_RUN_LENGTH, count)).double().numpy().tobytes())
    return f"{_SCHEME}-{digest.hexdigest()[:32]}"


def check_base(manifest: Manifest, directory: Path) -> None:
    """Reject a directory with other weights than those that the adapters of a checkpoint were trained on.

    Nothing is wrong if the checkpoint does not say which, because it has no adapters or an earlier version wrote it.

    Raises:
        PretrainedError: the weights differ; or as `base_fingerprint`.
    """
    if manifest.base_fingerprint is None:
        return
    found = base_fingerprint(manifest.architecture, directory)
    if has_other_base(manifest.base_fingerprint, found):
        raise PretrainedError(
            f"{directory} has other weights (fingerprint {found}) than the model that the adapters were trained on "
            f"({manifest.base_fingerprint}, then at {manifest.initial_weights}): pass the directory of that model with "
            "`--base`"
        )


def base_of_adapters(manifest: Manifest, base: Path | None) -> Path | None:
    """Return the directory of the model that adapters belong to: `base`, or where it was. None for random weights.

    Raises:
        PretrainedError: they belong to random weights, and `base` is given.
    """
    if manifest.initial_weights is not None:
        return base or Path(manifest.initial_weights)
    if manifest.lora is not None and base is not None:
        raise PretrainedError(
            "--base: the adapters belong to random weights, because `training.initialWeights` was not set: leave it out"
        )
    return None


def _sampled(names: Iterable[str]) -> list[str]:
    """Return the tensors to read: all, or of a kind that has many as many as allowed, evenly spaced."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        kinds.setdefault(_NUMBER.sub("#", name), []).append(name)
    found = []
    for kind in kinds.values():
        count = min(len(kind), _MAX_OF_A_KIND)
        found += [kind[index * len(kind) // count] for index in range(count)]
    return found
