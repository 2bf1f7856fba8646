"""A hint about the jobs or pods that would have to end so that a job fits.

It is part of a condition's message. The operator does not stop anything because of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from meshwright.planner.cluster.pod_resources import Resources
from meshwright_operator.scheduling.cluster_view import ClusterView
from meshwright_operator.text import counted

MAX_OCCUPANTS = 24
"""How many occupants are considered, the largest first."""
MAX_NAMED = 4

Amounts = dict[str, Resources]
"""Node -> resources."""


@dataclass(frozen=True, slots=True)
class Occupant:
    """A job, or a foreign pod, that occupies GPUs."""

    name: str
    gpus: int
    requested: Amounts
    """Node -> what it requests there."""


def occupants(view: ClusterView, gpu_resource: str, without_job: str) -> list[Occupant]:
    """The largest jobs and foreign pods that occupy GPUs, without the job with the uid `without_job`."""
    gpus = (
        (key, count)
        for key, count in view.use_of(gpu_resource).gpus_by_occupant.items()
        if count > 0 and not (without_job and key[1] == without_job)
    )
    largest = nsmallest(MAX_OCCUPANTS, gpus, key=lambda entry: (-entry[1], entry[0]))
    return [Occupant(key[0], count, view.used_by_occupant(key, gpu_resource)) for key, count in largest]


def capacity_hint(candidates: Sequence[Occupant], fits: Callable[[Amounts], bool]) -> str:
    """What would have to end, such as `Fits when job default/a (8 GPUs) ends`; empty if that would not help.

    Args:
        candidates: What occupies GPUs, the largest first.
        fits: Whether the job fits if these amounts become free.
    """
    for occupant in reversed(candidates):
        if fits(occupant.requested):
            return f"Fits when {_named([occupant])} ends"
    freed: Amounts = {}
    for count, occupant in enumerate(candidates, 1):
        for node, amount in occupant.requested.items():
            freed[node] = freed.get(node, Resources()) + amount
        if count > 1 and fits(freed):
            return f"Fits when {_named(candidates[:count])} end"
    return ""


def _named(chosen: Sequence[Occupant]) -> str:
    text = " and ".join(f"{occupant.name} ({counted(occupant.gpus, 'GPU')})" for occupant in chosen[:MAX_NAMED])
    return text + (f" and {len(chosen) - MAX_NAMED} more" if len(chosen) > MAX_NAMED else "")
