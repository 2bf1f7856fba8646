"""A mixture of experts as a feed-forward layer: route, dispatch rows to the experts, compute, combine.

The steps are separate methods, so that a schedule can run the `DispatchPlan` of one micro-batch while it computes
another. The dispatcher determines where experts are computed: on this rank, or distributed over ranks
(`parallel/expert/expert_parallel`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.models.architecture import Architecture
from meshwright.models.mixture import is_mixture
from meshwright_worker.models.layers import FeedForward
from meshwright_worker.models.load_balancing import Fit, LoadBalancer, RoutingStats, SequencePartition
from meshwright_worker.models.router import ExpertRouter
from meshwright_worker.models.split_backward import grouped
from meshwright_worker.models.token_rows import RowOrder, order_by_expert, order_in_slots


class DispatchPlan(Protocol):
    """Exchanges one micro-batch's rows with the ranks of their experts. Autograd goes through both directions."""

    @property
    def counts(self) -> torch.Tensor | int:
        """int64 [experts here]: number of rows that arrive for each; one number if it is the same for all."""

    @property
    def sent_rows(self) -> int | None:
        """Number of rows that are sent; None if only the device knows it."""

    @property
    def origin(self) -> torch.Tensor | None:
        """int64 [rows that arrive]: which rank of the expert group sent each; None if this rank sent all."""

    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows sorted by expert, [rows, hidden] -> the rows of this rank's experts, sorted by expert."""

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """The reverse of `dispatch`."""


class Dispatcher(Protocol):
    """Creates dispatch plans."""

    def plan(self, counts: torch.Tensor) -> DispatchPlan:
        """Plan the dispatch of rows of which `counts`, int64 [experts], go to each expert."""

    def plan_even(self, rows: int) -> DispatchPlan:
        """Plan the dispatch of the same number of rows to each expert, which is known without the device."""


