"""Dealing the rows of a step to replicas so that none waits for another with longer documents.

With documents apart, a row of one long document costs more attention than a row of many short ones. All replicas wait
for the slowest at the end of a step, and under ZeRO-3 in every layer. So rows are sorted by cost and dealt in rounds:
each round holds as many rows as there are replicas, all of about the same cost, and gives the dearest of them to the
replica that has least so far. Every replica gets the same number of rows, and the sums of two replicas differ by at
most the widest round: if the sums so far span S and a round's costs span R, they span at most max(S, R) after it.

Numbers alone decide: every replica deals alike without a word to the others.
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
        """What a model's matrices and its causal attention take, twice a multiply-add; half of the scores count."""
        matrices = model.layers * model.layer_parameters + model.vocab_size * model.hidden_size
        return cls(2 * matrices, 2 * model.layers * model.heads * model.head_size)

    def row(self, documents: Iterable[int]) -> int:
        """Cost of a row with documents of these lengths."""
        return sum(self.linear * length + self.quadratic * length * length for length in documents)


def assign_rows(costs: Sequence[int], replicas: int, micro_batches: int) -> list[list[int]]:
    """The rows of each replica, as indices into `costs`, micro-batch after micro-batch.

    Rounds go to micro-batches forth and back, so that these too are alike.

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
