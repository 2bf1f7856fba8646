"""A hint about the jobs or pods that would have to end so that a job fits.

It is part of a condition's message. The operator does not stop anything because of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.planner.cluster.inventory import MALFORMED, Inventory
from meshwright.planner.cluster.pod_resources import Resources
from meshwright_operator.kube.pod_requests import PodRequest
from meshwright_operator.text import counted

MAX_OCCUPANTS = 24
"""How many occupants are considered, the largest first."""
MAX_NAMED = 4


@dataclass(frozen=True, slots=True)
class Occupant:
    """A job, or a foreign pod, that occupies GPUs."""

    name: str
    gpus: int
    requested: Mapping[str, Resources]
    """Node -> what it requests there."""


def occupants(pod_requests: Iterable[PodRequest], gpu_resource: str, without_job: str) -> list[Occupant]:
    """All jobs and foreign pods that occupy GPUs, the largest first, without the job with the uid `without_job`."""
    requested: defaultdict[str, defaultdict[str, Resources]] = defaultdict(lambda: defaultdict(Resources))
    for pod_request in pod_requests:
        if pod_request.job_uid and pod_request.job_uid == without_job:
            continue
        try:
            amount = pod_request.amount(gpu_resource)
        except MALFORMED:
            continue
        name = (
            f"job {pod_request.namespace}/{pod_request.job}"
            if pod_request.job_uid
            else f"pod {pod_request.namespace}/{pod_request.name}"
        )
        requested[name][pod_request.node] += amount
    all_occupants = [
        Occupant(name, sum(amount.gpus for amount in by_node.values()), by_node) for name, by_node in requested.items()
    ]
    return sorted(
        (occupant for occupant in all_occupants if occupant.gpus > 0),
        key=lambda occupant: (-occupant.gpus, occupant.name),
    )


def capacity_hint(largest_first: Sequence[Occupant], inventory: Inventory, fits: Callable[[Inventory], bool]) -> str:
    """What would have to end, such as `Fits when job default/a (8 GPUs) ends`; empty if that would not help.

    Args:
        largest_first: What occupies GPUs, the largest first.
        inventory: The nodes with their free resources.
        fits: Whether the job fits on an inventory.
    """
    candidates = list(largest_first[:MAX_OCCUPANTS])
    for occupant in reversed(candidates):
        if fits(freed(inventory, [occupant])):
            return f"Fits when {_named([occupant])} ends"
    for count in range(2, len(candidates) + 1):
        if fits(freed(inventory, candidates[:count])):
            return f"Fits when {_named(candidates[:count])} end"
    return ""


def freed(inventory: Inventory, gone: Sequence[Occupant]) -> Inventory:
    """The inventory once these occupants have ended."""
    nodes = dict(inventory.nodes)
    for occupant in gone:
        for name, amount in occupant.requested.items():
            if name in nodes:
                nodes[name] = replace(nodes[name], free=nodes[name].free + amount)
    return replace(inventory, nodes=nodes)


def _named(chosen: Sequence[Occupant]) -> str:
    text = " and ".join(f"{occupant.name} ({counted(occupant.gpus, 'GPU')})" for occupant in chosen[:MAX_NAMED])
    return text + (f" and {len(chosen) - MAX_NAMED} more" if len(chosen) > MAX_NAMED else "")
