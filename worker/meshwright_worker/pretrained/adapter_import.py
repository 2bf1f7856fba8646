"""Reads an adapter in the format of PEFT into the shards of any layout, to train it further.

The headers show whether it is the adapter that `training.lora` describes. Each rank then reads only its own rows and
columns. A module of several matrices (queries, keys and values of GPT-2 and Phi-3) has one adapter, in one of two
forms: with the rank of each matrix, where all read the same A, or with the sum of their ranks, as an export has it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meshwright.api.lora import LoraSpec, LoraTarget
from meshwright.models.architecture import Architecture
from meshwright.models.huggingface.model_type import ModelType
from meshwright_worker.checkpoint.manifest import has_other_base
from meshwright_worker.checkpoint.provenance import EXPORT_RECORD, parent_at
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.lora import DOWN, UP, apply_lora, is_adapter
from meshwright_worker.parallel.shards import ParameterShard
from meshwright_worker.pretrained.adapted_modules import AdaptedModule, adapted_modules
from meshwright_worker.pretrained.name_mapping import TensorSource
from meshwright_worker.pretrained.peft_config import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MERGE,
    PeftConfig,
    check_weights_file,
    read_peft_config,
)
from meshwright_worker.pretrained.tensor_files import TensorFiles
from meshwright_worker.rank.failures import PretrainedError
from meshwright_worker.rank.task import Progress, no_report


@dataclass(frozen=True, slots=True)
class _Part:
    """Where one parameter of an adapter is."""

    tensor: str
    first: int
    """Its first row in A, or its first column in B."""
    outputs: TensorSource | None
    """Which rows of B it is; None for A."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that is the one of `training.lora`."""

    files: TensorFiles
    fingerprint: str
    """Of its files; every rank should have the same."""
    parts: Mapping[str, _Part]
    """By the name of the parameter."""

    @torch.no_grad()
    def load(self, shards: Sequence[ParameterShard], progress: Progress = no_report) -> None:
        """Fill the shards of its parameters. `progress` counts the bytes of the shards."""
        for shard in shards:
            part = self.parts[shard.name]
            stored, rank = self.files.find(part.tensor).map(), shard.shape[0 if part.outputs is None else 1]
            own = slice(part.first, part.first + rank)
            if part.outputs is None:
                shard.local.copy_(stored[own][shard.box])
            else:
                first, last, _ = shard.box[0].indices(shard.shape[0])
                shard.local.copy_(part.outputs.rows(stored[:, own], first, last)[:, shard.box[1]])
            progress(shard.local.nbytes)


def open_adapter(model: Architecture, model_type: ModelType, lora: LoraSpec, directory: Path) -> Adapter:
    """Open the adapter in a directory, which must be the one that `lora` describes, of a model of that type.

    Raises:
        PretrainedError: there is none, a file is damaged, or it has another rank or scale or other matrices than
            `lora`. The message names the field and the value that it needs.
    """
    config = read_peft_config(directory)
    check_weights_file(directory)
    files = TensorFiles(directory, ADAPTER_WEIGHTS)
    _check_targets(model, model_type, lora, files.names, directory)
    shapes = _adapter_shapes(model, lora)
    modules = adapted_modules(model, model_type, shapes)
    for module in modules:
        _check_shapes(module, shapes, config, files)
    shared = _reads_one_down(modules, lora, files, directory)
    _check_scale(modules, lora, config, directory)
    parts: dict[str, _Part] = {}
    for module in modules:
        if not shared:
            _check_blocks(module, shapes, lora, files, directory)
        for number, (path, source) in enumerate(module.matrices.items()):
            first = 0 if shared else number * lora.rank
            parts[f"{path}.{DOWN}"] = _Part(module.down, first, None)
            parts[f"{path}.{UP}"] = _Part(module.up, first, _outputs(source))
    content = (directory / ADAPTER_CONFIG).read_bytes() + files.fingerprint.encode()
    return Adapter(files, hashlib.sha256(content).hexdigest(), parts)


