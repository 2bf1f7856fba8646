"""The search: best first, on lower bounds that grow tighter as a layout is filled in.

A shape is bounded by its step at the largest micro-batch without what choices can still change (bubble, gradient
reduction, recomputation, offload); then micro-batch, schedule and context method are filled in, each with its own
bound; last the memory savings, of which the cheapest that fits is priced in full, since a layout that fits is never
made faster by saving more memory. Whatever is taken from the queue first is expanded, so that nothing is priced whose
bound exceeds the best by more than the 2 % within which plans count as equally good.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import count

from meshwright.api.parallelism import ContextMethod
from meshwright.api.training import ActivationCheckpointing
from meshwright.layout import Layout
from meshwright.planner.cost.estimate import time_of
from meshwright.planner.cost.memory import Memory
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.search.candidate import Candidate, FittingLayout, pareto
from meshwright.planner.search.errors import NothingFitsError, no_layout_message, nothing_fits_error
from meshwright.planner.search.expand import (
    balance_candidates,
    base_strategies,
    can_fit,
    estimate_cost,
    first_held_by_some_gpu,
    memory_savings,
    preferred_strategies,
    strategy_of,
    with_balanced_stages,
)
from meshwright.planner.search.request import Objective, SearchRequest
from meshwright.planner.search.search_space import layouts, micro_batch_sizes, request_tiers

TIE_TOLERANCE = 1.02
"""Plans within 2 % of the best are as good as it: estimates are not better than that, and the simplest of them wins."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best layout, and what it was chosen from."""

    request: SearchRequest
    best: Candidate
    ranked: tuple[Candidate, ...]
    """Within 2 % of the best score, the simplest first; with an order of preference one for each layout, the best
    first. `best` is the first.
    """
    alternatives: tuple[Candidate, ...]
    """The Pareto front over step time, GPUs and robustness, among all that was priced."""
    layouts: int
    estimated: int
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
        ValueError: the request has no machine, or a split or a schedule that it pins does not go with its model.
    """
    tried: list[Layout] = []
    found: list[Candidate] = []
    for tier in request_tiers(request):
        for narrowed in tier:
            world_size = found[0].strategy.world_size if found and request.order_of_preference else request.world_size
            all_layouts, candidates = _explore(replace(narrowed, world_size=world_size))
            tried += all_layouts
            found += candidates
        if found:
            break
    if not tried:
        raise NothingFitsError(no_layout_message(request))
    if not found:
        raise nothing_fits_error(request)
    found += [better for one in balance_candidates(request, found) for better in with_balanced_stages(request, one)]
    ranked = _in_order_of_preference(found) if request.order_of_preference else _ranked(request, found)
    return SearchResult(request, ranked[0], tuple(ranked), tuple(pareto(found)), len(tried), len(found))


def _explore(request: SearchRequest) -> tuple[list[Layout], list[Candidate]]:
    """(every layout, what was priced): the layout of the least bound is filled in first.

    With an order of preference no bound tells layouts apart, so they are taken in that order, and of those after the
    first that fits only layouts of as many GPUs.
    """
    numbers = count()
    queue = [_PartialLayout(bound, next(numbers), layout) for layout, bound in _bounded_layouts(request)]
    all_layouts = [one.layout for one in queue]
    heapify(queue)
    found: list[Candidate] = []
    best = float("inf")
    while queue and queue[0].bound <= best * TIE_TOLERANCE:
        partial = heappop(queue)
        if request.order_of_preference and found and partial.layout.world_size != found[0].strategy.world_size:
            continue
        if partial.base is not None or request.order_of_preference:
            for strategy, memory in _fitting(request, partial):
                found.append(Candidate(strategy, estimate_cost(request, strategy, memory), request.node))
                best = min(best, found[-1].score(request.objective))
        else:
            for bound, size, base in _filled_in(request, partial):
                heappush(queue, _PartialLayout(bound, next(numbers), partial.layout, size, base))
    return all_layouts, found


def _fitting(request: SearchRequest, partial: _PartialLayout) -> Iterator[tuple[Strategy, Memory]]:
    """Complete strategies that fit, with their memory."""
    if partial.base is not None:
        return memory_savings(request, partial.base)
    return preferred_strategies(request, partial.layout)


def _filled_in(request: SearchRequest, partial: _PartialLayout) -> Iterator[tuple[float, int, Strategy | None]]:
    """(bound, micro-batch size, everything but the memory savings) with one decision more than `partial`."""
    layout = partial.layout
    if partial.micro_batch is not None:
        for base in base_strategies(request, layout, partial.micro_batch):
            yield _strategy_bound(request, base), partial.micro_batch, base
        return
    for size in micro_batch_sizes(request, layout):
        if can_fit(request, layout, size):
            yield max(partial.bound, _layout_bound(request, layout, size)), size, None


def _bounded_layouts(request: SearchRequest) -> Iterator[tuple[Layout, float]]:
    for layout in layouts(request):
        if request.order_of_preference:
            yield layout, 0.0
        elif sizes := micro_batch_sizes(request, layout):
            yield layout, _layout_bound(request, layout, sizes[-1])


def _layout_bound(request: SearchRequest, layout: Layout, size: int) -> float:
    """The least score of any strategy of a layout with micro-batches of up to `size` sequences."""
    method = request.pins.context_method or (request.techniques.context or (ContextMethod.RING_ZIG_ZAG,))[0]
    strategy = strategy_of(request, layout, size, context_method=method)
    several_methods = len(request.techniques.context) > 1 and layout.context > 1
    time = time_of(request.work, strategy, request.required_machine)
    least = time.total - time.bubble - time.data - time.pipeline - (time.context if several_methods else 0.0)
    return _score(request, layout, least)


def _strategy_bound(request: SearchRequest, base: Strategy) -> float:
    """The least score of any layout that differs from `base` in its memory savings only."""
    time = time_of(request.work, base, request.required_machine)
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


def _in_order_of_preference(found: list[Candidate]) -> list[Candidate]:
    """One candidate for each layout, the best first.

    The best is the first, in the order of `found`, that takes at most 2 % longer than the fastest: among the micro-
    batches and schedules of each layout and its checkpointing, and then among what these leave. The others follow by
    time.
    """
    variants: dict[tuple[Layout, ActivationCheckpointing], list[Candidate]] = {}
    for one in found:
        variants.setdefault((one.strategy.layout, one.strategy.checkpointing), []).append(one)
    preferred = [_first_of_fastest(same) for same in variants.values()]
    best = _first_of_fastest(preferred)
    of_layout: dict[Layout, Candidate] = {}
    for one in (best, *sorted((one for one in preferred if one is not best), key=lambda one: one.seconds)):
        of_layout.setdefault(one.strategy.layout, one)
    return list(of_layout.values())


def _first_of_fastest(found: list[Candidate]) -> Candidate:
    limit = TIE_TOLERANCE * min(one.seconds for one in found)
    return next(one for one in found if one.seconds <= limit)


def ranked_layouts(request: SearchRequest) -> list[FittingLayout]:
    """The layouts of a request with an order of preference that fit, the best first.

    Without a machine, only the first in order of preference is returned. If the cluster has too few GPUs for all
    layouts, the first that fits on some GPU is returned: the placement then reports what is missing.

    Raises:
        ValueError: a split or a schedule that the request pins does not fit its model.
    """
    if request.machine is not None:
        try:
            return [FittingLayout(one.strategy, one.estimate.memory) for one in search(request).ranked]
        except NothingFitsError:
            pass
    narrowed = [one for tier in request_tiers(request) for one in tier]
    if request.machine is None:
        for one in narrowed:
            first = next((fit for layout in layouts(one) for fit in preferred_strategies(one, layout)), None)
            if first is not None:
                return [FittingLayout(*first)]
    for one in narrowed:
        held = first_held_by_some_gpu(one)
        if held is not None:
            return [FittingLayout(*held)]
    return []
