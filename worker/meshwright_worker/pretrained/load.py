"""Loads published weights into the shards of any layout: each rank reads only its rows, no rank reads the full model.

Before that, their headers show whether they are complete and fit the model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from meshwright.api.mixture import Balancing
from meshwright.models.architecture import Architecture
from meshwright.models.differences import differing_fields
from meshwright.models.huggingface.config_fields import ConfigError
from meshwright.models.huggingface.model_type import TRAINING_FIELDS, ModelType
from meshwright.models.huggingface.reader import model_type_from_config, read_architecture, read_config
from meshwright_worker.checkpoint.safetensors_format import DTYPES
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.parallel.shards import ParameterShard
from meshwright_worker.pretrained.name_mapping import StackedSource, TensorSource, parameter_sources, published_tensors
from meshwright_worker.pretrained.tensor_files import CONFIG, TensorFiles
from meshwright_worker.rank.failures import PretrainedError
from meshwright_worker.rank.task import Progress, WorkProgress, no_report

log = logging.getLogger(__name__)

_BIASED = "mixture.balancing"
_LAYER = re.compile(r"(?:model\.|transformer\.)?(?:layers|h)\.(\d+)\.")
_COMPUTED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of the names of tensors that old files contain, and that are computed from `config.json`."""
_ROTARY = {"rope_theta", "rope_scaling"}
_HEAD = "lm_head.weight"
_COMPARED_ROWS = 64
_PART_BYTES = 64 * 1024 * 1024
"""The most bytes of a matrix that are read before progress is reported."""


def load_pretrained(
    shards: Sequence[ParameterShard],
    model: Architecture,
    directory: Path,
    buffers: Mapping[str, torch.Tensor] | None = None,
    progress: WorkProgress | None = None,
    *,
    begins: bool = True,
) -> str:
    """Fill shards from a directory with `config.json` and safetensors files.

    Args:
        shards: what this rank holds.
        model: what it is the shards of.
        directory: see above.
        buffers: the routers' balancing biases, which are filled where the files have some and stay 0 where not.
        progress: counts the bytes of the shards in the files.
        begins: whether the run begins with these weights. A run that goes on may have begun with weights that an
            earlier version did not reject.

    Returns:
        The fingerprint of the files; every rank should have the same.

    Raises:
        PretrainedError: there is no such model, it is another one than `model`, or a file is damaged.
    """
    published = check_architecture(model, directory)
    files = TensorFiles(directory)
    sources_by_name = parameter_sources(model, type_of_weights(directory))
    if begins:
        check_unused(model, files, directory)
    unknown = [shard.name for shard in shards if shard.name not in sources_by_name]
    if unknown:
        raise PretrainedError(f"the published weights have no tensor for the parameter `{unknown[0]}`")
    size = sum(_stored_size(shard.local, sources_by_name[shard.name], files, shard.box) for shard in shards)
    counted = (progress or WorkProgress()).begin("weights", size)
    for shard in shards:
        load_part(shard.local, sources_by_name[shard.name], files, tuple(shard.shape), shard.box, counted)
    if has_router_biases(published):
        for name, buffer in (buffers or {}).items():
            load_part(buffer, sources_by_name[name], files, tuple(buffer.shape), (slice(0, len(buffer)),))
    return files.fingerprint


def check_unused(model: Architecture, files: TensorFiles, directory: Path) -> None:
    """Reject weights that have more than the model, such as biases of a layer: its outputs would differ from theirs.

    Raises:
        PretrainedError: a layer of the model has such a tensor, or its output projection is another matrix than its
            embedding. The message names it.
    """
    _check_tied(model, files, directory)
    unused = [
        name
        for name in files.names_except(published_tensors(model, type_of_weights(directory)))
        if not name.endswith(_COMPUTED)
    ]
    in_layers = [name for name in unused if (found := _LAYER.match(name)) and int(found[1]) < model.layers]
    if in_layers:
        more = f" and {len(in_layers) - 1} more" if len(in_layers) > 1 else ""
        raise PretrainedError(
            f"`training.initialWeights: {directory}` has the tensor `{in_layers[0]}`{more}, which a model with its "
            "`config.json` does not have: its outputs would differ. Correct `config.json`, or remove the tensors"
        )
    if unused:
        log.info("%d tensors in %s are not used, such as %s", len(unused), directory, unused[0])


