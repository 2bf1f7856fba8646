"""Why a search found nothing, in a sentence that says what to change."""

from __future__ import annotations

from meshwright.planner.cost.memory import Memory, worst_stage
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.search.candidate import Candidate, FittingLayout
from meshwright.planner.search.expand import least_memory_strategies, price
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.search_space import layouts, request_tiers
from meshwright.planner.units import GIB


class NothingFitsError(ValueError):
    """No layout the request allows fits; `nearest` is the one that misses by least, if any could be counted."""

    def __init__(self, message: str, nearest: Strategy | None = None, memory: Memory | None = None) -> None:
        super().__init__(message)
        self.nearest = nearest
        self.memory = memory


def no_layout_message(request: SearchRequest) -> str:
    """The message for degrees that divide neither the model nor the batch."""
    pins = request.pins
    pinned_values = {
        name: value
        for name in ("tensor", "context", "pipeline", "expert", "data", "micro_batches", "micro_batch_size")
        if (value := getattr(pins, name)) is not None
    }
    pinned_text = ", ".join(f"{name} {value}" for name, value in pinned_values.items()) or "nothing"
    return (
        f"no layout divides the model and the batch of {request.work.global_batch} sequences over at most "
        f"{request.gpus} GPUs with {pinned_text} given: change a given degree, the batch, or the number of GPUs"
    )


def closest_layout(request: SearchRequest) -> FittingLayout | None:
    """The strategy that needs least memory of all that the request allows; None if it allows none."""
    smallest: FittingLayout | None = None
    for narrowed in (one for tier in request_tiers(request) for one in tier):
        for layout in layouts(narrowed):
            for strategy in least_memory_strategies(narrowed, layout):
                memory = worst_stage(request.work, strategy, request.runtime)
                if smallest is None or memory.total < smallest.memory.total:
                    smallest = FittingLayout(strategy, memory)
    return smallest


def nothing_fits_error(request: SearchRequest) -> NothingFitsError:
    """The error for a model that no layout makes fit, with the layout that misses by least."""
    closest = closest_layout(request)
    if closest is None:
        return NothingFitsError(no_layout_message(request))
    choices, memory = closest.strategy, closest.memory
    total, limit = memory.total, request.memory_limit(1)
    message = (
        f"no layout fits: the least that a rank needs is {total / GIB:.1f} GiB of {limit / GIB:.1f} GiB "
        f"({Candidate(choices, price(request, choices), request.node).summary}, stage {memory.stage}): add "
        "GPUs, take GPUs "
        "with more memory, or shorten the sequence"
    )
    return NothingFitsError(message, choices, memory)
