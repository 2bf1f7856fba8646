"""Best-first search, with lower bounds that become tighter as a layout is filled in.

The first bound of a layout is its step at the largest micro-batch, without the parts that later decisions can change:
bubble, gradient reduction, recomputation and offload. Then micro-batch, schedule and context method are filled in, each
with a new bound. The memory savings are last. The first that fits is taken, since saving more memory never makes a
layout faster that fits already. The entry with the lowest bound is expanded first. So no cost is estimated for layouts
whose bound exceeds the best by more than 1%, within which plans count as equally good.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    TIE_TOLERANCE,
    balance_candidates,
    base_strategies,
    can_fit,
    estimate_cost,
    fastest_update,
    hideable_offload,
    job_savings,
    least_memory_sizes,
    least_recomputation,
    memory_savings,
    most_paired,
    preferred_strategies,
    stage_layouts,
    strategy_of,
    with_balanced_stages,
)
from meshwright.planner.search.request import Objective, SearchRequest
from meshwright.planner.search.search_space import layouts, micro_batch_sizes, request_tiers, with_fewer_replicas


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best layout, and those that it was chosen from."""

    request: SearchRequest
    best: Candidate
    ranked: tuple[Candidate, ...]
    """Within 1% of the best score, the simplest first; for a job one for each layout, the best first. `best` is the
    first.
    """
    alternatives: tuple[Candidate, ...]
    """The Pareto front over step time, GPUs and robustness of all estimated layouts."""
    layouts: int
    estimated: int
    """Layouts whose time was estimated."""


@dataclass(frozen=True, slots=True, order=True)
class _PartialLayout:
    """A layout with open decisions, and the lowest score that it can reach."""

    bound: float
    order: int
    layout: Layout = field(compare=False)
    recomputed: ActivationCheckpointing | None = field(default=None, compare=False)
    """For a job: the least recomputation with which the layout's smallest micro-batches fit, once that is known."""
    micro_batch: int | None = field(default=None, compare=False)
    base: Strategy | None = field(default=None, compare=False)
    """Every decision except the memory savings."""


def search(request: SearchRequest) -> SearchResult:
    """Return the best layout for a request.

    Raises:
        NothingFitsError: no layout fits memory, or the pinned degrees contradict the model or the batch.
        ValueError: the request has no machine, or its model does not allow a split or a schedule that it pins.
    """
    tried, found = _explore_tiers(request)
    if not tried:
        raise NothingFitsError(no_layout_message(request))
    if not found:
        raise nothing_fits_error(request)
    ranked = _best_first(request, found)
    return SearchResult(request, ranked[0], tuple(ranked), tuple(pareto(found)), len(tried), len(found))


def _explore_tiers(request: SearchRequest) -> tuple[list[Layout], list[Candidate]]:
    """Return the layouts that were tried, and the candidates of the first tier in which a layout fits."""
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
    found += [better for one in balance_candidates(request, found) for better in with_balanced_stages(request, one)]
    return tried, found


def _best_first(request: SearchRequest, found: list[Candidate]) -> list[Candidate]:
    """The candidates to choose from, the best first."""
    if request.order_of_preference:
        return _in_order_of_preference(found)
    ranked = _ranked(request, found)
    return ranked if request.job is None else _of_each_layout(ranked[0], found)


