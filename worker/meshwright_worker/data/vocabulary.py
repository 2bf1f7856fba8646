"""Whether the model's embedding has a row for every id of the tokenizer, known before any process group forms.

An id without a row would raise deep inside a kernel; under tensor parallelism it belongs to no rank's part, and so
would be a zero embedding and a wrong loss without any sign. Only the tokenizer's file and the manifests of tokens are
read: neither text nor shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from meshwright.api.data import DataFormat, DataSpec, Tokenizer
from meshwright.data.shards import read_manifest
from meshwright.models.architecture import Architecture
from meshwright_worker.data.corpus import folder_of, root_of
from meshwright_worker.data.prepared import tokenizer_of
from meshwright_worker.outer.text import is_federated
from meshwright_worker.task import RankTask
from meshwright_worker.validate import InvalidRunError


def check_vocabulary(task: RankTask, model: Architecture, data: DataSpec) -> None:
    """Refuse a model whose vocabulary is smaller than what this rank's text is written in.

    Raises:
        InvalidRunError: names the nearest vocabulary that has a row for every id and divides over the ranks.
        DataError: the tokenizer or a manifest cannot be read.
    """
    where, needed = max(_vocabularies(data, _own_root(task)), key=lambda found: found[1])
    if needed <= model.vocab_size:
        return
    tensor = task.run.tensor
    raise InvalidRunError(
        f"`model.vocabSize: {model.vocab_size}` must be at least {needed} for the ids of {where}, and divisible by "
        f"`parallelism.tensor: {tensor}`; nearest: {-(-needed // tensor) * tensor}"
    )


def _vocabularies(data: DataSpec, root: str | None) -> Iterator[tuple[str, int]]:
    """What holds ids, and one above the largest of them."""
    if data.tokenizer is Tokenizer.BYTE:
        yield "`data.tokenizer: Byte`", tokenizer_of(data, "").vocabulary
    else:
        yield f"`data.tokenizerFile: {data.tokenizer_file}`", tokenizer_of(data, root_of(data, root)).vocabulary
    if data.format is DataFormat.TOKENS:
        paths: Iterable[str | None] = (part.path for part in data.mixture) if data.mixture else [None]
        for path in paths:
            manifest = read_manifest(folder_of(data, root, path))
            yield f"the tokens in {path or root_of(data, root)}", manifest.vocabulary


def _own_root(task: RankTask) -> str | None:
    training, root = task.run.training, task.data_dir
    if training is None or root is None or not is_federated(training):
        return root
    # Islands are equal runs of consecutive ranks (`mesh`), each with a folder of its own (`outer.text`).
    return str(Path(root) / f"island-{task.rank * task.run.islands // task.world_size}")
