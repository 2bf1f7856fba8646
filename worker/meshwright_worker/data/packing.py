"""Rows of several documents, each of which is trained on as if it were alone in its row.

Positions begin again with each document, attention stays inside it (`Places`), and what follows it is not predicted
from it. So packing changes neither loss nor gradient; it only leaves out the padding (arXiv 2107.02027).
"""

from __future__ import annotations

import torch

from meshwright.api.spec import DataSpec, Packing
from meshwright_worker.data.batch import IGNORED, Batch
from meshwright_worker.data.tokenizer import SEPARATOR


def batch_of(samples: torch.Tensor, data: DataSpec) -> Batch:
    """The batch that predicts each next token of samples, int64 [rows, length + 1], packed as `data` asks."""
    return documents_apart(samples, SEPARATOR) if data.packing is Packing.DOCUMENTS else Batch.of(samples)


def documents_apart(samples: torch.Tensor, separator: int) -> Batch:
    """The batch of samples, int64 [rows, length + 1], in which each document ends with a `separator`.

    A row may begin and end inside a document: the piece is a document of its own.
    """
    tokens, targets = samples[:, :-1], samples[:, 1:]
    ends = tokens == separator
    documents = ends.cumsum(dim=1) - ends.long()
    index = torch.arange(tokens.shape[1], device=samples.device).expand_as(tokens)
    begins = torch.ones_like(ends)
    begins[:, 1:] = ends[:, :-1]
    starts = torch.where(begins, index, 0).cummax(dim=1).values
    return Batch(tokens, targets.masked_fill(ends, IGNORED), index - starts, documents)
