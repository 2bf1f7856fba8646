"""Rows of several documents, each of which is trained on as if it had its own row.

Positions restart at each document, attention stays inside it (`TokenMetadata`), and a document's last token does not
predict the next document. Packing therefore changes neither loss nor gradient; it only removes padding (arXiv
2107.02027).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from meshwright.api.data import DataSpec, Packing
from meshwright_worker.data.batch import IGNORED, Batch


def make_batch(samples: torch.Tensor, data: DataSpec, separator: int, numbers: Sequence[int] | None = None) -> Batch:
    """Build the batch that predicts each next token of samples, int64 [rows, length + 1], packed as `data` requires.

    `numbers` are the samples' numbers in the run, see `Batch.of`.
    """
    batch = Batch.of(samples, numbers)
    return separate_documents(batch, separator) if data.packing is Packing.DOCUMENTS else batch


def separate_documents(batch: Batch, separator: int) -> Batch:
    """Build a batch of rows whose documents end with `separator`, and mark each token's document.

    A row may begin and end inside a document: each piece counts as a document.
    """
    tokens = batch.tokens
    ends = tokens == separator
    documents = ends.cumsum(dim=1) - ends.long()
    index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    begins = torch.ones_like(ends)
    begins[:, 1:] = ends[:, :-1]
    starts = torch.where(begins, index, 0).cummax(dim=1).values
    targets = batch.targets.masked_fill(ends, IGNORED)
    return replace(batch, targets=targets, positions=index - starts, documents=documents)
