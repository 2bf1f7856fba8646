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

from meshwright.planner.cost.choices import Choices, ContextMethod
from meshwright.planner.cost.estimate import time_of
from meshwright.planner.search.balance import leaders, uneven
from meshwright.planner.search.errors import NothingFitsError, contradiction, too_large
from meshwright.planner.search.fill import bases, can_fit, choices_of, price, savings
from meshwright.planner.search.found import Found, pareto
from meshwright.planner.search.request import Objective, Request
from meshwright.planner.search.shapes import Shape, micro_batch_sizes, shapes

AS_GOOD = 1.02
"""Plans within 2 % of the best are as good as it: estimates are not better than that, and the simplest of them wins."""


@dataclass(frozen=True, slots=True)
class Result:
    """The best layout, and what it was chosen from."""

    request: Request
    best: Found
    as_good: tuple[Found, ...]
    """Within 2 % of the best score, the simplest first; `best` is the first."""
    alternatives: tuple[Found, ...]
    """The Pareto front over step time, GPUs and robustness, among all that was priced."""
    shapes: int
    priced: int
    """Layouts whose time was estimated."""


@dataclass(frozen=True, slots=True, order=True)
class _Open:
    """A layout that is not filled in yet, and the least score that filling it in can give."""

    bound: float
    order: int
    shape: Shape = field(compare=False)
    micro_batch: int | None = field(default=None, compare=False)
    base: Choices | None = field(default=None, compare=False)
    """Everything but the memory savings."""


def search(request: Request) -> Result:
    """The best layout for a request.

    Raises:
        NothingFitsError: no layout fits memory, or the pinned degrees contradict the model or the batch.
    """
    numbers = count()
    queue = [_Open(bound, next(numbers), shape) for shape, bound in _bounded_shapes(request)]
    if not queue:
        raise NothingFitsError(contradiction(request))
    everything = [one.shape for one in queue]
    heapify(queue)
    found: list[Found] = []
    best = float("inf")
    while queue and queue[0].bound <= best * AS_GOOD:
        taken = heappop(queue)
        if taken.base is not None:
            for choices, memory in savings(request, taken.base):
                found.append(Found(choices, price(request, choices, memory), request.node))
                best = min(best, found[-1].score(request.objective))
        elif taken.micro_batch is not None:
            for base in bases(request, taken.shape, taken.micro_batch):
                heappush(queue, _Open(_least(request, base), next(numbers), taken.shape, taken.micro_batch, base))
        else:
            for size in micro_batch_sizes(request, taken.shape):
                if can_fit(request, taken.shape, size):
                    bound = max(taken.bound, _bound(request, taken.shape, size))
                    heappush(queue, _Open(bound, next(numbers), taken.shape, size))
    if not found:
        raise too_large(request, everything)
    found += [better for one in leaders(request, found) for better in uneven(request, one)]
    ranked = _ranked(request, found)
    return Result(request, ranked[0], tuple(ranked), tuple(pareto(found)), len(everything), len(found))


def _bounded_shapes(request: Request) -> Iterator[tuple[Shape, float]]:
    for shape in shapes(request):
        sizes = micro_batch_sizes(request, shape)
        if sizes:
            yield shape, _bound(request, shape, sizes[-1])


def _bound(request: Request, shape: Shape, size: int) -> float:
    """The least score of any layout of a shape with micro-batches of up to `size` sequences."""
    method = request.pins.context_method or (request.techniques.context or (ContextMethod.RING_ZIG_ZAG,))[0]
    choices = choices_of(request, shape, size, context_method=method)
    several = len(request.techniques.context) > 1 and shape.context > 1
    time = time_of(request.work, choices, request.machine)
    least = time.total - time.bubble - time.data - time.pipeline - (time.context if several else 0.0)
    return _score(request, shape, least)


def _least(request: Request, base: Choices) -> float:
    """The least score of any layout that differs from `base` in its memory savings only."""
    time = time_of(request.work, base, request.machine)
    shape = Shape(base.tensor, base.context, base.pipeline, base.expert, base.data)
    return _score(request, shape, time.total - time.data)


def _score(request: Request, shape: Shape, least: float) -> float:
    if request.objective is Objective.GPUS:
        return float(shape.world)
    if request.objective is Objective.COST:
        return least * shape.world
    if request.objective is Objective.ROBUST:
        return least * shape.data / max(1, shape.data - 1)
    return least


def _ranked(request: Request, found: list[Found]) -> list[Found]:
    """All within 2 % of the best, the simplest first, and the faster first among equally simple ones."""
    objective = request.objective
    least = min(one.score(objective) for one in found)
    good = [one for one in found if one.score(objective) <= least * AS_GOOD]
    if objective is Objective.GPUS:
        fewest = [one for one in good if one.score(objective) == least]
        fastest = min(one.seconds for one in fewest)
        good = [one for one in fewest if one.seconds <= fastest * AS_GOOD]
    return sorted(good, key=lambda one: (one.intricacy, one.score(objective), one.seconds, one.choices.zero_stage))
