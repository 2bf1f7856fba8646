"""The search: best first, on lower bounds that grow tighter as a layout is filled in.

A shape is bounded by its step at the largest micro-batch without what choices can still change (bubble, gradient
reduction, recomputation, offload); then micro-batch, schedule and context method are filled in, each with its own
bound; last the memory savings, of which the cheapest that fits is priced in full, since a layout that fits is never
made faster by saving more memory. Whatever is taken from the queue first is expanded, so that nothing is priced whose
bound exceeds the best by more than the 2 % within which plans count as equally good.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

from meshwright.api.parallelism import ContextMethod
from meshwright.layout import Layout
from meshwright.planner.cost.estimate import time_of
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.search.candidate import Candidate, pareto
from meshwright.planner.search.errors import NothingFitsError, no_layout_message, nothing_fits_error
from meshwright.planner.search.expand import (
    balance_candidates,
    base_strategies,
    can_fit,
    memory_savings,
    price,
    strategy_of,
    with_balanced_stages,
)
from meshwright.planner.search.request import Objective, SearchRequest
from meshwright.planner.search.search_space import layouts, micro_batch_sizes

TIE_TOLERANCE = 1.02
"""Plans within 2 % of the best are as good as it: estimates are not better than that, and the simplest of them wins."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best layout, and what it was chosen from."""

    request: SearchRequest
    best: Candidate
    tied: tuple[Candidate, ...]
    """Within 2 % of the best score, the simplest first; `best` is the first."""
    alternatives: tuple[Candidate, ...]
    """The Pareto front over step time, GPUs and robustness, among all that was priced."""
    layouts: int
    priced: int
    """Layouts whose time was estimated."""


@dataclass(frozen=True, slots=True, order=True)
class _PartialLayout:
    """A layout that is not filled in yet, and the least score that filling it in can give."""

    bound: float
    order: int
    layout: Layout = field(compare=False)
    micro_batch: int | None = field(default=None, compare=False)
    base: Strategy | None = field(default=None, compare=False)
    """Everything but the memory savings."""


def search(request: SearchRequest) -> SearchResult:
    """The best layout for a request.

    Raises:
        NothingFitsError: no layout fits memory, or the pinned degrees contradict the model or the batch.
    """
    numbers = count()
    queue = [_PartialLayout(bound, next(numbers), layout) for layout, bound in _bounded_layouts(request)]
    if not queue:
        raise NothingFitsError(no_layout_message(request))
    all_layouts = [one.layout for one in queue]
    heapify(queue)
    found: list[Candidate] = []
    best = float("inf")
    while queue and queue[0].bound <= best * TIE_TOLERANCE:
        partial = heappop(queue)
        if partial.base is not None:
            for choices, memory in memory_savings(request, partial.base):
                found.append(Candidate(choices, price(request, choices, memory), request.node))
                best = min(best, found[-1].score(request.objective))
        elif partial.micro_batch is not None:
            for base in base_strategies(request, partial.layout, partial.micro_batch):
                heappush(
                    queue,
                    _PartialLayout(
                        _strategy_bound(request, base), next(numbers), partial.layout, partial.micro_batch, base
                    ),
                )
        else:
            for size in micro_batch_sizes(request, partial.layout):
                if can_fit(request, partial.layout, size):
                    bound = max(partial.bound, _layout_bound(request, partial.layout, size))
                    heappush(queue, _PartialLayout(bound, next(numbers), partial.layout, size))
    if not found:
        raise nothing_fits_error(request, all_layouts)
    found += [better for one in balance_candidates(request, found) for better in with_balanced_stages(request, one)]
    ranked = _ranked(request, found)
    return SearchResult(request, ranked[0], tuple(ranked), tuple(pareto(found)), len(all_layouts), len(found))


def _bounded_layouts(request: SearchRequest) -> Iterator[tuple[Layout, float]]:
    for layout in layouts(request):
        sizes = micro_batch_sizes(request, layout)
        if sizes:
            yield layout, _layout_bound(request, layout, sizes[-1])


def _layout_bound(request: SearchRequest, layout: Layout, size: int) -> float:
    """The least score of any strategy of a layout with micro-batches of up to `size` sequences."""
    method = request.pins.context_method or (request.techniques.context or (ContextMethod.RING_ZIG_ZAG,))[0]
    choices = strategy_of(request, layout, size, context_method=method)
    several_methods = len(request.techniques.context) > 1 and layout.context > 1
    time = time_of(request.work, choices, request.machine)
    least = time.total - time.bubble - time.data - time.pipeline - (time.context if several_methods else 0.0)
    return _score(request, layout, least)


def _strategy_bound(request: SearchRequest, base: Strategy) -> float:
    """The least score of any layout that differs from `base` in its memory savings only."""
    time = time_of(request.work, base, request.machine)
    return _score(request, base, time.total - time.data)


def _score(request: SearchRequest, layout: Layout, least: float) -> float:
    if request.objective is Objective.GPUS:
        return float(layout.world_size)
    if request.objective is Objective.COST:
        return least * layout.world_size
    if request.objective is Objective.ROBUST:
        return least * layout.data / max(1, layout.data - 1)
    return least


def _ranked(request: SearchRequest, found: list[Candidate]) -> list[Candidate]:
    """All within 2 % of the best, the simplest first, and the faster first among equally simple ones."""
    objective = request.objective
    least = min(one.score(objective) for one in found)
    within_tolerance = [one for one in found if one.score(objective) <= least * TIE_TOLERANCE]
    if objective is Objective.GPUS:
        fewest = [one for one in within_tolerance if one.score(objective) == least]
        fastest = min(one.seconds for one in fewest)
        within_tolerance = [one for one in fewest if one.seconds <= fastest * TIE_TOLERANCE]
    return sorted(
        within_tolerance, key=lambda one: (one.complexity, one.score(objective), one.seconds, one.strategy.zero_stage)
    )