def check_adapter_base(directory: Path, weights: str, fingerprint: str | None) -> None:
    """Reject an adapter that was trained on other weights than those that the run has. An adapter of another program,
    or of an export that does not say so, is not compared.

    Args:
        directory: the adapter's directory.
        weights: directory of the run's initial weights.
        fingerprint: their `base_fingerprint`.

    Raises:
        PretrainedError: see above.
    """
    record = parent_at(str(directory))
    if has_other_base(record.base_fingerprint, fingerprint):
        raise PretrainedError(
            f"`training.initialWeights: {weights}` has other weights (fingerprint {fingerprint}) than the model that "
            f"the adapter in {directory} was trained on ({record.base_fingerprint}): name the directory of that model"
        )


def _adapter_shapes(model: Architecture, lora: LoraSpec) -> dict[str, torch.Size]:
    """Return the shape of every parameter of the adapters."""
    with torch.device("meta"):
        stage = DecoderStage(model, torch.float32)
    apply_lora(stage, lora)
    return {name: parameter.shape for name, parameter in stage.named_parameters() if is_adapter(name)}


def _outputs(source: TensorSource) -> TensorSource:
    """B has a row per output also where the module stores its weight transposed."""
    return replace(source, transposed=False)


def _check_targets(
    model: Architecture, model_type: ModelType, lora: LoraSpec, names: Collection[str], directory: Path
) -> None:
    """Reject an adapter of other modules than those of `lora.targets`.

    Raises:
        PretrainedError: see above.
    """
    stored, file = set(names), directory / ADAPTER_WEIGHTS
    every = lora.model_copy(update={"targets": list(LoraTarget)})
    modules = adapted_modules(model, model_type, _adapter_shapes(model, every))
    unknown = sorted(stored - {name for module in modules for name in (module.down, module.up)})
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise PretrainedError(
            f"{file} has the tensor `{unknown[0]}`{more}, which `training.lora` cannot train: {MERGE}"
        )
    for module in modules:
        missing = {module.down, module.up} - stored
        if len(missing) == 1:
            raise PretrainedError(f"{file} has no tensor `{missing.pop()}`: copy the file again")
    there = {module.name for module in modules if module.down in stored}
    wanted = {module.name for module in modules if any(_target(path) in lora.targets for path in module.matrices)}
    if there == wanted:
        return
    full = [target for target in LoraTarget if (named := _named(target, modules)) and named <= there]
    partial = sorted(there.difference(*(_named(target, modules) for target in full)))
    if partial:
        lacking = min(_named(_target_of(partial[0], modules), modules) - there)
        raise PretrainedError(
            f"{file} has an adapter of `{partial[0]}` and none of `{lacking}`, and `training.lora` trains those of "
            f"every layer: {MERGE}"
        )
    raise PretrainedError(
        f"`training.lora.targets` must be {_list(full)}, the matrices that the adapter in {directory} has, got "
        f"{_list(lora.targets)}"
        if full
        else f"{file} has no adapter of a matrix: copy the file again"
    )


def _target(path: str) -> LoraTarget:
    """The target whose name is the last part of a matrix's path."""
    return LoraTarget(path.rpartition(".")[2].capitalize())


def _target_of(name: str, modules: Sequence[AdaptedModule]) -> LoraTarget:
    return next(_target(path) for module in modules if module.name == name for path in module.matrices)


def _named(target: LoraTarget, modules: Sequence[AdaptedModule]) -> set[str]:
    """The modules with a matrix of that target."""
    return {module.name for module in modules if any(_target(path) is target for path in module.matrices)}


def _list(targets: Sequence[LoraTarget]) -> str:
    return f"[{', '.join(target.value for target in targets)}]"


def _check_shapes(
    module: AdaptedModule, shapes: Mapping[str, torch.Size], config: PeftConfig, files: TensorFiles
) -> None:
    """Reject tensors that do not fit the model, or the rank in the configuration.

    Raises:
        PretrainedError: see above.
    """
    (path, source), rank = next(iter(module.matrices.items())), config.rank_of(module.name)
    inputs, outputs = shapes[f"{path}.{DOWN}"][1], source.published_rows(shapes[f"{path}.{UP}"][0])
    for name, expected in ((module.down, (rank, inputs)), (module.up, (outputs, rank))):
        stored = files.find(name)
        if tuple(stored.shape) != expected:
            raise PretrainedError(
                f"`{name}` in {stored.path} is {list(stored.shape)}, and {list(expected)} in this model with the rank "
                f"of `{ADAPTER_CONFIG}`: name the adapter of this model"
            )


