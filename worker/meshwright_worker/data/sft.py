"""Prompts with completions as samples: supervised fine-tuning, with the loss only on completions."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from meshwright.api.data import OnCorrupt
from meshwright.data.documents import SkippedRecords, encoding_problem, lines, parse_json, share_read
from meshwright.data.errors import CorruptRecordError
from meshwright.data.tokenize import TextSource
from meshwright.data.tokenizers import Tokenizer
from meshwright_worker.data.corpus import CorpusError
from meshwright_worker.data.open_corpus import matching_files
from meshwright_worker.data.permutation import Permutation
from meshwright_worker.data.token_cache import log_skipped
from meshwright_worker.rank.task import WorkProgress

log = logging.getLogger(__name__)

_MAX_NAMES = 6
"""Maximum number of fields of a record in an error message."""

Pair = tuple[Sequence[int], Sequence[int]]
"""The tokens of a prompt and of its completion."""


class PromptCompletionStream:
    """One record per sample, in a new random order each epoch; a sample's rest after its record is padded.

    Samples are int64 [length + 1]; prompt and padding are not targets and are stored as complements (`Batch.of`). A
    record's completion ends with the separator; a record that is too long is truncated.

    Args:
        pairs: the records, in a fixed order.
        length: tokens of a sequence.
        seed: determines the order.
        separator: ends a completion, and is used as padding.

    Raises:
        CorpusError: there is no record.
    """

    def __init__(self, pairs: list[Pair], length: int, seed: int, separator: int) -> None:
        if not pairs:
            raise CorpusError(
                "no records: a smaller `data.heldOut` leaves more to train on, a larger one more to evaluate on"
            )
        # Without padding, and not one tensor each: rows are longer than most records, and each rank has all of them.
        tokens = array("i")
        self._ends = array("q")
        for prompt, completion in pairs:
            tokens.extend(_row(prompt, completion, length + 1, separator))
            self._ends.append(len(tokens))
        self._tokens = torch.frombuffer(tokens, dtype=torch.int32)
        self.separator = separator
        self.samples_per_epoch = len(pairs)
        self._length = length
        self._seed = seed
        self._order = 0, self._permutation(0)

    @property
    def identity(self) -> str:
        """See `SampleStream.identity`."""
        hashed = hashlib.sha256()
        for record in range(self.samples_per_epoch):
            hashed.update(self._row(record).numpy().tobytes())
        return f"{hashed.hexdigest()[:32]}/{self._length}/{self._seed}"

    def batch(self, first: int, count: int) -> torch.Tensor:
        """See `SampleStream.batch`."""
        return self.rows(range(first, first + count))

    def rows(self, samples: Sequence[int]) -> torch.Tensor:
        """See `SampleStream.rows`."""
        return torch.stack([self._row(self._record(number)) for number in samples])

    def documents(self, sample: int) -> list[int]:
        """See `SampleStream.documents`."""
        row = self._row(self._record(sample))[:-1]
        ends = (torch.where(row < 0, ~row, row) == self.separator).nonzero().flatten() + 1
        borders = [0, *(end for end in ends.tolist() if end < self._length), self._length]
        return [end - begin for begin, end in zip(borders, borders[1:], strict=False)]

    def _row(self, record: int) -> torch.Tensor:
        """The record, padded to a sample, int64 [length + 1]."""
        begin, end = self._ends[record - 1] if record else 0, self._ends[record]
        row = torch.full((self._length + 1,), ~self.separator)
        row[: end - begin] = self._tokens[begin:end]
        return row

    def _record(self, sample: int) -> int:
        epoch, position = divmod(sample, self.samples_per_epoch)
        order = self._order  # see `SampleStream`
        if epoch != order[0]:
            order = self._order = epoch, self._permutation(epoch)
        return order[1](position)

    def _permutation(self, epoch: int) -> Permutation:
        return Permutation(self.samples_per_epoch, f"{self._seed}/{epoch}")


def read_pairs(
    source: TextSource, tokenizer: Tokenizer, length: int, progress: WorkProgress | None = None
) -> list[Pair]:
    """Read the records of every file of a source, in the order of names and lines. `progress` receives what is done.

    Raises:
        CorruptRecordError: a record cannot be read, or its completion does not fit, and `data.onCorruptRecord` is
            `Fail`.
        DataError: no file matches, none contains a record, or an archive is broken.
    """
    skipped = SkippedRecords()
    pairs: list[Pair] = []
    truncated = done = 0
    progress = progress or WorkProgress()
    # An empty file is no complete archive.
    entries = [entry for entry in matching_files(source, progress) if entry.size]
    size = sum(entry.size for entry in entries)
    for entry in entries:
        with source.directory.open(entry.name) as file:
            for where, line in lines(file, entry.name):
                progress("tokenize", done + int(share_read(file, entry) * entry.size), size)
                found = line if isinstance(line, CorruptRecordError) else _pair(line, where, tokenizer, length)
                if not isinstance(found, CorruptRecordError):
                    pairs.append(found)
                    truncated += sum(map(len, found)) > length
                elif source.on_corrupt is OnCorrupt.FAIL:
                    raise found
                else:
                    skipped.add(str(found))
        done += entry.size
    log_skipped(skipped)
    if truncated:
        log.warning(
            "truncated %d of %d completions, which do not end in a sequence of %d tokens (`training.sequenceLength`)",
            *(truncated, len(pairs), length),
        )
    if not pairs:
        raise CorpusError(f"the files that `data.pattern: {source.pattern}` matches have no usable record")
    return pairs


def select_split(pairs: list[Pair], share: float, *, held_out: bool) -> list[Pair]:
    """Return the first records or, with `held_out`, the last ones, which are `share` of all."""
    cut = len(pairs) - int(len(pairs) * share)
    return pairs[cut:] if held_out else pairs[:cut]


def _pair(line: bytes, where: str, tokenizer: Tokenizer, length: int) -> Pair | CorruptRecordError:
    record = parse_json(line, where)
    if isinstance(record, CorruptRecordError):
        return record
    texts: list[Any] = [record.get(key) for key in ("prompt", "completion")] if isinstance(record, dict) else [None]
    if not all(isinstance(text, str) for text in texts) or not texts[1]:
        return CorruptRecordError(f"{where}: a record needs the texts `prompt` and `completion`{_instead(record)}")
    problem = next((found for text in texts if (found := encoding_problem(text, where))), None)
    if problem is not None:
        return problem
    prompt, completion = tokenizer.encode(texts)
    if len(prompt) > length:
        return CorruptRecordError(
            f"{where}: the prompt's {len(prompt)} tokens leave a sequence of {length} no room for the completion "
            "(`training.sequenceLength`)"
        )
    return array("i", prompt), array("i", completion)


def _instead(record: Any) -> str:
    """Why a record does not have the two texts, or how to get them from one of another common form."""
    if isinstance(record, list):
        return "; each line must be one JSON object"
    if isinstance(record, dict) and ("messages" in record or "conversations" in record):
        return "; write a conversation as them with the chat template of the model"
    if isinstance(record, dict) and record.keys() >= {"prompt", "completion"}:
        other = [key for key in ("prompt", "completion") if not isinstance(record[key], str)]
        return f"; `{other[0]}` is not a text" if other else "; `completion` is empty"
    names = [f"`{name}`" for name in list(record)[:_MAX_NAMES]] if isinstance(record, dict) else []
    return f"; it has {', '.join(names)}" if names else ""


def _row(prompt: Sequence[int], completion: Sequence[int], size: int, separator: int) -> array[int]:
    """A record's first `size` tokens: the prompt's as complements."""
    target_tokens = [*completion, separator][: size - len(prompt)]
    return array("i", [*(~token for token in prompt), *target_tokens])
