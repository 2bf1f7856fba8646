"""Exports a checkpoint as a Hugging Face model: `config.json` and safetensors files.

Full tensors are read one after the other, so memory use is at most one file of weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from meshwright.models.architecture import Architecture
from meshwright.models.huggingface.config_fields import ConfigError
from meshwright.models.huggingface.model_type import ModelType
from meshwright.models.huggingface.reader import architecture_from_config, model_type_from_config, read_architecture
from meshwright.models.huggingface.registry import config_from_architecture, model_type_of
from meshwright_worker.checkpoint.files import CheckpointPath
from meshwright_worker.checkpoint.full_tensors import FullTensorReader
from meshwright_worker.checkpoint.manifest import Manifest
from meshwright_worker.checkpoint.provenance import Provenance
from meshwright_worker.checkpoint.safetensors_format import write_tensors
from meshwright_worker.checkpoint.state_dict import MODEL
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.init_weights import initial_parameter
from meshwright_worker.models.lora import DOWN, UP, merge_adapter
from meshwright_worker.pretrained.base_fingerprint import base_of_adapters, check_base
from meshwright_worker.pretrained.load import check_architecture, is_same_shape, load_part, type_of_weights
from meshwright_worker.pretrained.name_mapping import StackedSource, TensorSource, parameter_sources
from meshwright_worker.pretrained.tensor_files import CONFIG, INDEX, SINGLE, TensorFiles

Piece = tuple[str, TensorSource, int | None]
"""A parameter, the rows of a published tensor that it is, and which of its experts that is; None for a whole one."""

Reader = Callable[[str], torch.Tensor]
"""Returns the full parameter of a name, on the CPU."""


def export(
    checkpoint: CheckpointPath,
    manifest: Manifest,
    output: Path,
    *,
    dtype: torch.dtype,
    file_bytes: int,
    base: Path | None = None,
) -> list[str]:
    """Write a checkpoint into the new or empty directory `output`; the names of its safetensors files.

    Args:
        checkpoint: a complete checkpoint.
        manifest: its manifest.
        output: where to write.
        dtype: the format of the weights there, except of routers' biases, which are in fp32.
        file_bytes: the most that one file may hold, unless one tensor alone is larger.
        base: the model that adapters belong to; None for where the manifest says.

    Raises:
        ConfigError: no published kind of model has this shape.
        PretrainedError: the model that adapters belong to cannot be read, or is another one.
        FileExistsError: `output` holds something.
    """
    model = manifest.architecture
    base_config = _base_config(manifest, base)
    model_type = _exported_type(model, base_config)
    config = {
        **config_from_architecture(model, _max_sequence_length(manifest, base_config), model_type),
        **special_tokens(base_config, manifest.tokenizer.end_token if manifest.tokenizer is not None else None),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    # The experts of a layer are one parameter here and many published tensors, one after the other.
    reader = lru_cache(maxsize=1)(_reader(checkpoint, manifest, base))
    make_output(output)
    shapes = _shapes(model)
    groups = _groups(model, model_type)
    plan = list(_files(groups, shapes, dtype, file_bytes))
    where: dict[str, str] = {}
    for number, tensors in enumerate(plan, start=1):
        file = SINGLE if len(plan) == 1 else f"model-{number:05d}-of-{len(plan):05d}.safetensors"
        content = {
            published_name(model_type, name): _published(groups[name], shapes, reader, _format_of(groups[name], dtype))
            for name in tensors
        }
        write_tensors(output / file, content, {"format": "pt"})
        where |= dict.fromkeys(content, file)
    if len(plan) > 1:
        total = sum(_size(group, shapes) * _format_of(group, dtype).itemsize for group in groups.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (output / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    (output / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
    return sorted(set(where.values()))


def make_output(output: Path) -> None:
    """Create the directory of an export.

    Raises:
        FileExistsError: it holds something.
    """
    if output.exists() and any(output.iterdir()):
        raise FileExistsError(f"`--output {output}` is not empty: choose a new directory")
    output.mkdir(parents=True, exist_ok=True)


def _exported_type(model: Architecture, base_config: Mapping[str, Any]) -> ModelType:
    """Return the type of the model that training began from, if the trained model has its shape."""
    with suppress(ConfigError):
        found = model_type_from_config(base_config)
        if found.write is not None and is_same_shape(architecture_from_config(base_config), model):
            return found
    return model_type_of(model)


def _groups(model: Architecture, model_type: ModelType) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = {}
    for name, source in parameter_sources(model, model_type).items():
        if isinstance(source, StackedSource):
            found |= {part.tensor: [(name, part, expert)] for expert, part in enumerate(source.parts)}
        else:
            found.setdefault(source.tensor, []).append((name, source, None))
    return found


def _size(group: list[Piece], shapes: dict[str, torch.Size]) -> int:
    return sum(_shape_of(piece, shapes).numel() for piece in group)


def _format_of(group: list[Piece], dtype: torch.dtype) -> torch.dtype:
    """Return the format of a published tensor. Routers' biases are in fp32, as DeepSeek publishes them: training moves
    them in steps that bf16 cannot represent, and rounded ones choose other experts.
    """
    return torch.float32 if group[0][0].endswith(".router.bias") else dtype


def _shape_of(piece: Piece, shapes: dict[str, torch.Size]) -> torch.Size:
    name, _, expert = piece
    return shapes[name] if expert is None else shapes[name][1:]


def _shapes(model: Architecture) -> dict[str, torch.Size]:
    with torch.device("meta"):
        stage = DecoderStage(model, torch.float32)
    return {name: tensor.shape for name, tensor in (*stage.named_parameters(), *stage.named_buffers())}


def _files(
    groups: dict[str, list[Piece]], shapes: dict[str, torch.Size], dtype: torch.dtype, limit: int
) -> Iterator[list[str]]:
    file: list[str] = []
    size = 0
    for tensor, group in groups.items():
        own = _size(group, shapes) * _format_of(group, dtype).itemsize
        if file and size + own > limit:
            yield file
            file, size = [], 0
        file.append(tensor)
        size += own
    yield file


def _published(group: list[Piece], shapes: dict[str, torch.Size], reader: Reader, dtype: torch.dtype) -> torch.Tensor:
    own = [_shape_of(piece, shapes) for piece in group]
    shape = (sum(part[0] for part in own), *own[0][1:])
    whole = torch.empty(shape[::-1] if group[0][1].transposed else shape, dtype=dtype)
    for name, source, expert in group:
        parameter = reader(name)
        source.write_into(parameter if expert is None else parameter[expert], whole)
    return whole


def published_name(model_type: ModelType, tensor: str) -> str:
    """Return the full name of a published tensor, with the prefix of its model type."""
    if tensor.startswith("lm_head"):
        return tensor
    return f"{model_type.prefix}.{tensor}"


def _reader(checkpoint: CheckpointPath, manifest: Manifest, base: Path | None) -> Reader:
    stored = FullTensorReader(checkpoint)
    lora = manifest.lora
    if lora is None:
        return lambda name: stored.read(f"{MODEL}.{name}")
    own = _base_reader(manifest, base)

    def read(name: str) -> torch.Tensor:
        try:
            # Learned state besides adapters: the routers' biases.
            return stored.read(f"{MODEL}.{name}")
        except KeyError:
            weight = own(name)
        path = f"{MODEL}.{name.rpartition('.')[0]}"
        try:
            down, up = stored.read(f"{path}.{DOWN}"), stored.read(f"{path}.{UP}")
        except KeyError:
            return weight
        return merge_adapter(weight, down, up, lora) if name.endswith(".weight") else weight

    return read


def base_model_dir(manifest: Manifest, base: Path | None) -> Path | None:
    """Return the directory of the model that adapters belong to, or that training began from, if known."""
    if base is not None:
        return base
    if manifest.initial_weights:
        return Path(manifest.initial_weights)
    found = _initial_weights(manifest.provenance)
    return next((path for path in found if _has_shape(path, manifest.architecture)), None)


def _initial_weights(record: Provenance | None) -> Iterator[Path]:
    """Yield the weights that a run began from, and those of the runs that it continues."""
    while record is not None:
        training = record.spec.get("training")
        weights = training.get("initialWeights") if isinstance(training, dict) else None
        if isinstance(weights, str):
            yield Path(weights)
        record = record.parent.provenance if record.parent is not None else None


def _has_shape(directory: Path, model: Architecture) -> bool:
    try:
        return is_same_shape(read_architecture(directory / CONFIG), model)
    except (OSError, ConfigError):
        return False


def _base_config(manifest: Manifest, base: Path | None) -> dict[str, Any]:
    """Return the `config.json` of the model that training began from. Empty if there is none."""
    found = base_model_dir(manifest, base)
    with suppress(OSError, ValueError):
        config = json.loads((found / CONFIG).read_text()) if found else {}
        return config if isinstance(config, dict) else {}
    return {}


def _max_sequence_length(manifest: Manifest, base_config: Mapping[str, Any]) -> int:
    """Return the longest sequence length that the model was trained on, in this run or before."""
    configured_length = base_config.get("max_position_embeddings", 0)
    return max(manifest.sequence_length, configured_length if isinstance(configured_length, int) else 0)


def special_tokens(base_config: Mapping[str, Any], separator: int | None) -> dict[str, Any]:
    """Return the fields of a `config.json` with the tokens that begin, end and pad a text.

    They are those of the model that training began from. A text also ends at the token after each document of the run.
    Without them, transformers would take those of its own defaults, such as token 2 of a Llama.
    """
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    known = {name: base_config.get(name) for name in names if name in base_config or not base_config}
    ends = known.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if separator is not None and separator not in ends:
        known["eos_token_id"] = [*ends, separator] if ends else separator
    return known


def _base_reader(manifest: Manifest, base: Path | None) -> Reader:
    model = manifest.architecture
    found = base_of_adapters(manifest, base)
    shapes = _shapes(model)
    if found is None:
        return lambda name: initial_parameter(name, shapes[name], model, manifest.seed, tiled=manifest.weights_in_tiles)
    check_architecture(model, found)
    check_base(manifest, found)
    files, sources_by_name = TensorFiles(found), parameter_sources(model, type_of_weights(found))

    def read(name: str) -> torch.Tensor:
        whole = torch.empty(shapes[name])
        load_part(
            whole, sources_by_name[name], files, tuple(shapes[name]), tuple(slice(0, size) for size in shapes[name])
        )
        return whole

    return read