class ArrivedTokens(Protocol):
    """Tokens of several ranks that have come to a rank of their experts' node (`parallel/expert/node_exchange`)."""

    @property
    def experts(self) -> torch.Tensor:
        """int64 [tokens, per_token]: experts of this node, numbered from 0; the number of these for any other."""

    @property
    def local_experts(self) -> int:
        """Number of the node's experts."""

    def send(self, tokens: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [tokens, hidden] of this rank and their experts' weights [tokens, per_token] -> those that arrive."""

    def send_back(self, tokens: torch.Tensor) -> torch.Tensor:
        """Outputs for the tokens that arrived -> sums over nodes for this rank's tokens."""


class NodeExchange(Protocol):
    """Sends a token to each node once, whatever number of its experts is there."""

    def plan(self, experts: torch.Tensor) -> ArrivedTokens:
        """Plan for int64 [tokens, per_token]: the expert of each choice; dropped ones have a larger number."""


@dataclass(frozen=True, slots=True)
class LocalDispatchPlan:
    """The plan of rows whose experts are all on this rank."""

    counts: torch.Tensor | int

    @property
    def sent_rows(self) -> None:
        """See `DispatchPlan`."""

    @property
    def origin(self) -> None:
        """See `DispatchPlan`."""

    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        """See `DispatchPlan`."""
        return rows

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """See `DispatchPlan`."""
        return rows


class LocalDispatcher:
    """Every expert is on this rank."""

    def plan(self, counts: torch.Tensor) -> LocalDispatchPlan:
        """See `Dispatcher`."""
        return LocalDispatchPlan(counts)

    def plan_even(self, rows: int) -> LocalDispatchPlan:
        """See `Dispatcher`."""
        return LocalDispatchPlan(rows)


class GroupedProduct(Protocol):
    """Replaces the product of rows with the matrices of their experts (`fp8`)."""

    def __call__(
        self, rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, origin: torch.Tensor | None
    ) -> torch.Tensor:
        """See `split_backward.grouped`; `origin` as of a `DispatchPlan`."""


class Experts(nn.Module):
    """SwiGLU networks (arXiv 2002.05202), with one tensor per matrix for all experts."""

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.products: dict[str, GroupedProduct] = {}
        """Replacements of `split_backward.grouped`, by matrix."""
        self.gate = nn.Parameter(torch.empty(experts, width, hidden))
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(
        self, rows: torch.Tensor, counts: torch.Tensor | int, origin: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows sorted by expert, [rows, hidden], of which `counts` belong to each of this rank's experts -> the same
        shape.
        """

        def times(name: str, x: torch.Tensor) -> torch.Tensor:
            weight, product = self.get_parameter(name), self.products.get(name)
            if product is None or isinstance(counts, int):
                return grouped(x, weight, counts)
            return product(x, weight, counts, origin)

        return times("down", F.silu(times("gate", rows)) * times("up", rows))


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """A micro-batch between the router and the experts."""

    rows: torch.Tensor
    """[rows, hidden]: a copy of a token for each of its experts, sorted by expert; dropped copies are missing."""
    order: RowOrder
    """Which copy of which token each row is."""
    weights: torch.Tensor
    """[tokens, per_token]."""
    dispatch_plan: DispatchPlan
    arrived: ArrivedTokens | None
    """Where the tokens came from, if not from this rank."""
    balancing_loss: torch.Tensor
    """The balancing losses, weighted, summed over tokens: fp32 []."""
    routing_stats: torch.Tensor
    """Statistics to count when this micro-batch's gradient passes, see `RoutingStats`."""


class MixtureOfExperts(nn.Module):
    """A router, routed experts and, if the model has them, shared experts.

    `dispatcher`, `node_exchange`, `padded`, `sequences` and `routing_replicas` are set by the code that splits the
    model over ranks.
    """

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        if model.mixture is None:
            raise ValueError("the model has no `mixture`")
        mixture = model.mixture
        self.mixture = mixture
        self.router = ExpertRouter(model.hidden_size, mixture)
        self.experts = Experts(mixture.experts, model.hidden_size, mixture.intermediate_size)
        self.shared: FeedForward | None = None
        if mixture.shared_intermediate_size:
            self.shared = FeedForward(
                model.model_copy(update={"intermediate_size": mixture.shared_intermediate_size, "mixture": None})
            )
        self.dispatcher: Dispatcher = LocalDispatcher()
        self.node_exchange: NodeExchange | None = None
        self.padded = False
        """Whether each expert gets rows for its full capacity, so that all sizes are known without the device."""
        self.load_balancer = LoadBalancer(mixture, SequencePartition())
        self.routing_replicas = 1
        """Number of ranks that route the same tokens, each with a part of the experts' widths."""
        self.slices = 1
        """Number of ranks of a tensor group that route their own positions."""
        self.whole = True
        """Whether the experts' widths are not split over a tensor group."""
        self.routing_stats = RoutingStats(mixture.experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, positions, hidden] -> the same shape."""
        routed = self.route(x)
        dispatch_plan = routed.dispatch_plan
        rows = self.experts(
            dispatch_plan.dispatch(routed.rows),
            dispatch_plan.counts,
            dispatch_plan.origin if self.experts.products else None,
        )
        return self.finish(x, routed, dispatch_plan.combine(rows))

    def route(self, x: torch.Tensor) -> RoutedTokens:
        """Choose experts for x, [batch, positions, hidden], and sort a copy of each token for each of its experts."""
        count = self.mixture.experts
        routing = self.router(x)
        fit = self.load_balancer.fit(routing.experts)
        # Dropped rows are sorted behind the last expert and then cut off.
        experts = routing.experts if fit is None else routing.experts.masked_fill(~fit.within, count)
        kept = _histogram(experts.flatten(), count + 1)
        auxiliary, z = self.load_balancer.losses(routing)
        tokens, weights, arrived = x.flatten(0, 1), routing.weights.flatten(0, 1), None
        if self.node_exchange is not None:
            arrived = self.node_exchange.plan(experts.flatten(0, 1))
            tokens, weights = arrived.send(tokens, weights)
        order, dispatch_plan = self._order(experts, kept, fit, arrived)
        return RoutedTokens(
            rows=order.take(tokens),
            order=order,
            weights=weights,
            dispatch_plan=dispatch_plan,
            arrived=arrived,
            balancing_loss=self.mixture.balance_weight * auxiliary + self.mixture.z_loss_weight * z,
            routing_stats=self.routing_stats.entry(
                _histogram(routing.experts.flatten(), count), kept[count:], auxiliary, z
            ),
        )

    def _order(
        self, experts: torch.Tensor, kept: torch.Tensor, fit: Fit | None, arrived: ArrivedTokens | None
    ) -> tuple[RowOrder, DispatchPlan]:
        """Return the order of rows and their dispatch plan.

        Args:
            experts: int64 [batch, positions, per_token]: dropped choices have the number of experts.
            kept: int64 [experts + 1]: number of choices of each expert, and of dropped ones.
            fit: the capacity, if experts have one.
            arrived: the tokens that experts of this node compute, if they are exchanged between nodes first.
        """
        count = self.mixture.experts
        if arrived is not None:
            count = arrived.local_experts
            counts = _histogram(arrived.experts.flatten(), count + 1)[:count]
            plan = self.dispatcher.plan(counts)
            rows = int(counts.sum()) if plan.sent_rows is None else plan.sent_rows
            return order_by_expert(arrived.experts, rows), plan
        if fit is not None and self.padded:
            rows = experts.shape[0] * fit.limit
            slots = self._slots(experts, fit)
            return order_in_slots(slots.flatten(0, 1), count * rows), self.dispatcher.plan_even(rows)
        plan = self.dispatcher.plan(kept[:count])
        if fit is None:
            return order_by_expert(experts.flatten(0, 1)), plan
        return order_by_expert(
            experts.flatten(0, 1), int(kept[:count].sum()) if plan.sent_rows is None else plan.sent_rows
        ), plan

    def _slots(self, experts: torch.Tensor, fit: Fit) -> torch.Tensor:
        """Return the slot of each choice among those of all experts, and of all sequences of each expert."""
        batch = experts.shape[0]
        sequence = torch.arange(batch, device=experts.device).view(-1, 1, 1)
        slots = (experts * batch + sequence) * fit.limit + fit.place
        return slots.masked_fill(~fit.within, self.mixture.experts * batch * fit.limit)

    def finish(self, x: torch.Tensor, routed: RoutedTokens, rows: torch.Tensor) -> torch.Tensor:
        """Sum the rows that the experts returned for `routed`, and the shared experts' output."""
        by_choice = routed.order.by_token(rows)
        mixed = torch.bmm(routed.weights.to(rows.dtype).unsqueeze(1), by_choice)
        if routed.arrived is not None:
            mixed = routed.arrived.send_back(mixed.squeeze(1))
        y = mixed.view_as(x)
        if self.shared is not None:
            y = y + self.shared(x)
        attached: torch.Tensor = _AttachBalancingLoss.apply(y, routed.balancing_loss, routed.routing_stats, self)  # type: ignore[no-untyped-call]
        return attached


class _AttachBalancingLoss(torch.autograd.Function):
    """Adds a loss's gradient when the gradient of the layer's output passes, so that the loss need not reach the last
    stage.

    Counting in the backward pass counts a micro-batch once even if its forward pass is recomputed, and excludes
    evaluation.
    """

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, balancing_loss: torch.Tensor, routing_stats: torch.Tensor, mixture: MixtureOfExperts
    ) -> torch.Tensor:
        ctx.routing_stats, ctx.mixture, ctx.like = routing_stats, mixture, balancing_loss.new_empty(())
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        (gradient,) = gradients
        mixture: MixtureOfExperts = ctx.mixture
        mixture.routing_stats.add(ctx.routing_stats)
        weight = torch.ones_like(ctx.like) * (mixture.routing_stats.loss_weight / mixture.routing_replicas)
        return gradient, weight.to(ctx.like.dtype), None, None


def build_feed_forward(model: Architecture, layer: int) -> nn.Module:
    """Build the feed-forward part of layer number `layer`: a mixture of experts or a dense layer."""
    return MixtureOfExperts(model) if is_mixture(model.mixture, layer) else FeedForward(model)


def iter_moe_layers(stage: nn.Module) -> Iterator[tuple[str, MixtureOfExperts]]:
    """Yield the mixtures of a stage and their names."""
    for name, module in stage.named_modules():
        if isinstance(module, MixtureOfExperts):
            yield name, module


def _histogram(values: torch.Tensor, size: int) -> torch.Tensor:
    # bincount waits for the device and histc counts in floats.
    return values.new_zeros(size).scatter_add_(0, values, torch.ones_like(values))
