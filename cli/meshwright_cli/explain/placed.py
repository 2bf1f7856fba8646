"""Why a job runs where it runs: the cost of its placement against the bound, and what crosses links. Pure."""

from __future__ import annotations

from meshwright.api.status import PlacementStatus, parse_ranks
from meshwright_cli.client.objects import Job
from meshwright_cli.text import plural

PODS_APART = "several pods of a node, without NVLink between them"


def placed_facts(job: Job) -> list[tuple[str, str]]:
    """Names and values of an explanation. Empty without a placement."""
    placement = job.status.placement
    if placement is None or not placement.workers:
        return []
    spares = ", ".join(placement.spares)
    environment = (job.status.plan.environment if job.status.plan is not None else None) or {}
    variables = ", ".join(f"{name}={value}" for name, value in environment.items())
    return [
        ("Placement", _where(placement)),
        ("Cost", _cost(placement)),
        ("Crossings", _crossings(placement)),
        *([("Topology", _topology(placement))] if placement.topology else []),
        *([("Spares", f"{spares}: reserved for replacements")] if spares else []),
        *([("Variables", variables)] if variables else []),
    ]


def _where(placement: PlacementStatus) -> str:
    nodes = {entry.node for entry in placement.workers}
    domains = {entry.domain or entry.node for entry in placement.workers}
    racks = {entry.rack for entry in placement.workers if entry.rack}
    parts = [
        plural(len(placement.workers), "worker"),
        plural(len(nodes), "node"),
        plural(len(domains), "NVLink domain"),
    ]
    return f"{parts[0]} on {parts[1]} in {', '.join([parts[2], *([plural(len(racks), 'rack')] if racks else [])])}"


def _cost(placement: PlacementStatus) -> str:
    cost = placement.cost or "0"
    text = f"{cost} ms per step for traffic between domains, racks and zones"
    gap = fraction(placement.gap)
    if gap is None:
        return f"{text}. The bound is unknown"
    if gap == 0:
        return f"{text}. Proved optimal for the nodes that were free"
    return f"{text}. The best placement on the same nodes could save at most {100 * gap:.1f}% of it"


def _crossings(placement: PlacementStatus) -> str:
    straddling, replicas = placement.straddling_tensor_groups, placement.straddling_replicas
    # Pods of a node do not reach each other over NVLink unless a claim joins them: such groups straddle pods.
    leaving = min(straddling, _groups_in_several_domains(placement))
    apart, group = straddling - leaving, "tensor-parallel group"
    found = (
        _each(leaving, group, "leaves its NVLink domain", "leave their NVLink domain"),
        _each(apart, group, f"spans {PODS_APART}", f"span {PODS_APART}"),
        _each(replicas, "replica", "leaves its rack", "leave their rack"),
    )
    return (
        ", ".join(part for part in found if part)
        or "none: no tensor-parallel group leaves its NVLink domain, and no replica its rack"
    )


def _each(count: int, noun: str, one: str, several: str) -> str:
    return f"{plural(count, noun)} {one if count == 1 else several}" if count else ""


def _groups_in_several_domains(placement: PlacementStatus) -> int:
    """The number of tensor-parallel groups, which have ranks in a row, whose workers are in several NVLink domains."""
    domains = {
        rank: entry.domain or entry.node for entry in placement.workers for rank in parse_ranks(entry.ranks) or ()
    }
    size = max(1, placement.tensor)
    firsts = range(0, len(domains), size)
    return sum(len({domains.get(rank) for rank in range(one, one + size)}) > 1 for one in firsts)


def _topology(placement: PlacementStatus) -> str:
    levels = placement.topology or {}
    return ", ".join(f"{dimension} within one {level}" for dimension, level in levels.items())


def fraction(text: str) -> float | None:
    """A fraction of the status, or None if it is missing or invalid."""
    try:
        return float(text)
    except ValueError:
        return None
