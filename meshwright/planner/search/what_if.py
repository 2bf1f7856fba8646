"""Estimates what a better cluster would gain: repeats the search on a machine with one improvement."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.planner.cost.fabric import Fabric
from meshwright.planner.search.best_first import SearchResult, search
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.errors import NothingFitsError
from meshwright.planner.search.request import SearchRequest
from meshwright.rules.parallelism import MAX_WORKERS, MAX_WORLD_SIZE


@dataclass(frozen=True, slots=True)
class WhatIf:
    """An improvement and its gain."""

    change: str
    found: Candidate | None
    """The best layout with it. None if nothing fits."""
    speedup: float
    """Tokens per second relative to those without the improvement."""

    @property
    def sentence(self) -> str:
        """The improvement and its gain."""
        if self.found is None:
            return f"{self.change}: no layout"
        return f"{self.change}: {self.speedup:.2f} times the tokens per second ({self.found.summary})"


def what_ifs(result: SearchResult) -> tuple[WhatIf, ...]:
    """Search with twice the GPUs, network bandwidth or NVLink domain, or 1.5 times the memory, one at a time."""
    request = result.request
    now = result.best.estimate.tokens_per_second
    answers = []
    for change, better in _improvements(request):
        try:
            found = search(better).best
        except NothingFitsError:
            answers.append(WhatIf(change, None, 0.0))
            continue
        answers.append(WhatIf(change, found, found.estimate.tokens_per_second / now))
    return tuple(answers)


def _twice_the_gpus(request: SearchRequest) -> int:
    """Twice the GPUs, or as many as a job may have if those are less."""
    most = min(MAX_WORLD_SIZE, MAX_WORKERS * request.gpus_per_worker)
    return 2 * request.gpus if request.techniques.runs is None else min(2 * request.gpus, most)


def _improvements(request: SearchRequest) -> list[tuple[str, SearchRequest]]:
    machine = request.required_machine
    levels = machine.fabric.levels
    faster = (levels[0], *(replace(level, bandwidth=2 * level.bandwidth) for level in levels[1:]))
    roomier = replace(machine, gpu=replace(machine.gpu, memory=1.5 * machine.gpu.memory))
    improved = [("GPUs with half again the memory", replace(request, machine=roomier))]
    if (more := _twice_the_gpus(request)) > request.gpus:
        improved.insert(0, (f"{more} GPUs instead of {request.gpus}", replace(request, gpus=more)))
    if len(levels) > 1:
        network = replace(machine, fabric=Fabric(faster))
        improved.append(("twice the bandwidth between domains", replace(request, machine=network)))
        wide = (replace(levels[0], gpus=2 * levels[0].gpus), *(w for w in levels[1:] if w.gpus > 2 * levels[0].gpus))
        domain = replace(machine, fabric=Fabric(wide))
        change = f"NVLink domains of {2 * levels[0].gpus} GPUs instead of {levels[0].gpus}"
        improved.append((change, replace(request, machine=domain, max_tensor=None)))
    return improved
