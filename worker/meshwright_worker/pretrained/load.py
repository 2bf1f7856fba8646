"""Published weights into the shards of any layout: each rank reads the rows it holds, nobody holds the whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from meshwright.models.architecture import Architecture
from meshwright.models.huggingface import ConfigError
from meshwright.models.pretrained import read_architecture
from meshwright_worker.models.initialize import local_shard
from meshwright_worker.parallel.shards import Shard
from meshwright_worker.pretrained.files import CONFIG, PretrainedError, TensorFiles
from meshwright_worker.pretrained.names import Source, sources

_IRRELEVANT = {"name"}


def load_pretrained(shards: Sequence[Shard], model: Architecture, directory: Path) -> str:
    """Fill shards from a directory with `config.json` and safetensors files.

    Returns:
        The fingerprint of the files; every rank should have the same.

    Raises:
        PretrainedError: there is no such model, it is another one than `model`, or a file is damaged.
    """
    check_architecture(model, directory)
    files = TensorFiles(directory)
    known = sources(model)
    for shard in shards:
        if shard.name not in known:
            raise PretrainedError(f"published weights have nothing for the parameter `{shard.name}`")
        source = known[shard.name]
        whole = shard.local if shard.whole is None else shard.whole
        _, box = local_shard(whole)
        published = files.find(source.tensor).map()
        expected = tuple(whole.shape)
        if published.ndim != len(expected) or not _holds(source, published, expected):
            raise PretrainedError(
                f"{directory}: `{source.tensor}` is {list(published.shape)}, which does not hold `{shard.name}` of "
                f"{list(expected)}"
            )
        with torch.no_grad():
            part = source.rows(published, box[0].start, box[0].stop)[(slice(None), *box[1:])]
            shard.local.copy_(part)
    return files.fingerprint


def check_architecture(model: Architecture, directory: Path) -> None:
    """Refuse weights of another model.

    Raises:
        PretrainedError: `config.json` is missing or describes another model.
    """
    try:
        found = read_architecture(directory / CONFIG)
    except OSError as error:
        raise PretrainedError(f"`training.initialWeights: {directory}` cannot be read: {error}") from error
    except ConfigError as error:
        raise PretrainedError(f"{directory / CONFIG}: {error}") from error
    there, here = found.model_dump(exclude=_IRRELEVANT), model.model_dump(exclude=_IRRELEVANT)
    differing = [f"`{n}` {there[n]} there, {here[n]} in `model`" for n in there if _differ(there, here, n)]
    if differing:
        raise PretrainedError(
            f"`training.initialWeights: {directory}` holds another model: {'; '.join(differing)}; say so in `model`"
        )


def _differ(there: dict[str, object], here: dict[str, object], field: str) -> bool:
    # transformers says neither what a GPT's rotary base would be, nor the other way round.
    return there[field] != here[field] and not (field == "rope_theta" and here["positions"])


def _holds(source: Source, published: torch.Tensor, shape: tuple[int, ...]) -> bool:
    there = tuple(published.shape[::-1] if source.transposed else published.shape)
    return there[1:] == shape[1:] and there[0] >= source.first + shape[0]
