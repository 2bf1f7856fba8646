"""A checkpoint as a Hugging Face model: `config.json` and safetensors files that transformers and others read.

One tensor after the other is read whole, so a file's worth of weights is the most that is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from meshwright.api.shape import Norm
from meshwright.models.architecture import Architecture
from meshwright.models.pretrained import config_of
from meshwright_worker.checkpoint.manifest import Manifest
from meshwright_worker.checkpoint.safetensors import write_tensors
from meshwright_worker.checkpoint.tensors import MODEL
from meshwright_worker.checkpoint.whole import CheckpointTensors
from meshwright_worker.models.initialize import draw
from meshwright_worker.models.llama import DecoderStage
from meshwright_worker.models.lora import DOWN, UP, merged
from meshwright_worker.pretrained.files import CONFIG, INDEX, SINGLE, TensorFiles
from meshwright_worker.pretrained.load import check_architecture
from meshwright_worker.pretrained.names import Source, sources

Reader = Callable[[str], torch.Tensor]
"""The whole parameter of a name, on the CPU."""


def export(
    checkpoint: Path, manifest: Manifest, output: Path, *, dtype: torch.dtype, file_bytes: int, base: Path | None = None
) -> list[str]:
    """Write a checkpoint into the new or empty directory `output`; the names of its safetensors files.

    Args:
        checkpoint: a complete checkpoint.
        manifest: its manifest.
        output: where to write.
        dtype: the format of the weights there.
        file_bytes: the most that one file may hold, unless one tensor alone is larger.
        base: the model that adapters belong to; None for where the manifest says.

    Raises:
        ConfigError: no published kind of model has this shape.
        PretrainedError: the model that adapters belong to cannot be read.
        FileExistsError: `output` holds something.
    """
    model = manifest.architecture
    config = {**config_of(model), "torch_dtype": str(dtype).removeprefix("torch.")}
    if output.exists() and any(output.iterdir()):
        raise FileExistsError(f"`--output {output}` is not empty: name a new directory")
    output.mkdir(parents=True, exist_ok=True)
    shapes = _shapes(model)
    groups = _groups(model)
    plan = list(_files(groups, shapes, dtype, file_bytes))
    reader = _reader(checkpoint, manifest, base)
    where: dict[str, str] = {}
    for number, tensors in enumerate(plan, start=1):
        file = SINGLE if len(plan) == 1 else f"model-{number:05d}-of-{len(plan):05d}.safetensors"
        content = {_full_name(model, name): _published(groups[name], shapes, reader, dtype) for name in tensors}
        write_tensors(output / file, content, {"format": "pt"})
        where |= dict.fromkeys(content, file)
    if len(plan) > 1:
        total = sum(shapes[name].numel() for group in groups.values() for name, _ in group) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (output / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    (output / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
    return sorted(set(where.values()))


def _groups(model: Architecture) -> dict[str, list[tuple[str, Source]]]:
    found: dict[str, list[tuple[str, Source]]] = {}
    for name, source in sources(model).items():
        found.setdefault(source.tensor, []).append((name, source))
    return found


def _shapes(model: Architecture) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in DecoderStage(model, torch.float32).named_parameters()}


def _files(
    groups: dict[str, list[tuple[str, Source]]], shapes: dict[str, torch.Size], dtype: torch.dtype, limit: int
) -> Iterator[list[str]]:
    file: list[str] = []
    size = 0
    for tensor, group in groups.items():
        own = sum(shapes[name].numel() for name, _ in group) * dtype.itemsize
        if file and size + own > limit:
            yield file
            file, size = [], 0
        file.append(tensor)
        size += own
    yield file


def _published(
    group: list[tuple[str, Source]], shapes: dict[str, torch.Size], reader: Reader, dtype: torch.dtype
) -> torch.Tensor:
    rows = sum(shapes[name][0] for name, _ in group)
    (name, first), *_ = group
    shape = (rows, *shapes[name][1:])
    whole = torch.empty(shape[::-1] if first.transposed else shape, dtype=dtype)
    for name, source in group:
        source.put(reader(name).to(dtype), whole)
    return whole


def _full_name(model: Architecture, tensor: str) -> str:
    if tensor.startswith("lm_head"):
        return tensor
    return f"transformer.{tensor}" if model.norm is Norm.LAYER_NORM else f"model.{tensor}"


def _reader(checkpoint: Path, manifest: Manifest, base: Path | None) -> Reader:
    stored = CheckpointTensors(checkpoint)
    lora = manifest.lora
    if lora is None:
        return lambda name: stored.read(f"{MODEL}.{name}")
    own = _base(manifest, base)

    def read(name: str) -> torch.Tensor:
        weight = own(name)
        path = f"{MODEL}.{name.rpartition('.')[0]}"
        try:
            down, up = stored.read(f"{path}.{DOWN}"), stored.read(f"{path}.{UP}")
        except KeyError:
            return weight
        return merged(weight, down, up, lora) if name.endswith(".weight") else weight

    return read


def _base(manifest: Manifest, base: Path | None) -> Reader:
    model = manifest.architecture
    found = base or (Path(manifest.initial_weights) if manifest.initial_weights else None)
    shapes = _shapes(model)
    if found is None:
        return lambda name: draw(name, shapes[name], model, manifest.seed)
    check_architecture(model, found)
    files, known = TensorFiles(found), sources(model)
    return lambda name: known[name].rows(files.find(known[name].tensor).map(), 0, shapes[name][0])
