"""Why a job runs where it runs: the cost of its placement against the bound, and what crosses links. Pure."""

from __future__ import annotations

from meshwright.api.status import PlacementStatus
from meshwright_cli.client.objects import Job
from meshwright_cli.text import plural


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
    parts = []
    if placement.straddling_tensor_groups:
        parts.append(f"{plural(placement.straddling_tensor_groups, 'tensor-parallel group')} leave their NVLink domain")
    if placement.straddling_replicas:
        parts.append(f"{plural(placement.straddling_replicas, 'replica')} leave their rack")
    return ", ".join(parts) or "none: no tensor-parallel group leaves its NVLink domain, and no replica its rack"


def _topology(placement: PlacementStatus) -> str:
    levels = placement.topology or {}
    return ", ".join(f"{dimension} within one {level}" for dimension, level in levels.items())


def fraction(text: str) -> float | None:
    """A fraction of the status, or None if it is missing or invalid."""
    try:
        return float(text)
    except ValueError:
        return None
