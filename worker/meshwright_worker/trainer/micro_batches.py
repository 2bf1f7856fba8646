"""A replica's batch as the micro-batches that a rank computes, without padding that nobody needs.

Rows of prompts with completions are filled up to `training.sequenceLength`. Attention is causal, so nothing that is
predicted sees what stands behind the last target of its row: each micro-batch is cut behind the last target of its
longest row, to a length that the tensor and context groups can share. All ranks of a replica have the whole batch and
cut it alike; replicas need not, since they meet in parameters alone. Losses and gradients stay what they were, but for
rounding, and so do dropout masks, which follow a token's number.

Not cut are batches of mixtures of experts, whose balance counts every token that is routed, and those computed in fp8,
whose scales are taken from all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from meshwright.api.data import DataFormat, Packing
from meshwright.protocol.messages import RunConfig
from meshwright.sequence_sharding import SequenceSharding
from meshwright_worker.data.batch import IGNORED, Batch
from meshwright_worker.data.prefetch import pin_batch
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.parallel.context.context_parallel import context_slice

COMPILED_LENGTHS = 4
"""Different lengths that compiled layers meet: each may be compiled for."""


class TokenCounts(NamedTuple):
    """What is in padded rows."""

    tokens: int
    """Without the padding."""
    squares: int
    """Sum over rows of the square of their tokens, which attention's operations go by."""


@dataclass(frozen=True, slots=True)
class TrimLengths:
    """The lengths that a micro-batch may have, in tokens: multiples of `unit` from `min_length` on, and the whole."""

    unit: int
    min_length: int
    whole: int

    def length(self, needed: int) -> int:
        """The shortest that has room for `needed` tokens."""
        return min(self.whole, max(self.min_length, -(-needed // self.unit) * self.unit))


def trim_lengths(run: RunConfig) -> TrimLengths | None:
    """How micro-batches of a run are cut; None where they stay whole. Knows no tensors."""
    if run.training is None or not is_padded(run):
        return None
    if run.training.fp8 is not None or (run.architecture is not None and run.architecture.mixture is not None):
        return None
    deal, whole = SequenceSharding.of(run), run.training.sequence_length
    unit = deal.unit
    if run.training.compile:
        unit *= -(-whole // (COMPILED_LENGTHS * unit))
    return TrimLengths(unit, -(-deal.min_length // unit) * unit, whole)


def may_have_ignored_targets(run: RunConfig) -> bool:
    """Whether some tokens of a step may have no target: fillers, prompts, and what stands before another document."""
    return is_padded(run) or (run.data is not None and run.data.packing is Packing.DOCUMENTS)


def is_padded(run: RunConfig) -> bool:
    """Whether rows are filled up to the length of a sequence."""
    return run.data is not None and run.data.format is DataFormat.PROMPT_COMPLETION


class MicroBatches:
    """Makes a rank's micro-batches.

    Args:
        run: the run.
        mesh: this rank's.
    """

    def __init__(self, run: RunConfig, mesh: Mesh) -> None:
        self._count, self._deal = run.micro_batches, SequenceSharding.of(run)
        self._rank, self._device = mesh.coordinates.context, mesh.device
        self._trim_lengths, self.padded = trim_lengths(run), is_padded(run)

    def of(self, batch: Batch) -> list[Batch]:
        """This rank's part of each micro-batch of the replica's whole batch on the CPU, on the rank's device."""
        if self._trim_lengths is None:
            return self._to_device_slice(batch).chunk(self._count)
        longest = _row_lengths(batch).view(self._count, -1).amax(dim=1).tolist()
        lengths = [self._trim_lengths.length(needed) for needed in longest]
        if self._deal.ranks > 1:
            parts = zip(batch.chunk(self._count), lengths, strict=True)
            return [self._to_device_slice(_truncate(part, length)) for part, length in parts]
        # Moved whole: of page-locked memory a copy does not wait, of parts of its rows it would.
        parts = zip(self._to_device_slice(batch).chunk(self._count), lengths, strict=True)
        return [_truncate(part, length) for part, length in parts]

    def preslice(self, batch: Batch) -> Batch:
        """What a thread that reads ahead can do of `of`: take this rank's part, but of rows that `token_counts` is
        asked of.
        """
        return batch if self.padded else context_slice(batch, self._deal, self._rank)

    def targets(self, batch: Batch) -> torch.Tensor:
        """How many targets this rank's part of the replica's batch has, int64 [], counted on the CPU."""
        return (context_slice(batch, self._deal, self._rank).targets != IGNORED).sum()

    def token_counts(self, batch: Batch) -> TokenCounts:
        """What is in the replica's batch, whatever is cut."""
        lengths = _row_lengths(batch)
        return TokenCounts(int(lengths.sum()), int(lengths.square().sum()))

    def _to_device_slice(self, batch: Batch) -> Batch:
        return pin_batch(context_slice(batch, self._deal, self._rank), self._device).to(self._device)


def _row_lengths(batch: Batch) -> torch.Tensor:
    """Tokens up to each row's last target, int64 [rows]."""
    positions = torch.arange(1, batch.targets.shape[1] + 1, device=batch.targets.device)
    return ((batch.targets != IGNORED) * positions).amax(dim=1)


def _truncate(batch: Batch, length: int) -> Batch:
    """The first tokens of every row."""
    return batch.each(partial(_truncate_columns, length=length))


def _truncate_columns(tensor: torch.Tensor, length: int) -> torch.Tensor:
    return tensor[:, :length]
