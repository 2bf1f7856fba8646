"""The tokenizer of the model that a run began from: whether the run uses it, and the files that belong to it."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from meshwright.api.data import Tokenizer
from meshwright_worker.checkpoint.manifest import TokenizerRecord

FILE_OF = {Tokenizer.BPE: "tokenizer.json", Tokenizer.SENTENCE_PIECE: "tokenizer.model"}
"""The name of a tokenizer's file in a model directory, by the kind that reads it."""
_COMPANIONS = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json"),
)
"""Files about special tokens and chats that transformers reads together with the tokenizer."""


def other_tokenizer(directory: Path, record: TokenizerRecord) -> str:
    """Return what is wrong if the model in a directory was trained with another tokenizer. Empty if nothing is.

    Nothing is wrong either if the directory has no tokenizer to compare with.
    """
    present = [name for name in FILE_OF.values() if (directory / name).is_file()]
    if not present or _is_its_own(directory, record):
        return ""
    if record.kind in FILE_OF and FILE_OF[record.kind] not in present:
        # The same tokenizer in the other format has the same tokens, and no hash says so.
        return ""
    return (
        f"the tokenizer of `data` is not the one in {directory}, so the model of `training.initialWeights` was trained "
        f"on other token ids: set `data.tokenizer` and `data.tokenizerFile` to a copy of its {present[0]}"
    )


def copy_companions(directory: Path, record: TokenizerRecord, output: Path) -> list[str]:
    """Copy the files next to the tokenizer of the model that training began from, if the run has this tokenizer.

    Returns:
        Their names.
    """
    if not _is_its_own(directory, record):
        return []
    copied = [name for name in _COMPANIONS if (directory / name).is_file()]
    for name in copied:
        shutil.copyfile(directory / name, output / name)
    return copied


def _is_its_own(directory: Path, record: TokenizerRecord) -> bool:
    """Return whether the directory has the tokenizer of a run."""
    try:
        content = (directory / FILE_OF[record.kind]).read_bytes()
    except (OSError, KeyError):
        return False
    return record.identity.rpartition("/")[2] == hashlib.sha256(content).hexdigest()[:32]