def _reads_one_down(modules: Sequence[AdaptedModule], lora: LoraSpec, files: TensorFiles, directory: Path) -> bool:
    """Return whether the matrices of a module read the same A; if not, each has rows of its own.

    Raises:
        PretrainedError: `lora` has another rank than the adapter, or the adapter has several.
    """
    stored = {module.name: files.find(module.down).shape[0] for module in modules}
    separate = {stored[module.name] / len(module.matrices) for module in modules}
    shared = {
        stored[module.name] / (1 if len(module.matrices) == module.parts else len(module.matrices))
        for module in modules
    }
    if lora.rank in separate and len(separate) == 1:
        return False
    if lora.rank in shared and len(shared) == 1:
        return True
    exported = (directory / EXPORT_RECORD).is_file()
    for ranks in (separate, shared) if exported else (shared, separate):
        if len(ranks) == 1 and (rank := ranks.copy().pop()).is_integer():
            raise PretrainedError(
                f"`training.lora.rank` must be {rank:.0f}, the rank of the adapter in {directory}, got {lora.rank}"
            )
    low, high = (choose(stored, key=lambda name: stored[name]) for choose in (min, max))
    raise PretrainedError(
        f"the adapter in {directory} has the rank {stored[low]} for `{low}` and {stored[high]} for `{high}`, and "
        f"`training.lora.rank` is that of all: {MERGE}"
    )


def _check_scale(modules: Sequence[AdaptedModule], lora: LoraSpec, config: PeftConfig, directory: Path) -> None:
    """Reject an adapter whose output is scaled by another factor than `alpha / rank` of `lora`.

    Raises:
        PretrainedError: see above.
    """
    scales = {module.name: config.scale_of(module.name) for module in modules}
    low, high = (choose(scales, key=lambda name: scales[name]) for choose in (min, max))
    if not math.isclose(scales[low], scales[high], rel_tol=1e-6):
        raise PretrainedError(
            f"the adapter in {directory} is scaled by {scales[low]:g} for `{low}` and by {scales[high]:g} for `{high}`"
            f", and by `training.lora.alpha / rank` for all: {MERGE}"
        )
    if not math.isclose(scales[low], lora.alpha / lora.rank, rel_tol=1e-6):
        raise PretrainedError(
            f"`training.lora.alpha` must be {scales[low] * lora.rank:.9g}, with which the adapter in {directory} was "
            f"trained, got {lora.alpha:.9g}"
        )


def _check_blocks(
    module: AdaptedModule, shapes: Mapping[str, torch.Size], lora: LoraSpec, files: TensorFiles, directory: Path
) -> None:
    """Reject a B of several matrices in which one reads rows of A that are another's, or is not among `lora.targets`.

    Raises:
        PretrainedError: see above.
    """
    if module.parts == 1:
        return
    stored = files.find(module.up).map()
    own = torch.zeros_like(stored)
    for number, (path, source) in enumerate(module.matrices.items()):
        columns = slice(number * lora.rank, (number + 1) * lora.rank)
        rows = _outputs(source)
        rows.write_into(rows.rows(stored[:, columns], 0, shapes[f"{path}.{UP}"][0]), own[:, columns])
    if not torch.equal(stored, own):
        what, targets = "queries, keys and values", "`Query`, `Key` and `Value`"
        if ".mlp." in module.name:
            what, targets = "both matrices of SwiGLU", "`Gate` and `Up`"
        raise PretrainedError(
            f"the adapter of `{module.name}` in {directory} is of {what}: `training.lora.targets` must contain "
            f"{targets}, and `training.lora.rank` must be {stored.shape[1]}"
        )
