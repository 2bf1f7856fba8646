"""What would have to end so that a job fits: the least that is enough.

A hint for people, in a condition's message; nothing is ever stopped because of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.planner.inventory import MALFORMED, Inventory
from meshwright.planner.pods import Amount
from meshwright_operator.claims import Claim
from meshwright_operator.words import counted

TRIED = 24
"""How many holders are looked at, the largest first."""
NAMED = 4


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds GPUs: a job of this operator's, or a pod of somebody else's."""

    name: str
    gpus: int
    held: Mapping[str, Amount]
    """By node."""


def holders(claims: Iterable[Claim], gpu_resource: str, without_job: str) -> list[Holder]:
    """Everybody who holds GPUs, the largest first; the job `without_job` (its uid) is left out."""
    held: defaultdict[str, defaultdict[str, Amount]] = defaultdict(lambda: defaultdict(Amount))
    for claim in claims:
        if claim.job_uid and claim.job_uid == without_job:
            continue
        try:
            amount = claim.amount(gpu_resource)
        except MALFORMED:
            continue
        whose = f"job {claim.namespace}/{claim.job}" if claim.job_uid else f"pod {claim.namespace}/{claim.name}"
        held[whose][claim.node] += amount
    found = [Holder(name, sum(amount.gpus for amount in own.values()), own) for name, own in held.items()]
    return sorted((holder for holder in found if holder.gpus > 0), key=lambda holder: (-holder.gpus, holder.name))


def advice(found: Sequence[Holder], inventory: Inventory, fits: Callable[[Inventory], bool]) -> str:
    """Who would have to end, such as `fits when job default/a (8 GPUs) ends`; empty when that would not help.

    Args:
        found: who holds GPUs, the largest first.
        inventory: the nodes as they are.
        fits: whether the job fits on such an inventory.
    """
    tried = list(found[:TRIED])
    for holder in reversed(tried):
        if fits(freed(inventory, [holder])):
            return f"fits when {_named([holder])} ends"
    for count in range(2, len(tried) + 1):
        if fits(freed(inventory, tried[:count])):
            return f"fits when {_named(tried[:count])} end"
    return ""


def freed(inventory: Inventory, gone: Sequence[Holder]) -> Inventory:
    """The inventory once these holders have ended."""
    nodes = dict(inventory.nodes)
    for holder in gone:
        for name, amount in holder.held.items():
            if name in nodes:
                nodes[name] = replace(nodes[name], free=nodes[name].free + amount)
    return replace(inventory, nodes=nodes)


def _named(chosen: Sequence[Holder]) -> str:
    text = " and ".join(f"{holder.name} ({counted(holder.gpus, 'GPU')})" for holder in chosen[:NAMED])
    return text + (f" and {len(chosen) - NAMED} more" if len(chosen) > NAMED else "")
