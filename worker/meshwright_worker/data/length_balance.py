"""Assigns the rows of a step to replicas so that none waits for another with longer documents.

Between documents there is no attention, so a row with one long document costs more than a row with many short ones. All
replicas wait for the slowest at the end of a step, and under ZeRO-3 in every layer. Rows are therefore sorted by cost
and assigned in rounds. Each round has as many rows as there are replicas, all of about the same cost, and gives the
most expensive one to the replica with the lowest sum so far. Every replica gets the same number of rows, and the sums
of two replicas differ by at most the widest round: if the sums so far span S and a round's costs span R, they span at
most max(S, R) after it.

The assignment is deterministic: every replica computes the same one without communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshwright.models.architecture import Architecture


@dataclass(frozen=True, slots=True)
class RowCost:
    """FLOPs of a forward pass: `linear` for each token, `quadratic` for the square of each document's tokens."""

    linear: int
    quadratic: int

    @classmethod
    def of(cls, model: Architecture) -> RowCost:
        """Return the cost of a model's matrices and its causal attention: two FLOPs per multiply-add, half of the
        scores.
        """
        matrices = model.layers * model.layer_parameters + model.vocab_size * model.hidden_size
        return cls(2 * matrices, 2 * model.layers * model.heads * model.head_size)

    def row(self, documents: Iterable[int]) -> int:
        """Return the cost of a row with documents of these lengths."""
        return sum(self.linear * length + self.quadratic * length * length for length in documents)


def assign_rows(costs: Sequence[int], replicas: int, micro_batches: int) -> list[list[int]]:
    """Return the rows of each replica, as indices into `costs`, micro-batch by micro-batch.

    Rounds are assigned to micro-batches in alternating order, so that these are balanced too.

    Raises:
        ValueError: the rows do not divide into `replicas` times `micro_batches`.
    """
    if len(costs) % (replicas * micro_batches):
        raise ValueError(f"{len(costs)} rows do not divide into {replicas} replicas of {micro_batches} micro-batches")
    costliest_first = sorted(range(len(costs)), key=lambda row: (-costs[row], row))
    sums = [0] * replicas
    assigned: list[list[list[int]]] = [[[] for _ in range(micro_batches)] for _ in range(replicas)]
    for number, first in enumerate(range(0, len(costliest_first), replicas)):
        turn, place = divmod(number, micro_batches)
        micro_batch = place if turn % 2 == 0 else micro_batches - 1 - place
        least_loaded = sorted(range(replicas), key=lambda replica: (sums[replica], replica))
        for replica, row in zip(least_loaded, costliest_first[first : first + replicas], strict=True):
            sums[replica] += costs[row]
            assigned[replica][micro_batch].append(row)
    return [[row for part in parts for row in part] for parts in assigned]
