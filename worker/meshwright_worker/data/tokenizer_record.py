"""Which tokenizer a run's text is written in, so that its checkpoints can be read by whoever asks them for text."""

from __future__ import annotations

from meshwright.api.base import ApiModel
from meshwright.api.data import Tokenizer as Kind
from meshwright.data.tokenizers import BYTE_SEPARATOR, BYTE_VOCABULARY

SEPARATOR = BYTE_SEPARATOR
VOCABULARY = BYTE_VOCABULARY


class TokenizerRecord(ApiModel):
    """A tokenizer as a checkpoint names it."""

    kind: Kind
    """How text becomes tokens."""
    identity: str
    """See `Tokenizer.identity`: a file of another identity gives other tokens."""
    file: str | None = None
    """Path or URI at which the run found the tokenizer's file; None for bytes."""