def _check_tied(model: Architecture, files: TensorFiles, directory: Path) -> None:
    """Reject an output projection of a model that uses its embedding for it, unless both are the same.

    Files may have the embedding twice. A projection that was trained apart differs in most rows: some are compared,
    unless rounding to another format has changed them.
    """
    if not model.tie_embeddings or not files.has(_HEAD):
        return
    embedding = parameter_sources(model)["embedding.weight"]
    assert isinstance(embedding, TensorSource)
    head, tied = files.find(_HEAD), files.find(embedding.tensor)
    rows, width = tied.shape
    same = head.shape == tied.shape and (
        head.format != tied.format
        or all(
            torch.equal(head.numbers(row * width, width), tied.numbers(row * width, width))
            for row in range(0, rows, max(1, rows // _COMPARED_ROWS))
        )
    )
    if not same:
        raise PretrainedError(
            f"`training.initialWeights: {directory}` has a `{_HEAD}` that differs from its `{embedding.tensor}`, and "
            "its `config.json` says that they are one (`tie_word_embeddings`): set that to false, and "
            "`model.tieEmbeddings` too, or remove the tensor"
        )


@torch.no_grad()
def load_part(
    target: torch.Tensor,
    source: TensorSource | StackedSource,
    files: TensorFiles,
    shape: tuple[int, ...],
    box: tuple[slice, ...],
    progress: Progress = no_report,
) -> None:
    """Fill `target` with the part `box` of a parameter of `shape`. `progress` counts the bytes that it has in the file.

    Raises:
        PretrainedError: the published tensor is missing or of another shape.
    """
    if isinstance(source, StackedSource):
        for row, part in enumerate(source.parts[box[0]]):
            load_part(target[row], part, files, shape[1:], box[1:], progress)
        return
    published = files.find(source.tensor).map()
    check_shape(source, published.shape, shape)
    first, last, _ = box[0].indices(shape[0])
    row_size = target[:1].numel() * published.itemsize
    # Rows of a transposed matrix are columns of the file, whose pages would be read once per part.
    step = max(1, last - first if source.transposed else _PART_BYTES // max(1, row_size))
    for start in range(first, last, step):
        stop = min(start + step, last)
        target[start - first : stop - first].copy_(source.rows(published, start, stop)[(slice(None), *box[1:])])
        progress((stop - start) * row_size)


def _stored_size(
    target: torch.Tensor, source: TensorSource | StackedSource, files: TensorFiles, box: tuple[slice, ...]
) -> int:
    """Bytes that `load_part` reads."""
    if isinstance(source, StackedSource):
        parts = enumerate(source.parts[box[0]])
        return sum(_stored_size(target[row], part, files, box[1:]) for row, part in parts)
    return target.numel() * DTYPES[files.find(source.tensor).format].itemsize


def has_router_biases(model: Architecture) -> bool:
    """Return whether the model's routers choose by scores plus biases."""
    return model.mixture is not None and model.mixture.balancing is Balancing.BIAS


def check_architecture(model: Architecture, directory: Path) -> Architecture:
    """Reject weights of another model; return the architecture that `config.json` describes.

    Raises:
        PretrainedError: `config.json` is missing or describes another model.
    """
    try:
        found = read_architecture(directory / CONFIG)
    except OSError as error:
        raise PretrainedError(f"`training.initialWeights: {directory}` cannot be read: {error}") from error
    except ConfigError as error:
        raise PretrainedError(f"{directory / CONFIG}: {error}") from error
    there, here = _shape(found), _shape(model)
    fields = [name for name in there if _differ(there, here, name)]
    if fields:
        named = {name: there[name] for name in fields}
        differing = "; ".join(differing_fields(named, here, "in `model`"))
        longer = ", or train a longer context with a copy of the directory whose `config.json` has your values"
        raise PretrainedError(
            f"`training.initialWeights: {directory}` contains another model: {differing}: change `model`"
            f"{longer if _ROTARY.issuperset(fields) else ''}"
        )
    return found


def type_of_weights(directory: Path) -> ModelType:
    """Return the model type of a directory, whose `config.json` has been read before.

    Raises:
        PretrainedError: it cannot be read any more.
    """
    try:
        return model_type_from_config(read_config(directory / CONFIG))
    except (OSError, ConfigError) as error:
        raise PretrainedError(f"{directory / CONFIG} cannot be read: {error}") from error


def is_same_shape(one: Architecture, other: Architecture) -> bool:
    """Return whether two models with the same parameters have the same outputs."""
    there, here = _shape(one), _shape(other)
    return not any(_differ(there, here, name) for name in there)


def _shape(model: Architecture) -> dict[str, object]:
    """Return the fields that determine a model's output. Balancing of a mixture in training is not among them, except
    by biases.
    """
    numbers: dict[str, object] = model.model_dump(exclude={"name", "mixture"})
    balancing = Balancing.BIAS.value if has_router_biases(model) else "no biases"
    mixture = None if model.mixture is None else model.mixture.model_dump(exclude=TRAINING_FIELDS)
    return numbers | {"mixture": mixture, _BIASED: balancing}


def _differ(there: dict[str, object], here: dict[str, object], field: str) -> bool:
    if field == _BIASED:
        # Biases that are missing in the files start at 0, where they have no effect.
        return there[field] == Balancing.BIAS.value != here[field]
    # transformers does not define the rotary base of a GPT, nor the reverse.
    return there[field] != here[field] and not (field == "rope_theta" and here["positions"])


def check_shape(source: TensorSource, published: torch.Size, shape: tuple[int, ...]) -> None:
    """Refuse a published tensor of another shape than the parameter's, or than that of all parameters that it contains.

    Raises:
        PretrainedError: see above.
    """
    there = tuple(published[::-1] if source.transposed else published)
    rows = source.published_rows(shape[0])
    if there != (rows, *shape[1:]):
        what = f"{source.parts} parameters" if source.parts > 1 and source.total is None else "a parameter"
        size = [rows if source.total is not None else shape[0], *shape[1:]]
        raise PretrainedError(f"`{source.tensor}` is {list(published)}, not {what} of {size}")


def check_pretrained(model: Architecture, directory: Path) -> None:
    """Reject a directory from which `load_pretrained` could not fill every parameter of the model.

    Raises:
        PretrainedError: a file is missing or truncated, or a tensor is missing or of another shape.
    """
    published = check_architecture(model, directory)
    files = TensorFiles(directory)
    sources_by_name = parameter_sources(model, type_of_weights(directory))
    with torch.device("meta"):
        whole = DecoderStage(model, torch.float32)
    tensors: dict[str, torch.Tensor] = dict(whole.named_parameters())
    if has_router_biases(published):
        tensors |= dict(whole.named_buffers())
    for name, tensor in tensors.items():
        source = sources_by_name.get(name)
        if source is None:
            raise PretrainedError(f"the published weights have no tensor for the parameter `{name}`")
        if isinstance(source, TensorSource):
            check_shape(source, files.find(source.tensor).shape, tuple(tensor.shape))
            continue
        for part in source.parts:
            check_shape(part, files.find(part.tensor).shape, tuple(tensor.shape[1:]))
