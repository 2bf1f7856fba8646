"""Chooses each token's experts and their weights.

Logits and scores are in at least fp32 in every compute format: the choice compares numbers that may be close (Switch
Transformers, arXiv 2101.03961, section 2.4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.api.mixture import Balancing, MixtureSpec, Router
from meshwright_worker.dtypes import upcast
from meshwright_worker.models.layers import local

_TINY = 1e-20


@dataclass(frozen=True, slots=True)
class Routing:
    """The router's result for tokens [batch, positions]."""

    experts: torch.Tensor
    """int64 [batch, positions, per_token]: distinct for each token."""
    weights: torch.Tensor
    """[batch, positions, per_token], at least fp32: the factor of each expert's output."""
    scores: torch.Tensor
    """[batch, positions, experts], at least fp32: scores of all experts, normalized to the sum 1."""
    logits: torch.Tensor
    """[batch, positions, experts], at least fp32."""


class ExpertRouter(nn.Module):
    """A linear layer, scores, and the choice of the best experts.

    With `balancing: Bias` it has the buffer `bias` [experts], which is added only for the choice: it gets no gradient
    and is saved in checkpoints.
    """

    bias: torch.Tensor | None

    def __init__(self, hidden: int, mixture: MixtureSpec) -> None:
        super().__init__()
        self.mixture = mixture
        self.weight = nn.Parameter(torch.empty(mixture.experts, hidden))
        balanced = mixture.balancing is Balancing.BIAS
        self.register_buffer("bias", torch.zeros(mixture.experts) if balanced else None)

    def forward(self, x: torch.Tensor) -> Routing:
        """Route x, [batch, positions, hidden]."""
        mixture = self.mixture
        logits = F.linear(upcast(x), upcast(local(self.weight).to(x.dtype)))
        scores = logits.softmax(dim=-1) if mixture.router is Router.SOFTMAX else logits.sigmoid()
        experts = select_experts(scores.detach(), mixture, self.bias)
        weights = scores.gather(-1, experts)
        if mixture.renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _TINY)
        shares = scores if mixture.router is Router.SOFTMAX else scores / (scores.sum(dim=-1, keepdim=True) + _TINY)
        return Routing(experts, weights * mixture.scaling, shares, logits)


def select_experts(scores: torch.Tensor, mixture: MixtureSpec, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the experts of each token by descending score, int64 [..., per_token].

    With groups, a token's experts come from its best groups: by their best expert (DeepSeek-V2, arXiv 2405.04434,
    section 2.2.2) or, with sigmoid scores, by the sum of their two best (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Args:
        scores: [..., experts], larger is better.
        mixture: the mixture's settings.
        bias: [experts], added to the scores.
    """
    selection_scores = scores if bias is None else scores + bias
    if mixture.groups > 1:
        grouped = selection_scores.reshape(*selection_scores.shape[:-1], mixture.groups, -1)
        experts_per_group_score = 1 if mixture.router is Router.SOFTMAX else min(2, grouped.shape[-1])
        best = (
            grouped.topk(experts_per_group_score, dim=-1)
            .values.sum(dim=-1)
            .topk(mixture.groups_per_token, dim=-1)
            .indices
        )
        excluded_groups = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
        selection_scores = grouped.masked_fill(excluded_groups.unsqueeze(-1), -torch.inf).flatten(-2)
    return selection_scores.topk(mixture.per_token, dim=-1).indices
