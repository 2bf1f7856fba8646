"""Checks that the model's embedding has a row for every token id, before any process group is created.

An id without a row would raise deep inside a kernel. Under tensor parallelism it would belong to no rank's part, and
silently give a zero embedding and a wrong loss. The check reads only the tokenizer's file and the manifests of tokens,
neither text nor shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from meshwright.api.data import DataFormat, DataSpec, Tokenizer
from meshwright.data.files import join_uri
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.checkpoint.manifest import TokenizerRecord
from meshwright_worker.data.corpus import naming_corpus
from meshwright_worker.data.open_corpus import data_root, open_data_directory, read_tokens_manifest
from meshwright_worker.data.sample_assignment import island_data_dir
from meshwright_worker.data.token_cache import open_data_tokenizer
from meshwright_worker.rank.failures import InvalidRunError
from meshwright_worker.rank.task import RankTask


def check_vocabulary(task: RankTask[NativeRun]) -> TokenizerRecord:
    """Return the record of this rank's tokenizer, after checking that the model's vocabulary contains all of its ids.

    Raises:
        InvalidRunError: it does not; names the nearest size that has a row for every id and divides over the ranks.
        DataError: the tokenizer or a manifest cannot be read.
    """
    model, data = task.run.architecture, task.run.data
    root = island_data_dir(task.run, task.data_dir, task.rank)
    place = None if data.tokenizer is Tokenizer.BYTE else data_root(data, root)
    tokenizer = open_data_tokenizer(data, place or "")
    named = "data.tokenizer: Byte" if place is None else f"data.tokenizerFile: {data.tokenizer_file}"
    where, needed = max([(f"`{named}`", tokenizer.vocabulary), *_manifests(data, root)], key=lambda found: found[1])
    if needed > model.vocab_size:
        tensor = task.run.tensor
        raise InvalidRunError(
            f"`model.vocabSize: {model.vocab_size}` must be at least {needed} for the ids of {where}, and divisible by "
            f"`parallelism.tensor: {tensor}`; nearest: {-(-needed // tensor) * tensor}"
        )
    separator = None if place is None else tokenizer.separator
    file = None if place is None else join_uri(place, str(data.tokenizer_file))
    return TokenizerRecord(kind=data.tokenizer, identity=tokenizer.identity, file=file, separator=separator)


def _manifests(data: DataSpec, root: str | None) -> Iterator[tuple[str, int]]:
    """Return the directories of tokens, each with an upper bound (exclusive) of its ids."""
    if data.format is DataFormat.TOKENS:
        paths: Iterable[str | None] = (part.path for part in data.mixture) if data.mixture else [None]
        for path in paths:
            with naming_corpus(path):
                manifest = read_tokens_manifest(open_data_directory(data, root, path))
            yield f"the tokens in {path or data_root(data, root)}", manifest.vocabulary