def _explore(request: SearchRequest) -> tuple[list[Layout], list[Candidate]]:
    """Return all layouts, and the candidates whose cost was estimated. The layout with the lowest bound comes first.

    With an order of preference all bounds are equal, so layouts are taken in that order. After the first that fits,
    only layouts with as many GPUs are filled in.
    """
    numbers = count()
    queue = [_PartialLayout(bound, next(numbers), layout) for layout, bound in _with_bounds(request, layouts(request))]
    all_layouts = {one.layout: None for one in queue}
    heapify(queue)
    found: list[Candidate] = []
    best = float("inf")
    while queue and queue[0].bound <= best * TIE_TOLERANCE:
        partial = heappop(queue)
        if partial.micro_batch is None and partial.recomputed is None and not request.order_of_preference:
            fewer = [one for one in with_fewer_replicas(request, partial.layout) if one not in all_layouts]
            for layout, bound in _with_bounds(request, fewer):
                all_layouts[layout] = None
                heappush(queue, _PartialLayout(bound, next(numbers), layout))
        if request.order_of_preference and found and partial.layout.world_size != found[0].strategy.world_size:
            continue
        if partial.base is not None or request.order_of_preference:
            longest = best * TIE_TOLERANCE if request.objective is Objective.TIME else float("inf")
            for strategy, memory in _fitting(request, partial, longest):
                found.append(Candidate(strategy, estimate_cost(request, strategy, memory), request.node))
                best = min(best, found[-1].score(request.objective))
        else:
            for bound, recomputed, size, base in _filled_in(request, partial):
                heappush(queue, _PartialLayout(bound, next(numbers), partial.layout, recomputed, size, base))
    return list(all_layouts), found


def _fitting(request: SearchRequest, partial: _PartialLayout, longest: float) -> Iterator[tuple[Strategy, Memory]]:
    """Return complete strategies that fit, with their memory. Those of a free job whose step is too long may miss."""
    if partial.base is not None and request.job is not None:
        return job_savings(request, partial.base, longest)
    if partial.base is not None:
        return memory_savings(request, partial.base)
    return preferred_strategies(request, partial.layout)


_Decisions = tuple[float, ActivationCheckpointing | None, int | None, Strategy | None]
"""A new bound, and the fields of `_PartialLayout` after the layout."""


def _filled_in(request: SearchRequest, partial: _PartialLayout) -> Iterator[_Decisions]:
    """Yield the layout with one decision more than `partial`, except the memory savings."""
    layout, recomputed = partial.layout, partial.recomputed
    if partial.micro_batch is not None:
        for base in base_strategies(request, layout, partial.micro_batch):
            yield _strategy_bound(request, base), recomputed, partial.micro_batch, base
        return
    sizes = micro_batch_sizes(request, layout)
    if request.job is None:
        for size in sizes:
            if can_fit(request, layout, size):
                yield max(partial.bound, _layout_bound(request, layout, size)), None, size, None
    elif recomputed is None:
        found = (least_recomputation(request, layout, size) for size in least_memory_sizes(sizes))
        if fitting := [one for one in found if one is not None]:
            recomputed = min(fitting, key=request.recomputations.index)
            yield max(partial.bound, _layout_bound(request, layout, sizes[-1], recomputed)), recomputed, None, None
    else:
        at_least: ActivationCheckpointing | None = recomputed
        for size in sizes[:-1]:
            at_least = least_recomputation(request, layout, size, at_least)
            if at_least is None:
                break  # Larger micro-batches need more, except the only one of a step.
            yield max(partial.bound, _layout_bound(request, layout, size, at_least)), at_least, size, None
        if (alone := least_recomputation(request, layout, sizes[-1], recomputed)) is not None:
            yield max(partial.bound, _layout_bound(request, layout, sizes[-1], alone)), alone, sizes[-1], None


def _with_bounds(request: SearchRequest, all_layouts: Iterable[Layout]) -> Iterator[tuple[Layout, float]]:
    for layout in all_layouts:
        if request.order_of_preference:
            yield layout, 0.0
        elif sizes := micro_batch_sizes(request, layout):
            yield layout, _layout_bound(request, layout, sizes[-1])


