"""Records the tokenizer of a run's corpus, so that text can be generated from its checkpoints."""

from __future__ import annotations

from meshwright.api.base import ApiModel
from meshwright.api.data import Tokenizer as Kind
from meshwright.data.tokenizers import BYTE_SEPARATOR, BYTE_VOCABULARY

SEPARATOR = BYTE_SEPARATOR
VOCABULARY = BYTE_VOCABULARY


class TokenizerRecord(ApiModel):
    """The tokenizer's record in a checkpoint."""

    kind: Kind
    """How text is tokenized."""
    identity: str
    """See `Tokenizer.identity`: a file with another identity gives other tokens."""
    file: str | None = None
    """Path or URI at which the run found the tokenizer's file; None for bytes."""
