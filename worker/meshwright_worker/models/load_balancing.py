"""Load balancing of experts: capacity, the router's losses, and counts of the assignments.

Everything is defined per sequence, so that it does not depend on how a batch is split into micro-batches or over ranks.
Ranks that share a sequence sum its counts (`SequencePartition`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.api.mixture import MixtureSpec
from meshwright.models.mixture import capacity
from meshwright_worker.models.router import Routing


class SequencePartition:
    """How a rank's rows map to sequences. Here, each row is a full sequence."""

    parts = 1
    """Number of ranks that share each sequence."""

    def total(self, counts: torch.Tensor) -> torch.Tensor:
        """Counts of this rank's positions, int64 [batch, experts] -> counts of the full sequences."""
        return counts

    def before(self, counts: torch.Tensor) -> torch.Tensor:
        """Counts of this rank's positions, int64 [batch, experts] -> counts of the positions before them."""
        return torch.zeros_like(counts)


@dataclass(frozen=True, slots=True)
class Fit:
    """Which choices fit their expert's capacity."""

    within: torch.Tensor
    """bool [batch, positions, per_token]."""
    place: torch.Tensor
    """int64 like `within`: number of earlier choices of the same expert by this rank's positions of the sequence."""
    limit: int
    """Maximum number of choices of one expert by this rank's positions of one sequence."""


class LoadBalancer:
    """The balancing rules of one mixture."""

    def __init__(self, mixture: MixtureSpec, sequence_partition: SequencePartition) -> None:
        self._mixture = mixture
        self.sequence_partition = sequence_partition

    def fit(self, experts: torch.Tensor) -> Fit | None:
        """Return which assignments fit their expert's capacity; None if nothing is dropped.

        The first tokens of a sequence have priority (GShard, arXiv 2006.16668, algorithm 1).

        Args:
            experts: int64 [batch, positions, per_token].
        """
        capacity_limit = capacity(self._mixture, experts.shape[1] * self.sequence_partition.parts)
        if capacity_limit is None:
            return None
        taken = _one_hot(experts, self._mixture.experts)
        own_place = taken.cumsum(1)
        place = own_place + self.sequence_partition.before(taken.sum(1)).unsqueeze(1)
        return Fit(
            place.gather(2, experts) <= capacity_limit,
            own_place.gather(2, experts) - 1,
            min(capacity_limit, experts.shape[1]),
        )

    def losses(self, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the auxiliary loss and the z-loss, each summed over this rank's tokens, [], with its gradient.

        Auxiliary: of a sequence of T tokens, of which expert i is chosen by f_i T k / E and has the mean score P_i, the
        mean over tokens is the sum of f_i P_i, 1 when balanced (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20; with
        one expert per token Switch's, 2101.03961, equation 4). Counts have no gradient, so summing them over ranks is
        enough. z: the square of the logits' log-sum-exp (ST-MoE, arXiv 2202.08906, equation 5).
        """
        chosen = self.sequence_partition.total(_one_hot(routing.experts, self._mixture.experts).sum(1))
        loads = self._mixture.experts * chosen.to(routing.scores.dtype) / chosen.sum(1, keepdim=True)
        auxiliary = (loads * routing.scores.sum(1)).sum()
        return auxiliary, routing.logits.logsumexp(dim=-1).square().sum()


class RoutingStats:
    """Statistics of a mixture since the last step, fp64: assignments per expert, dropped ones, auxiliary and z-loss."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._sum: torch.Tensor | None = None
        self.loss_weight: float | torch.Tensor = 0.0
        """Factor of the summed losses: like the cross-entropy's, one over the tokens of a step."""

    def entry(
        self, counts: torch.Tensor, dropped: torch.Tensor, auxiliary: torch.Tensor, z: torch.Tensor
    ) -> torch.Tensor:
        """Return one micro-batch's statistics, [experts + 3]; `dropped` is int64 [1]."""
        return torch.cat([counts, dropped, auxiliary.detach().view(1), z.detach().view(1)]).double()

    def add(self, entry: torch.Tensor) -> None:
        """Add a micro-batch."""
        self._sum = entry if self._sum is None else self._sum + entry

    def take(self, device: torch.device) -> torch.Tensor:
        """Return the sum since the last call, [experts + 3]."""
        taken, self._sum = self._sum, None
        return torch.zeros(self._experts + 3, dtype=torch.float64, device=device) if taken is None else taken


def _one_hot(experts: torch.Tensor, count: int) -> torch.Tensor:
    """[batch, positions, per_token] -> int64 [batch, positions, experts]: the experts that a token chose."""
    return experts.new_zeros(*experts.shape[:2], count).scatter_(2, experts, 1)
