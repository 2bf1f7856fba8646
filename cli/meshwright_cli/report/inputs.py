"""What a report is made from: a plan of a manifest, or a job's object and its nodes. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from meshwright.api.parsing import InvalidSpecError, parse_spec, parse_status
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import ParallelTrainingJobStatus, PlacementStatus, PlanStatus, parse_ranks
from meshwright.figures import format_number
from meshwright.layout import Layout
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cost.comm_groups import GroupSpans, group_spans
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost_model import CostModel, cost_model_for
from meshwright.planner.errors import PlanError
from meshwright.planner.hardware import Hardware
from meshwright.planner.placement.placed_cost import group_spans_of_status, spans_of_placement
from meshwright.planner.plan import Plan, running_plan
from meshwright.planner.search.alternatives import RejectedAlternative, alternatives_of
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.explain import reasons
from meshwright.planner.search.request import MESHWRIGHT_TECHNIQUES
from meshwright.planner.search.spec_request import pinned_request
from meshwright.planner.topology.levels import DOMAIN, RACK
from meshwright.planner.topology.location import Location
from meshwright.planner.topology.site import DEFAULT_SITE, SiteFabric
from meshwright.rules.elastic import with_own_batch
from meshwright.schedules.measured import MeasuredStep
from meshwright_cli.client.objects import JobEvent
from meshwright_cli.plan.report import PlanReport, inventory_of
from meshwright_cli.report.history import History


@dataclass(frozen=True, slots=True)
class Planned:
    """The layout with its estimates."""

    plan: Plan
    cost_model: CostModel | None
    groups: GroupSpans | None
    """Spans of the groups as placed, or as if ranks filled domains in order."""
    estimate: Estimate | None
    rejected: tuple[RejectedAlternative, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportInputs:
    """Everything that a report shows. What is not known is None or empty; `notes` say why."""

    name: str
    namespace: str
    generated: datetime
    running: bool
    """Whether this is a job of a cluster, and not a manifest."""
    planned: Planned | None = None
    plan: PlanStatus | None = None
    placement: PlacementStatus | None = None
    places: Mapping[int, Location] = field(default_factory=dict)
    """Worker index -> location of its node."""
    gpus_by_node: Mapping[str, int] = field(default_factory=dict)
    status: ParallelTrainingJobStatus | None = None
    events: Sequence[JobEvent] = ()
    history: History = field(default_factory=History)
    measured: MeasuredStep | None = None
    """The timeline of a step as the ranks of the first pipeline measured it."""
    whole_cluster: tuple[str, ...] = ()
    """The best layout for all GPUs, and the reasons for it, in sentences."""
    pending: str = ""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def layout(self) -> Layout | None:
        """The degrees."""
        if self.plan is None:
            return None
        plan = self.plan
        return Layout(
            max(1, plan.tensor), max(1, plan.pipeline), max(1, plan.data), max(1, plan.context), max(1, plan.expert)
        )


def inputs_of_plan(found: PlanReport, name: str, namespace: str, generated: datetime) -> ReportInputs:
    """Return the inputs for a manifest that was planned without a cluster."""
    plan, placement, inventory = found.plan, found.placement, found.inventory
    cost_model = cost_model_for(with_own_batch(found.spec), plan.architecture, inventory)
    groups = None
    if cost_model is not None:
        fabric = cost_model.machine.fabric
        groups = group_spans(plan.strategy, fabric, cost_model.machine.runtime.order)
        if placement is not None:
            cost_model = cost_model.on_nodes(inventory, placement.nodes.values())
            groups = spans_of_placement(placement, cost_model.machine.fabric)
    whole_cluster: tuple[str, ...] = ()
    if found.whole_cluster is not None:
        best = found.whole_cluster.best
        whole_cluster = (
            f"{best.summary}: {format_number(best.seconds)} s per step, "
            f"{best.estimate.tokens_per_second:,.0f} tokens/s, MFU {best.estimate.mfu:.0%}",
            *reasons(found.whole_cluster),
        )
    return ReportInputs(
        name=name,
        namespace=namespace,
        generated=generated,
        running=False,
        planned=Planned(plan, cost_model, groups, plan.estimate, found.rejected),
        plan=plan.to_status(),
        placement=placement.to_status(name, {}) if placement else None,
        places=placement.places if placement else {},
        gpus_by_node={node.name: node.capacity.gpus for node in inventory.nodes.values()},
        whole_cluster=whole_cluster,
        pending=found.pending,
        warnings=tuple(inventory.warnings) + (placement.notes if placement else ()),
    )


def inputs_of_job(
    job: Mapping[str, Any],
    nodes: Sequence[Mapping[str, Any]] | None,
    events: Sequence[JobEvent],
    generated: datetime,
    notes: Sequence[str] = (),
    site: SiteFabric = DEFAULT_SITE,
) -> ReportInputs:
    """Return the inputs for a job of a cluster.

    Args:
        job: the job's object.
        nodes: raw Node objects, or None if they could not be read.
        events: the job's events.
        generated: time of the report.
        notes: what could not be read, and why.
        site: what the administrator states about the fabric.
    """
    metadata, status = job["metadata"], parse_status(job)
    found = ReportInputs(
        name=str(metadata["name"]),
        namespace=str(metadata.get("namespace") or "default"),
        generated=generated,
        running=True,
        plan=status.plan,
        placement=status.placement,
        places=_places_of_status(status.placement),
        status=status,
        events=tuple(events),
        notes=tuple(notes),
    )

    def without_estimates(why: str) -> ReportInputs:
        return replace(found, notes=(*found.notes, why))

    try:
        spec = _running_spec(job, status)
    except InvalidSpecError as error:
        return without_estimates(f"The job's spec is not valid: {error}.")
    if status.plan is None:
        return without_estimates("The operator has not planned the job yet.")
    inventory = inventory_of(spec, [dict(node) for node in nodes or ()], [], site)
    try:
        planned = _planned(spec, status, inventory)
    except (PlanError, ValueError) as error:
        return without_estimates(f"No estimates: {error}.")
    return replace(
        found, planned=planned, gpus_by_node={node.name: node.capacity.gpus for node in inventory.nodes.values()}
    )


def _running_spec(job: Mapping[str, Any], status: ParallelTrainingJobStatus) -> ParallelTrainingJobSpec:
    """The spec that the workers run: while an edit waits it is not that of the object."""
    try:
        applied = json.loads(status.applied_spec) if status.applied_spec else None
    except ValueError:
        applied = None
    if isinstance(applied, dict) and isinstance(applied.get("spec"), dict):
        try:
            return parse_spec({**job, "spec": applied["spec"]})
        except InvalidSpecError:
            pass
    return parse_spec(dict(job))


def _planned(spec: ParallelTrainingJobSpec, status: ParallelTrainingJobStatus, inventory: Inventory) -> Planned:
    assert status.plan is not None
    plan = running_plan(spec, Hardware.of(inventory, spec.workers.gpus_per_worker), status.plan)
    sized = with_own_batch(spec)
    cost_model = cost_model_for(sized, plan.architecture, inventory)
    if cost_model is None:
        return Planned(plan, None, None, None)
    if status.placement is not None:
        cost_model = cost_model.on_nodes(inventory, (entry.node for entry in status.placement.workers))
    fabric = cost_model.machine.fabric
    contiguous = group_spans(plan.strategy, fabric, cost_model.machine.runtime.order)
    placed = group_spans_of_status(
        plan.layout, plan.gpus_per_worker, status.placement, fabric, joined=inventory.pods_joined
    )
    groups = placed or contiguous
    ideal = cost_model.estimate(plan.strategy)
    request = pinned_request(sized, cost_model.job, cost_model.machine, techniques=MESHWRIGHT_TECHNIQUES)
    chosen = Candidate(plan.strategy, ideal, cost_model.machine.gpu.node)
    return Planned(
        plan, cost_model, groups, cost_model.estimate(plan.strategy, groups), alternatives_of(request, chosen)
    )


def _places_of_status(placement: PlacementStatus | None) -> dict[int, Location]:
    """The location of each worker by its place in rank order, as the layout counts workers."""
    if placement is None:
        return {}
    ordered = sorted(
        (ranks.start, entry) for entry in placement.workers if (ranks := parse_ranks(entry.ranks)) is not None
    )
    return {
        number: Location((entry.domain or f"host/{entry.node}", entry.rack or f"rack/{entry.node}"), (DOMAIN, RACK))
        for number, (_, entry) in enumerate(ordered)
    }
