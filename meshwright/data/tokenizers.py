"""Tokenizers: bytes, a JSON file of the library tokenizers (such as BPE), or a SentencePiece model."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from meshwright.api.data import Tokenizer as Kind
from meshwright.data.errors import DataError

BYTE_SEPARATOR = 256
"""The token after each document, for the byte tokenizer."""
BYTE_VOCABULARY = 257
"""The 256 byte values and the separator."""

_SEPARATOR_TOKENS = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]"),
    # New ones come last, so that a tokenizer that has an earlier one keeps it.
    *("<｜end▁of▁sentence｜>", "[EOS]", "<|im_end|>", "<EOS_TOKEN>"),
)
"""Tokens that end a document, of GPT-2 and Qwen, Llama 3, Llama 1, Gemma, ..., DeepSeek, ..., Cohere. The first that
exists.
"""
_BPE_FILE = "tokenizer.json"
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/=]+ \d+\n")


class Tokenizer(Protocol):
    """Converts text to tokens and back."""

    vocabulary: int
    """One above the largest id, including the separator."""
    separator: int
    """The token after each document."""
    identity: str
    """Identifies the mapping: equal for two tokenizers that give the same tokens."""

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """The tokens of each text, without separators.

        Args:
            texts: the texts.
            special: whether text that names a special token is that token, as chat templates need it. False for
                documents: one that mentions `<|endoftext|>` does not end there.
        """

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; a separator becomes a line break."""


class ByteTokenizer:
    """UTF-8 bytes. They need no training and no download, and can represent every text."""

    vocabulary = BYTE_VOCABULARY
    separator = BYTE_SEPARATOR
    identity = "byte"

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """See `Tokenizer.encode`."""
        return [list(text.encode()) for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """See `Tokenizer.decode`. Leaves out ids above the separator, which exist only in a rounded-up vocabulary."""
        raw = bytes(t if t < BYTE_SEPARATOR else ord("\n") for t in tokens if t <= BYTE_SEPARATOR)
        return raw.decode(errors="replace")


class BPETokenizer:
    """A `tokenizer.json` of the `tokenizers` library.

    Raises:
        DataError: the library is missing, or the file is no tokenizer or has no token that ends a document.
    """

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise DataError("`data.tokenizer: BPE` needs the package tokenizers: install `meshwright[data]`") from error
        content = _content(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"{path} is not a valid tokenizer.json: {_what_it_is(path, content, Kind.BPE) or error}"
            ) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        known = [self._tokenizer.token_to_id(token) for token in _SEPARATOR_TOKENS]
        found = next((number for number in known if number is not None), None)
        if found is None:
            raise DataError(f"{path} has no token that ends a document: one of {', '.join(_SEPARATOR_TOKENS)}")
        self.separator = int(found)
        # Ids may have gaps, so an embedding may need more rows than there are tokens.
        self.vocabulary = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.identity = f"bpe/{hashlib.sha256(content).hexdigest()[:32]}"

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """See `Tokenizer.encode`."""
        self._tokenizer.encode_special_tokens = not special
        return [found.ids for found in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        pieces = _split_at(tokens, self.separator)
        return "\n".join(self._tokenizer.decode(piece, skip_special_tokens=False) for piece in pieces)


class SentencePieceTokenizer:
    """A SentencePiece model (arXiv 1808.06226).

    Raises:
        DataError: the library is missing, or the file is no model or has no end-of-sentence token.
    """

    def __init__(self, path: Path) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            raise DataError(
                "`data.tokenizer: SentencePiece` needs the package sentencepiece: install `meshwright[data]`"
            ) from error
        content = _content(path)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, OSError) as error:
            found = _what_it_is(path, content, Kind.SENTENCE_PIECE) or error
            raise DataError(f"{path} is not a valid SentencePiece model: {found}") from error
        self.separator = int(self._model.eos_id())
        if self.separator < 0:
            raise DataError(f"{path} has no end-of-sentence token: train it with one")
        self.vocabulary = int(self._model.vocab_size())
        self.identity = f"sentencepiece/{hashlib.sha256(content).hexdigest()[:32]}"

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """See `Tokenizer.encode`. Control symbols are always ordinary text."""
        found: list[list[int]] = self._model.encode(list(texts))
        return found

    def decode(self, tokens: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        return "\n".join(str(self._model.decode(piece)) for piece in _split_at(tokens, self.separator))


def open_tokenizer(kind: Kind, path: Path | None) -> Tokenizer:
    """Open a tokenizer; `path` is its file.

    Raises:
        DataError: it cannot be opened.
    """
    if kind is Kind.BYTE:
        return ByteTokenizer()
    if path is None:
        raise DataError(f"`data.tokenizer: {kind.value}` needs `data.tokenizerFile`")
    return BPETokenizer(path) if kind is Kind.BPE else SentencePieceTokenizer(path)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"`data.tokenizerFile`: {path} cannot be read: {error.strerror}") from error


def _what_it_is(path: Path, content: bytes, expected: Kind) -> str:
    """What a file is if it is not the `expected` kind of tokenizer, and what to do. Empty if it is not known."""
    try:
        fields = json.loads(content)
    except ValueError:
        fields = None
    if isinstance(fields, dict) and not isinstance(fields.get("model"), dict):
        if path.name == _BPE_FILE or not fields:
            return "it has no `model`: copy the file from the model's repository again"
        return f"it is another JSON file of the model: set `data.tokenizerFile` to `{_BPE_FILE}`"
    if _TIKTOKEN_LINE.match(content):
        return "it is a tiktoken file: use the model's `tokenizer.json` and `data.tokenizer: BPE`"
    # The first field of a SentencePiece model is a list of pieces: field 1, with a length.
    kind = Kind.BPE if isinstance(fields, dict) else Kind.SENTENCE_PIECE if content.startswith(b"\n") else expected
    return "" if kind is expected else f"set `data.tokenizer: {kind.value}`"


def _split_at(tokens: Iterable[int], separator: int) -> list[list[int]]:
    pieces: list[list[int]] = [[]]
    for token in tokens:
        if token == separator:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return pieces
