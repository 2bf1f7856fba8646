"""Files of tokenizers: which token ends a document, and what is said of a file of another kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

from meshwright.api.data import Tokenizer as Kind
from meshwright.data.errors import DataError
from meshwright.data.tokenizers import open_tokenizer


def with_tokens(path: Path, *special: str) -> Path:
    vocabulary = {token: number for number, token in enumerate(("a", "b", *special))}
    tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[])).save(str(path))
    return path


@pytest.mark.parametrize(
    ("special", "separator"),
    [
        (("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"), "<｜end▁of▁sentence｜>"),
        (("[BOS]", "[EOS]"), "[EOS]"),
        (("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
        (("<|im_end|>", "<|endoftext|>"), "<|endoftext|>"),
        (("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"), "<|end_of_text|>"),
    ],
    ids=["deepseek", "brackets", "chat", "qwen", "llama-3"],
)
def test_documents_end_with_the_token_of_the_family(tmp_path: Path, special: tuple[str, ...], separator: str) -> None:
    found = open_tokenizer(Kind.BPE, with_tokens(tmp_path / "tokenizer.json", *special))
    assert found.separator == 2 + special.index(separator)


def test_a_tokenizer_without_such_a_token_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no token that ends a document: one of <|endoftext|>"):
        open_tokenizer(Kind.BPE, with_tokens(tmp_path / "tokenizer.json"))


def test_the_wrong_file_of_a_model_is_named(tmp_path: Path, sentencepiece_file: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    right = with_tokens(tmp_path / "tokenizer.json", "</s>")
    for kind, file, says in (
        (Kind.BPE, sentencepiece_file, "set `data.tokenizer: SentencePiece`"),
        (Kind.SENTENCE_PIECE, right, "set `data.tokenizer: BPE`"),
        (Kind.BPE, tmp_path / "tokenizer_config.json", "set `data.tokenizerFile` to `tokenizer.json`"),
        (Kind.SENTENCE_PIECE, tmp_path / "tokenizer.model", "it is a tiktoken file"),
    ):
        with pytest.raises(DataError, match=f"is not a valid .*{says}"):
            open_tokenizer(kind, file)
    right.write_text("{}")
    for kind in (Kind.BPE, Kind.SENTENCE_PIECE):
        with pytest.raises(DataError, match="tokenizer.json is not a valid .*: it has no `model`: copy the file"):
            open_tokenizer(kind, right)
    right.write_text('{"model": {"type": "BPE"}}')
    with pytest.raises(DataError, match="is not a valid tokenizer.json: (?!set)"):
        open_tokenizer(Kind.BPE, right)
