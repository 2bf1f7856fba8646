"""Why a search found nothing, in a sentence that says what to change."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.planner.cost.choices import Choices
from meshwright.planner.cost.estimate import memory_of
from meshwright.planner.cost.memory import Memory
from meshwright.planner.search.fill import price, thriftiest
from meshwright.planner.search.found import Found
from meshwright.planner.search.request import Request
from meshwright.planner.search.shapes import Shape, micro_batch_sizes


class NothingFitsError(ValueError):
    """No layout the request allows fits; `nearest` is the one that misses by least, if any could be counted."""

    def __init__(self, message: str, nearest: Choices | None = None, memory: Memory | None = None) -> None:
        super().__init__(message)
        self.nearest = nearest
        self.memory = memory


def contradiction(request: Request) -> str:
    """The message for degrees that divide neither the model nor the batch."""
    pins = request.pins
    stated = {
        name: value
        for name in ("tensor", "context", "pipeline", "expert", "data", "micro_batches", "micro_batch_size")
        if (value := getattr(pins, name)) is not None
    }
    given = ", ".join(f"{name} {value}" for name, value in stated.items()) or "nothing"
    return (
        f"no layout divides the model and the batch of {request.work.global_batch} sequences over at most "
        f"{request.gpus} GPUs with {given} given: change a given degree, the batch, or the number of GPUs"
    )


def too_large(request: Request, everything: Iterable[Shape]) -> NothingFitsError:
    """The error for a model that no layout makes fit, with the layout that misses by least."""
    least: tuple[float, Choices, Memory] | None = None
    for shape in everything:
        for choices in thriftiest(request, shape, micro_batch_sizes(request, shape)[0]):
            memory = memory_of(request.work, choices, request.machine)
            if least is None or memory.total < least[0]:
                least = (memory.total, choices, memory)
    if least is None:
        return NothingFitsError(contradiction(request))
    total, choices, memory = least
    limit = request.usable * request.machine.gpu.memory
    message = (
        f"no layout fits: the least that a rank needs is {total / 2**30:.1f} GiB of {limit / 2**30:.1f} GiB "
        f"({Found(choices, price(request, choices), request.node).summary}, stage {memory.stage}): add GPUs, take GPUs "
        "with more memory, or shorten the sequence"
    )
    return NothingFitsError(message, choices, memory)
