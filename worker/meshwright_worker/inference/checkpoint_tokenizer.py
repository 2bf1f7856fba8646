"""Finds the tokenizer of a checkpoint: the one of its run, or its file at a new location."""

from __future__ import annotations

from pathlib import Path

from meshwright.api.data import Tokenizer as Kind
from meshwright.data.errors import DataError
from meshwright.data.files import split_uri
from meshwright.data.tokenizers import ByteTokenizer, Tokenizer, open_tokenizer
from meshwright_worker.checkpoint.manifest import Manifest, TokenizerRecord
from meshwright_worker.data.token_cache import open_tokenizer_at

BYTES = "byte"
"""The value of `--tokenizer` for bytes instead of a file."""


def tokenizer_for(manifest: Manifest, option: str | None) -> Tokenizer:
    """Return the tokenizer of a checkpoint.

    Args:
        manifest: the checkpoint's.
        option: `--tokenizer`: the tokenizer's file or `byte`; None for the one that the manifest names.

    Raises:
        DataError: it is not known, its file is missing or has changed, or the model has no row for some of its ids.
    """
    record = manifest.tokenizer
    tokenizer = _recorded_tokenizer(record) if option is None else _tokenizer_from_option(option, record)
    if record is not None and tokenizer.identity != record.identity:
        raise DataError(
            f"{option or record.file} is `{tokenizer.identity}`, but the checkpoint was trained with "
            f"`{record.identity}`: pass that tokenizer's file with `--tokenizer FILE`"
        )
    rows = manifest.architecture.vocab_size
    if tokenizer.vocabulary > rows:
        raise DataError(
            f"`--tokenizer {option}` has ids up to {tokenizer.vocabulary - 1}, but the model has rows up to {rows - 1}"
            ": the checkpoint was trained with another tokenizer"
        )
    return tokenizer


def _recorded_tokenizer(record: TokenizerRecord | None) -> Tokenizer:
    if record is None:
        raise DataError(
            "the checkpoint does not record its tokenizer: pass its file with `--tokenizer FILE`, or "
            f"`--tokenizer {BYTES}`"
        )
    if record.file is None:
        return open_tokenizer(record.kind, None)
    directory, name = split_uri(record.file)
    try:
        return open_tokenizer_at(record.kind, directory, name)
    except (DataError, OSError) as error:
        raise DataError(
            f"the run's tokenizer file cannot be opened at its recorded path ({error}): pass it with `--tokenizer FILE`"
        ) from error


def _tokenizer_from_option(option: str, record: TokenizerRecord | None) -> Tokenizer:
    if option == BYTES:
        return ByteTokenizer()
    path = Path(option)
    if record is not None and record.kind is not Kind.BYTE:
        return open_tokenizer(record.kind, path)
    # A tokenizer.json is an object; a SentencePiece model is a protobuf, which never begins with a brace.
    with path.open("rb") as file:
        is_json = file.read(64).lstrip().startswith(b"{")
    return open_tokenizer(Kind.BPE if is_json else Kind.SENTENCE_PIECE, path)
