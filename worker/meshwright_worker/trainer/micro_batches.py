"""A replica's batch, split into micro-batches with excess padding trimmed.

Rows of prompts with completions are padded to `training.sequenceLength`. Attention is causal, so no prediction depends
on tokens after the last target of its row. Each micro-batch is truncated after the last target of its longest row, to a
length that the tensor and context groups can split evenly. All ranks of a replica have the full batch and truncate it
to the same length. Replicas may use different lengths, since they only share parameters. Losses and gradients change
only by rounding. Dropout masks do not change, since they depend on a token's index.

Two kinds of batches are never truncated: those of mixtures of experts, whose balancing losses count every routed token,
and those computed in fp8, whose scales are taken from all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from meshwright.api.data import DataFormat
from meshwright.protocol.run_config import NativeRun
from meshwright.sequence_sharding import SequenceSharding
from meshwright_worker.data.batch import IGNORED, Batch
from meshwright_worker.data.prefetch import pin_batch
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.parallel.context.context_parallel import context_slice

COMPILED_LENGTHS = 4
"""Maximum number of different lengths with compiled layers: each length may be compiled separately."""


class TokenCounts(NamedTuple):
    """Content of padded rows."""

    tokens: int
    """Number of tokens without padding."""
    squares: int
    """Sum over rows of the squared number of tokens: attention's operations are proportional to it."""


@dataclass(frozen=True, slots=True)
class TrimLengths:
    """The lengths that a micro-batch may have, in tokens: multiples of `unit` from `min_length` on, and the full
    length.
    """

    unit: int
    min_length: int
    whole: int

    def length(self, needed: int) -> int:
        """Return the shortest allowed length that fits `needed` tokens."""
        return min(self.whole, max(self.min_length, -(-needed // self.unit) * self.unit))


def trim_lengths(run: NativeRun) -> TrimLengths | None:
    """Return how a run's micro-batches are truncated, or None if they keep their full length. Uses no tensors."""
    if not is_padded(run):
        return None
    if run.training.fp8 is not None or run.architecture.mixture is not None:
        return None
    deal, whole = SequenceSharding.of(run), run.training.sequence_length
    unit = deal.unit
    if run.training.compile:
        unit *= -(-whole // (COMPILED_LENGTHS * unit))
    return TrimLengths(unit, -(-deal.min_length // unit) * unit, whole)


def may_have_ignored_targets(run: NativeRun) -> bool:
    """Return whether some tokens may have no target: padding, prompts, and the last token before another document."""
    return is_padded(run) or run.packs_documents


def is_padded(run: NativeRun) -> bool:
    """Return whether rows are padded to the sequence length."""
    return run.data.format is DataFormat.PROMPT_COMPLETION


class MicroBatches:
    """Builds a rank's micro-batches.

    Args:
        run: the run.
        mesh: this rank's mesh.
    """

    def __init__(self, run: NativeRun, mesh: Mesh) -> None:
        self._count, self._deal = run.micro_batches, SequenceSharding.of(run)
        self._rank, self._device = mesh.coordinates.context, mesh.device
        self._trim_lengths, self.padded = trim_lengths(run), is_padded(run)

    def of(self, batch: Batch) -> list[Batch]:
        """Return this rank's part of each micro-batch, on its device. `batch` is the replica's, on the CPU."""
        if self._trim_lengths is None:
            return self._to_device_slice(batch).chunk(self._count)
        longest = _row_lengths(batch).view(self._count, -1).amax(dim=1).tolist()
        lengths = [self._trim_lengths.length(needed) for needed in longest]
        if self._deal.ranks > 1:
            parts = zip(batch.chunk(self._count), lengths, strict=True)
            return [self._to_device_slice(_truncate(part, length)) for part, length in parts]
        # Moved in one piece: a copy from pinned memory is asynchronous, a copy of parts of its rows is not.
        parts = zip(self._to_device_slice(batch).chunk(self._count), lengths, strict=True)
        return [_truncate(part, length) for part, length in parts]

    def preslice(self, batch: Batch) -> Batch:
        """Do the part of `of` that a prefetch thread can do: slice the batch for this rank.

        Padded rows are not sliced, since `token_counts` needs them.
        """
        return batch if self.padded else context_slice(batch, self._deal, self._rank)

    def targets(self, batch: Batch) -> torch.Tensor:
        """Return the number of targets in this rank's part of the replica's batch, int64 [], counted on the CPU."""
        return (context_slice(batch, self._deal, self._rank).targets != IGNORED).sum()

    def token_counts(self, batch: Batch) -> TokenCounts:
        """Return the content of the replica's batch, before truncation."""
        lengths = _row_lengths(batch)
        return TokenCounts(int(lengths.sum()), int(lengths.square().sum()))

    def _to_device_slice(self, batch: Batch) -> Batch:
        return pin_batch(context_slice(batch, self._deal, self._rank), self._device).to(self._device)


def _row_lengths(batch: Batch) -> torch.Tensor:
    """Tokens up to each row's last target, int64 [rows]."""
    positions = torch.arange(1, batch.targets.shape[1] + 1, device=batch.targets.device)
    return ((batch.targets != IGNORED) * positions).amax(dim=1)


def _truncate(batch: Batch, length: int) -> Batch:
    """Return the first `length` tokens of every row."""
    return batch.each(partial(_truncate_columns, length=length))


def _truncate_columns(tensor: torch.Tensor, length: int) -> torch.Tensor:
    return tensor[:, :length]
