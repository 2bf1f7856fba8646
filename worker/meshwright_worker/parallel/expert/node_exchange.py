"""Sends a token over the network once per node, whatever number of its experts is there (DeepSeek-V3, arXiv 2412.19437,
section 3.2.2).

A token first goes to one rank of each node that has experts of it: the one with the sender's place in its node. That
rank sends it on to the experts inside the node (`parallel/expert/dispatch`), and returns one sum of their outputs,
weighted. The token's experts and their weights travel with it, and the gradients of the weights travel back.

An output is a sum over nodes of sums over experts, instead of one sum over experts: it may differ in the last digit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright_worker.models.token_rows import NO_ROW, RowOrder
from meshwright_worker.parallel.expert.dispatch import Exchange


@dataclass(frozen=True, slots=True)
class NodeArrival:
    """See `models.moe.ArrivedTokens`."""

    experts: torch.Tensor
    """See `models.moe.ArrivedTokens`."""
    local_experts: int
    """See `models.moe.ArrivedTokens`."""
    out: Exchange
    order: RowOrder
    """Rows for each node, and the row of each token for each node."""

    def send(self, tokens: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `models.moe.ArrivedTokens`. Collective."""
        return self.out(self.order.take(tokens)), self.out(self.order.take(weights))

    def send_back(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `models.moe.ArrivedTokens`. Collective."""
        return self.order.by_token(self.out.reversed()(tokens)).sum(1)


class NodeExchange:
    """Exchanges tokens between the ranks with the same place in each node.

    Args:
        nodes: one rank of each node, in the order of the nodes' experts.
        local_experts: number of experts of each node.
    """

    def __init__(self, nodes: dist.ProcessGroup, local_experts: int) -> None:
        self._nodes = nodes
        self._local_experts = local_experts

    def plan(self, experts: torch.Tensor) -> NodeArrival:
        """See `models.moe.NodeExchange`. Collective: ranks exchange the number of tokens, and their experts."""
        nodes, tokens, each = self._nodes.size(), len(experts), self._local_experts
        node = torch.div(experts, each, rounding_mode="floor")
        # Dropped choices belong to one more node, which is cut off.
        wanted = node.new_zeros(tokens, nodes + 1).scatter_(1, node, 1)[:, :nodes]
        sent = wanted.sum(0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._nodes)
        sizes = torch.cat([sent, received]).tolist()
        out = Exchange(sizes[:nodes], sizes[nodes:], self._nodes)
        order = _by_node(wanted, sum(out.send))
        source, to = _divided(order.choices, nodes)
        local = experts.index_select(0, source) - (to * each).unsqueeze(1)
        local = local.masked_fill((local < 0) | (local >= each), each).to(torch.int32)
        return NodeArrival(out.begin(local).wait().to(experts.dtype), each, out, order)


def _by_node(wanted: torch.Tensor, rows: int) -> RowOrder:
    """Return the order of rows sorted by node, then by token; `wanted` is 0 or 1, [tokens, nodes]."""
    by_node = wanted.t().flatten()
    places = (by_node.cumsum(0) - 1).view(wanted.shape[1], -1).t().masked_fill(wanted == 0, NO_ROW)
    order = (1 - by_node).argsort(stable=True)[:rows]
    tokens, nodes = wanted.shape
    return RowOrder(order.remainder(tokens) * nodes + order.div(tokens, rounding_mode="floor"), places, complete=False)


def _divided(choices: torch.Tensor, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token and the node of each row."""
    return choices.div(nodes, rounding_mode="floor"), choices.remainder(nodes)