def _layout_bound(
    request: SearchRequest, layout: Layout, size: int, least_recomputed: ActivationCheckpointing | None = None
) -> float:
    """The lowest score of any strategy of a layout with micro-batches of up to `size` sequences.

    Every one of them recomputes at least as much as `least_recomputed`.
    """
    method = request.pins.context_method or (request.techniques.context or (ContextMethod.RING_ZIG_ZAG,))[0]
    several_methods = len(request.techniques.context) > 1 and layout.context > 1
    paired, stage = most_paired(request, layout), fastest_update(request, layout)
    least = float("inf")
    for chosen in stage_layouts(request, layout):
        checkpointing = {"checkpointing": least_recomputed or ActivationCheckpointing.NONE}
        strategy = strategy_of(
            request, layout, size, context_method=method, zero_stage=stage, **chosen, **checkpointing
        )
        time = time_of(request.work, strategy, request.required_machine, paired=paired)
        shown = time.total - time.bubble - time.data - time.pipeline - (time.context if several_methods else 0.0)
        least = min(least, shown - hideable_offload(strategy, time))
    return _score(request, layout, least)


def _strategy_bound(request: SearchRequest, base: Strategy) -> float:
    """The lowest score of any strategy that differs from `base` only in its memory savings."""
    time = time_of(request.work, base, request.required_machine)
    return _score(request, base, time.total - time.data - hideable_offload(base, time))


def _score(request: SearchRequest, layout: Layout, least: float) -> float:
    if request.objective is Objective.GPUS:
        return float(layout.world_size)
    if request.objective is Objective.COST:
        return least * layout.world_size
    if request.objective is Objective.ROBUST:
        return least * layout.data / max(1, layout.data - 1)
    return least


def _ranked(request: SearchRequest, found: list[Candidate]) -> list[Candidate]:
    """Return all candidates within 1% of the best: the simplest first, and of equally simple ones the fastest."""
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

    The best is the first in the order of `found` that takes at most 1% longer than the fastest. First one is chosen
    for each layout and checkpointing, among its micro-batches and schedules, and then one of these. The others follow
    by time.
    """
    fastest = min(one.seconds for one in found)
    variants: dict[tuple[Layout, ActivationCheckpointing], list[Candidate]] = {}
    for one in found:
        variants.setdefault((one.strategy.layout, one.strategy.checkpointing), []).append(one)
    preferred = [_first_of_fastest(same) for same in variants.values()]
    best = next(one for one in preferred if one.seconds <= TIE_TOLERANCE * fastest)
    return _of_each_layout(best, preferred)


def _of_each_layout(best: Candidate, found: list[Candidate]) -> list[Candidate]:
    """One candidate for each layout: `best` first, the others by time."""
    of_layout: dict[Layout, Candidate] = {}
    for one in (best, *sorted((one for one in found if one is not best), key=lambda one: one.seconds)):
        of_layout.setdefault(one.strategy.layout, one)
    return list(of_layout.values())


def _first_of_fastest(found: list[Candidate]) -> Candidate:
    limit = TIE_TOLERANCE * min(one.seconds for one in found)
    return next(one for one in found if one.seconds <= limit)


def _with_enough_gpus(request: SearchRequest) -> SearchRequest:
    """The request on a cluster with enough of its largest GPUs."""
    limits = request.limits
    return request if limits is None else replace(request, limits=limits.with_gpus(request.gpus))


def ranked_layouts(request: SearchRequest) -> list[FittingLayout]:
    """The layouts of a request with an order of preference that fit, the best first.

    Without a machine, only the first in order of preference is returned. If the cluster has too few GPUs for all
    layouts, they are those of a cluster with enough. The placement then reports what is missing.

    Raises:
        ValueError: a split or a schedule that the request pins does not fit its model.
    """
    for enough in (request, _with_enough_gpus(request)):
        if enough.machine is not None:
            # Without the error of `search`, whose message takes as long to find as a plan.
            _, found = _explore_tiers(enough)
            if found:
                return [FittingLayout(one.strategy, one.estimate.memory) for one in _best_first(enough, found)]
            continue
        for one in (one for tier in request_tiers(enough) for one in tier):
            first = next((fit for layout in layouts(one) for fit in preferred_strategies(one, layout)), None)
            if first is not None:
                return [FittingLayout(*first)]
    return []
