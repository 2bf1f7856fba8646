"""The plan of a job: the degrees, the schedule and the worker pods, and the reasons for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from meshwright.api.parallelism import ParallelismSpec, PipelineSchedule, StageBalance
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import PlanStatus
from meshwright.api.topology import FabricLevel, TopologySpec
from meshwright.api.training import ActivationCheckpointing
from meshwright.layout import Layout
from meshwright.models.architecture import Architecture
from meshwright.models.presets import UnknownModelError, resolve
from meshwright.planner.cluster.inventory import Inventory, separate_hosts_sentence
from meshwright.planner.cluster.limits import ClusterLimits
from meshwright.planner.cluster.pod_resources import Resources, parse_resources, worker_requests
from meshwright.planner.copies import about_copies, worker_copies_bytes
from meshwright.planner.cost.estimate import Estimate
from meshwright.planner.cost.machine import Machine
from meshwright.planner.cost.memory import Memory
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.cost_model import Calibration, CostModel, cost_model_on
from meshwright.planner.errors import PlanError
from meshwright.planner.frameworks.of_spec import target_of
from meshwright.planner.frameworks.planning import (
    cost_model_of_target,
    layouts_of_target,
    request_of_target,
    with_flags,
)
from meshwright.planner.frameworks.target import Target
from meshwright.planner.hardware import Hardware
from meshwright.planner.nccl import communication_environment
from meshwright.planner.run_config import refusals_of, run_config_of, runnable
from meshwright.planner.search.best_first import ranked_layouts
from meshwright.planner.search.candidate import FittingLayout
from meshwright.planner.search.errors import plan_error
from meshwright.planner.search.explain_plan import reasons_of_plan
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.spec_request import pinned_request
from meshwright.planner.units import count_gpus
from meshwright.planner.workload import TrainingJob
from meshwright.protocol.run_config import CommandRun, RunConfig
from meshwright.rules.elastic import with_own_batch
from meshwright.rules.parallelism import MAX_WORKERS
from meshwright.rules.validation import check_spec, with_model_numbers
from meshwright.schedules.pipeline_layout import stage_ranks
from meshwright.schedules.registry import kind_of

MAX_PLANS = 6
"""Number of layouts to choose from by free GPUs. Each needs a placement."""
_MAX_REASONS = 16
_MAX_REASON_TEXT = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """The strategy of a job and its worker pods. The nodes are in a `Placement`."""

    strategy: Strategy
    gpus_per_worker: int
    worker_request: Resources
    """Resource request of one worker pod."""
    architecture: Architecture | None = None
    """None if the job runs a user's command."""
    memory: Memory | None = None
    """Estimate for the fullest stage. None if no model is known."""
    global_batch_size: int | None = None
    reasons: tuple[str, ...] = ()
    """The reason for each degree, in sentences."""
    estimate: Estimate | None = None
    """Estimated memory and time of a step. None if the model or the cluster's GPUs are unknown."""
    gpus: int | None = None
    """The job's budget of GPUs. None if the job states `replicas`."""
    topology: TopologySpec | None = None
    """The levels of the fabric that groups must not, or should not, leave."""
    replanned: bool = False
    """Whether an elastic job was planned anew for the GPUs that were left, instead of having fewer replicas."""
    measured_layers: tuple[int, ...] | None = None
    """Layers of each stage by measured times; None before there are any."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of NCCL and gloo for all ranks, from the fabric of the site."""
    copies_bytes: int = 0
    """Host memory in each worker for copies of its ranks' state (`recovery.copyEverySteps`)."""

    @property
    def layout(self) -> Layout:
        """Only the degrees."""
        return self.strategy.layout

    @property
    def workers(self) -> list[range]:
        """The consecutive ranks of each worker pod, by worker index."""
        return self.layout.workers(self.gpus_per_worker)

    @property
    def summary(self) -> str:
        """The layout in one line."""
        layout = self.layout
        experts = f", EP {layout.expert}" if layout.expert > 1 else ""
        return f"{self.replica_summary} x DP {layout.data}{experts}"

    @property
    def replica_summary(self) -> str:
        """The layout of one replica in one line."""
        layout = self.layout
        context = f"CP {layout.context} x " if layout.context > 1 else ""
        return f"TP {layout.tensor} x {context}PP {layout.pipeline}"

    def allows_replicas(self, replicas: int) -> bool:
        """Whether the job can run with this number of replicas: with full workers, and full micro-batches for each."""
        whole_workers = replicas * self.strategy.replica_size % self.gpus_per_worker == 0
        batch = self.global_batch_size
        spread = replicas * self.strategy.context % self.strategy.expert == 0
        return (
            replicas >= 1
            and whole_workers
            and spread
            and (batch is None or batch % (replicas * self.strategy.micro_batches) == 0)
        )

    def with_copies(self, spec: ParallelTrainingJobSpec) -> Plan:
        """Return the plan, whose workers request memory for their copies too, if the job states its memory."""
        copies = worker_copies_bytes(spec, self.architecture, self.strategy, self.gpus_per_worker)
        if copies == self.copies_bytes:
            return self
        more = copies - self.copies_bytes if spec.workers.resources.memory is not None else 0
        return replace(self, copies_bytes=copies, worker_request=self.worker_request + Resources(memory_bytes=more))

    def to_status(self) -> PlanStatus:
        """The plan as `status.plan`."""
        used = self.strategy
        return PlanStatus(
            tensor=used.tensor,
            pipeline=used.pipeline,
            data=used.data,
            context=used.context,
            expert=used.expert,
            micro_batches=used.micro_batches,
            schedule=used.schedule if used.pipeline > 1 and self.architecture else None,
            virtual_stages=used.virtual_stages if used.pipeline > 1 and used.schedule_kind.virtual_stages else None,
            context_method=used.context_method if used.context > 1 and self.architecture else None,
            zero_stage=used.zero_stage if self.architecture else None,
            activation_checkpointing=used.checkpointing if self.architecture else None,
            world_size=used.world_size,
            workers=used.world_size // self.gpus_per_worker,
            unused_gpus=self.gpus - used.world_size if self.gpus is not None else None,
            memory_per_rank_bytes=int(self.memory.total) if self.memory else None,
            parameters=self.architecture.parameters if self.architecture else None,
            estimated_step_milliseconds=round(1000 * self.estimate.seconds) if self.estimate else None,
            estimated_tokens_per_second=round(self.estimate.tokens_per_second) if self.estimate else None,
            summary=self.summary,
            reasons=[reason[:_MAX_REASON_TEXT] for reason in self.reasons[:_MAX_REASONS]],
            replanned=self.replanned or None,
            measured_layers=list(self.measured_layers) if self.measured_layers else None,
            environment=dict(self.environment) or None,
        )

    def run_config(self, spec: ParallelTrainingJobSpec) -> RunConfig:
        """Return the run of the ranks, with every field that the spec leaves open filled in."""
        run, target = run_config_of(spec, self.architecture, self.strategy), target_of(spec)
        if target is None or self.architecture is None or not isinstance(run, CommandRun):
            return run
        return with_flags(run, spec, self.architecture, self.strategy, target)

    def problems(self, spec: ParallelTrainingJobSpec) -> list[str]:
        """Return the reasons why ranks would reject the plan. Empty if they can run."""
        return refusals_of(self.run_config(spec))


def make_plan(
    spec: ParallelTrainingJobSpec,
    inventory: Inventory,
    keep: PlanStatus | None = None,
    calibration: Calibration | None = None,
) -> Plan:
    """Make the plan for `spec` on the hardware of `inventory`.

    Degrees in the spec are checked. Degrees that it leaves out are chosen. `keep` is the plan of a running job: degrees
    that the spec leaves out then stay the same, and the cluster is not considered again, because a lost node must not
    change a job's layout. `calibration` has the constants that were fitted to running jobs on this cluster.

    Raises:
        PlanError: the spec contradicts itself, or no layout fits this cluster's GPUs.
    """
    hardware = Hardware.of(inventory, spec.workers.gpus_per_worker).calibrated(calibration)
    if keep is not None:
        return running_plan(spec, hardware, keep)
    return new_plans(spec, hardware, max_plans=1)[0]


def make_plans(
    spec: ParallelTrainingJobSpec,
    inventory: Inventory,
    calibration: Calibration | None = None,
    max_plans: int = MAX_PLANS,
    target: Target | None = None,
) -> list[Plan]:
    """Make the plan of a new job, followed by other layouts with as many GPUs, the fastest first.

    Returns at most `max_plans`. With `target` the plans are for that framework instead of Meshwright's runtime.

    Raises:
        PlanError: the spec contradicts itself, or no layout fits this cluster's GPUs.
    """
    hardware = Hardware.of(inventory, spec.workers.gpus_per_worker).calibrated(calibration)
    return new_plans(spec, hardware, max_plans, target)


def running_plan(spec: ParallelTrainingJobSpec, hardware: Hardware, keep: PlanStatus) -> Plan:
    """Make the plan of a running job: degrees that the spec leaves out are those of `keep`, if the spec allows them.

    Raises:
        PlanError: the spec contradicts itself, or no layout fits the hardware.
    """
    architecture = _model_of(spec)
    _check(spec, architecture)
    running = _running_plan(spec, architecture, keep)
    if running is not None:
        plan = _with_estimate(running, cost_model_on(spec, architecture, hardware.machine))
    else:
        plan = new_plans(spec, hardware, max_plans=1)[0]
    return replace(plan, environment=keep.environment or {}, measured_layers=_measured_layers(spec, plan, keep))


def _measured_layers(spec: ParallelTrainingJobSpec, plan: Plan, keep: PlanStatus) -> tuple[int, ...] | None:
    """The layers by measured times, if the running plan has them: the spec may have changed since."""
    measured, split = keep.measured_layers, plan.strategy.layer_split
    if measured is None or spec.parallelism.stage_balance is not StageBalance.MEASURED:
        return None
    return split if split is not None and list(split) == measured else None


def new_plans(
    spec: ParallelTrainingJobSpec, hardware: Hardware, max_plans: int = MAX_PLANS, target: Target | None = None
) -> list[Plan]:
    """Make the plan of a new job on `hardware`, followed by other layouts with as many GPUs, the fastest first.

    If nodes have different GPU products, the job is planned for each alone, since a step waits for the slowest GPU, and
    for all together. The fastest plan that the nodes are enough for wins, and the others follow if they have as many
    GPUs: its GPUs may be in use.

    With `target` the plans are for that framework instead of Meshwright's runtime.

    Raises:
        PlanError: the spec contradicts itself, or no layout fits the hardware.
    """
    found: list[list[Plan]] = []
    for alone in hardware.of_products:
        try:
            plans = _plans_on(spec, alone, max_plans, target)
        except PlanError:
            continue
        if plans[0].layout.world_size <= alone.limits.gpus:
            found.append(plans)
    try:
        found.append(_plans_on(spec, hardware, max_plans, target))
    except PlanError:
        if not found:
            raise
    best, *others = sorted(found, key=lambda plans: plans[0].estimate.seconds if plans[0].estimate is not None else inf)
    size = best[0].layout.world_size
    slower = [plans[0] for plans in others if plans[0].layout.world_size == size]
    slower = slower[: max_plans - 1]
    return [*best[: max_plans - len(slower)], *slower]


def _plans_on(spec: ParallelTrainingJobSpec, hardware: Hardware, max_plans: int, target: Target | None) -> list[Plan]:
    """Make the plans of a new job for GPUs of which each may get any of its ranks."""
    architecture = _model_of(spec)
    _check(spec, architecture)
    spec = with_own_batch(spec)
    cost_model, cluster_limits = cost_model_on(spec, architecture, hardware.machine), _limits(spec, hardware.limits)
    _check_node_and_domain_size(spec, cluster_limits)
    if architecture is None or spec.training is None:
        return [_on_site(_command_plan(spec), spec, hardware)]
    _check_nodes_known(spec, cluster_limits)
    target = target or target_of(spec)
    if target is not None:
        cost_model = cost_model_of_target(cost_model, target, hardware.machine)
    request, ranked = _searched(spec, architecture, cluster_limits, cost_model, target)
    plans = []
    for chosen in ranked[:max_plans]:
        plan = _on_site(_with_estimate(_plan(spec, architecture, chosen, ()), cost_model), spec, hardware)
        reasons = reasons_of_plan(request, chosen, plan.estimate, spec.gpus)
        about_nvlink = (*_about_channels(plan, cluster_limits), *_about_pods(plan, cluster_limits, hardware.machine))
        plans.append(replace(plan, reasons=(*reasons, *about_nvlink, *about_copies(spec, plan.copies_bytes))))
    return plans


def _searched(
    spec: ParallelTrainingJobSpec,
    architecture: Architecture,
    limits: ClusterLimits,
    cost_model: CostModel | None,
    target: Target | None,
) -> tuple[SearchRequest, list[FittingLayout]]:
    """Return the search and the layouts that fit, the best first.

    Where NVLink ends at each pod, chosen tensor-parallel groups span several pods of a host only if no other layout
    fits, or only one with more GPUs than the cluster has.

    Raises:
        PlanError: there is no such layout.
    """

    def searched(limits: ClusterLimits) -> tuple[SearchRequest, list[FittingLayout]]:
        if target is None:
            request = _request(spec, architecture, limits, cost_model)
            return request, _ranked(spec, request)
        request = request_of_target(spec, architecture, limits, cost_model, target)
        return request, layouts_of_target(request, target)

    if not limits.pods_apart or spec.parallelism.tensor is not None:
        return searched(limits)
    across = replace(limits, linked_gpus=limits.domain_gpus)
    try:
        found = searched(limits)
    except PlanError:
        return searched(across)
    if found[1][0].strategy.world_size <= limits.gpus:
        return found
    other = searched(across)
    return other if other[1][0].strategy.world_size <= limits.gpus else found


def _ranked(spec: ParallelTrainingJobSpec, request: SearchRequest) -> list[FittingLayout]:
    """Return the layouts that fit and that ranks accept, the best first.

    Raises:
        PlanError: there is no such layout; the message has what ranks reject, if that is the reason.
    """
    architecture = request.pinned_job.architecture
    try:
        ranked = ranked_layouts(request)
        if not ranked:
            raise plan_error(request)
        refusals = [refusals_of(run_config_of(spec, architecture, one.strategy)) for one in ranked[:MAX_PLANS]]
        if not any(refusals):
            return ranked
        accepted = runnable(spec, architecture)
        techniques = replace(request.techniques, runs=lambda work, strategy: accepted(strategy))
        runs = [one for one in ranked_layouts(replace(request, techniques=techniques)) if accepted(one.strategy)]
    except PlanError:
        raise
    except ValueError as error:
        # A layer split or a schedule is impossible, such as a `layerSplit` for another model.
        raise PlanError(str(error), "InvalidSpec") from error
    if not runs:
        fewest = min(refusals, key=len)
        raise PlanError("; ".join(fewest), "InvalidSpec")
    return runs


def _model_of(spec: ParallelTrainingJobSpec) -> Architecture | None:
    try:
        return resolve(spec.model) if spec.model is not None else None
    except UnknownModelError as error:
        raise PlanError(f"spec: {error}", "InvalidSpec") from None


def _check(spec: ParallelTrainingJobSpec, architecture: Architecture | None) -> None:
    """Raise PlanError if the spec violates a rule. A preset's numbers are checked like written ones."""
    problems = check_spec(spec) or (check_spec(with_model_numbers(spec, architecture)) if architecture else [])
    if problems:
        raise PlanError("; ".join(f"spec.{p.field}: {p.message}" for p in problems), "InvalidSpec")


def _running_plan(spec: ParallelTrainingJobSpec, architecture: Architecture | None, keep: PlanStatus) -> Plan | None:
    """The plan with a running job's degrees for what the spec leaves out. None if the spec no longer allows them.

    The rules of ranks are not checked again, so that new rules in an upgrade do not stop a running job.
    """
    if architecture is None or spec.training is None:
        return _command_plan(spec)
    asked = spec.parallelism
    schedule = asked.schedule or keep.schedule or PipelineSchedule.ONE_F_ONE_B
    has_stages = kind_of(schedule).virtual_stages
    parallelism_kept = asked.model_copy(
        update={
            "tensor": asked.tensor or keep.tensor,
            "pipeline": asked.pipeline or keep.pipeline,
            "context": asked.context or keep.context or 1,
            "context_method": asked.context_method or keep.context_method,
            "schedule": schedule,
            "virtual_stages": asked.virtual_stages or (keep.virtual_stages if has_stages else None),
            "zero_stage": _kept_zero_stage(asked, keep),
            "expert": asked.expert or keep.expert,
            "micro_batches": asked.micro_batches or keep.micro_batches,
        },
    )
    if asked.stage_balance is StageBalance.MEASURED and asked.layer_split is None and keep.measured_layers:
        stages = len(stage_ranks(parallelism_kept, parallelism_kept.pipeline or 1))
        if (len(keep.measured_layers), sum(keep.measured_layers)) == (stages, architecture.layers):
            # As if the spec stated them, which it may not together with `Measured`.
            stated = {"layer_split": keep.measured_layers, "stage_balance": StageBalance.FLOPS}
            parallelism_kept = parallelism_kept.model_copy(update=stated)
    checkpointing_kept = (
        spec.training.activation_checkpointing or keep.activation_checkpointing or ActivationCheckpointing.NONE
    )
    training = spec.training.model_copy(update={"activation_checkpointing": checkpointing_kept})
    replicas = {"replicas": keep.data, "gpus": None} if spec.gpus is not None else {}
    spec_kept = spec.model_copy(update={"parallelism": parallelism_kept, "training": training, **replicas})
    if not (parallelism_kept.tensor and parallelism_kept.pipeline and parallelism_kept.micro_batches) or check_spec(
        with_model_numbers(spec_kept, architecture)
    ):
        return None
    target = target_of(spec)
    if target is None:
        request = _request(spec_kept, architecture, ClusterLimits())
    else:
        request = request_of_target(spec_kept, architecture, ClusterLimits(), None, target)
    fitting = ranked_layouts(request)
    return _plan(spec, architecture, fitting[0], tuple(keep.reasons)) if fitting else None


def _kept_zero_stage(asked: ParallelismSpec, keep: PlanStatus) -> int:
    """The ZeRO stage of a running job. A job with one rank to shard over has 0 in its plan, whatever
    `dataParallel.strategy` it states: then the first stage of that strategy, which has no effect there.
    """
    if asked.zero_stage is not None:
        return asked.zero_stage
    kept, strategy = keep.zero_stage or 0, asked.data_parallel.strategy
    return kept if strategy is None or kept in strategy.zero_stages else strategy.zero_stages[0]


def _request(
    spec: ParallelTrainingJobSpec,
    architecture: Architecture,
    cluster_limits: ClusterLimits,
    cost_model: CostModel | None = None,
) -> SearchRequest:
    machine = cost_model.machine if cost_model is not None else None
    return pinned_request(spec, TrainingJob.of(spec, architecture), machine, cluster_limits)


def _on_site(plan: Plan, spec: ParallelTrainingJobSpec, hardware: Hardware) -> Plan:
    """The plan of a new job with the variables that follow from the fabric of the site."""
    several = len(plan.workers) > 1 or spec.elastic is not None
    return replace(plan, environment=communication_environment(hardware.site, several_workers=several))


def _with_estimate(plan: Plan, cost_model: CostModel | None) -> Plan:
    """The plan with its estimate, if there is a cost model."""
    return replace(plan, estimate=cost_model.estimate(plan.strategy)) if cost_model else plan


def _check_node_and_domain_size(spec: ParallelTrainingJobSpec, cluster_limits: ClusterLimits) -> None:
    """Raise PlanError if a worker does not fit on any node, or a tensor-parallel group in any NVLink domain."""
    gpus, tensor = spec.workers.gpus_per_worker, spec.parallelism.tensor or 1
    if cluster_limits.node_gpus is not None and gpus > cluster_limits.node_gpus:
        raise PlanError(
            f"`workers.gpusPerWorker` is {gpus} and the largest usable node has "
            f"{count_gpus(cluster_limits.node_gpus)}: lower it, or add larger nodes",
            "NoNodeLargeEnough",
            depends_on_cluster=True,
        )
    level = _tensor_level(spec)
    if level is FabricLevel.NODE and cluster_limits.node_gpus is not None and tensor > cluster_limits.node_gpus:
        raise PlanError(
            f"`topology.tensor.required` is `node`, `parallelism.tensor` is {tensor}, and the largest usable node has "
            f"{count_gpus(cluster_limits.node_gpus)}: lower `parallelism.tensor` to {cluster_limits.node_gpus}, or set "
            "`topology.tensor.required: domain`",
            "NoNodeLargeEnough",
            depends_on_cluster=True,
        )
    may_leave = level not in (FabricLevel.NODE, FabricLevel.DOMAIN)
    if not may_leave and cluster_limits.domain_gpus is not None and tensor > cluster_limits.domain_gpus:
        raise PlanError(
            f"`parallelism.tensor` is {tensor} and the widest NVLink domain has "
            f"{count_gpus(cluster_limits.domain_gpus)}: lower it, raise `parallelism.pipeline` instead, or "
            f"{_wider_domain(cluster_limits)}",
            "NoDomainWideEnough",
            depends_on_cluster=True,
        )


def _wider_domain(limits: ClusterLimits) -> str:
    if not limits.separate_hosts:
        return "add nodes with a wider domain"
    return f"join hosts: {separate_hosts_sentence(limits.separate_hosts)}"


def _tensor_level(spec: ParallelTrainingJobSpec) -> FabricLevel:
    """The level that tensor-parallel groups must not leave."""
    stated = spec.topology.tensor if spec.topology is not None else None
    return (stated.required if stated is not None else None) or FabricLevel.DOMAIN


def _limits(spec: ParallelTrainingJobSpec, limits: ClusterLimits) -> ClusterLimits:
    """The limits of the cluster for this job: how wide a tensor-parallel group may be depends on its level."""
    level, widest, tensor = _tensor_level(spec), limits.domain_gpus, spec.parallelism.tensor
    if level is FabricLevel.NODE and limits.node_gpus is not None:
        allowed = min(limits.node_gpus, widest or limits.node_gpus)
    elif level is not FabricLevel.DOMAIN and widest is not None and tensor is not None:
        allowed = max(widest, tensor)
    else:
        return limits
    return replace(limits, domain_gpus=allowed, linked_gpus=limits.linked_gpus if limits.pods_apart else allowed)


def _about_channels(plan: Plan, limits: ClusterLimits) -> tuple[str, ...]:
    """Why NVLink does not join the nodes of a clique, if the job has several workers."""
    if not limits.separate_hosts or len(plan.workers) == 1:
        return ()
    return (f"NVLink: {separate_hosts_sentence(limits.separate_hosts)}",)


def _about_pods(plan: Plan, limits: ClusterLimits, machine: Machine | None) -> tuple[str, ...]:
    """That NVLink ends at each pod, if the job has several, and its GPUs are known or a tensor-parallel group is wider.

    NCCL takes pods of one host for different hosts, and does not use NVLink or shared memory between them.
    """
    gpus, tensor = plan.gpus_per_worker, plan.layout.tensor
    wide = tensor > gpus
    if not limits.pods_apart or len(plan.workers) == 1 or (machine is None and not wide):
        return ()
    group = f"; each tensor-parallel group of {tensor} spans {tensor // gpus} pods, and uses it in every layer"
    return (
        f"NVLink ends at each pod, because hosts have several workers of {count_gpus(gpus)} and no claim joins the "
        f"pods of a host: they communicate over the network{group if wide else ''}. Raise `workers.gpusPerWorker`, so "
        "that a pod has all GPUs of its host",
    )


def _check_nodes_known(spec: ParallelTrainingJobSpec, cluster_limits: ClusterLimits) -> None:
    """Raise PlanError if a degree is left out and there is no usable node to choose it for."""
    requested = spec.parallelism
    degrees_by_field = {
        "tensor": requested.tensor,
        "pipeline": requested.pipeline,
        "microBatches": requested.micro_batches,
    }
    left_out = [f"`parallelism.{name}`" for name, value in degrees_by_field.items() if value is None]
    if left_out and not cluster_limits.known:
        raise PlanError(
            f"{', '.join(left_out)} left out, and no usable GPU node is there to choose for: set them, or add nodes"
            + (f". {cluster_limits.excluded}" if cluster_limits.excluded else ""),
            "NoUsableNodes",
            depends_on_cluster=True,
        )


def _command_plan(spec: ParallelTrainingJobSpec) -> Plan:
    """The plan for a user's command. The model is unknown, so no degree is chosen and no memory is estimated."""
    asked = spec.parallelism
    replica = Layout(asked.tensor or 1, asked.pipeline or 1, 1, asked.context_or_default)
    strategy = Strategy(replica.tensor, replica.pipeline, _replicas_of_command(spec, replica), replica.context)
    reasons = ["degrees as in `parallelism`, 1 where left out: `runtime.command` brings its own model"]
    if spec.gpus is not None:
        reasons.append(f"DP {strategy.data}: as many replicas as `gpus` and complete workers allow")
    return replace(_pods(spec, strategy), reasons=tuple(reasons))


def _replicas_of_command(spec: ParallelTrainingJobSpec, replica: Layout) -> int:
    """`replicas`, or the most that fill workers with `gpus`.

    Raises:
        PlanError: no number of replicas fills workers.
    """
    if spec.gpus is None:
        return spec.replicas
    each = spec.workers.gpus_per_worker
    budget = min(spec.gpus, MAX_WORKERS * each)
    most = budget // replica.replica_size
    found = next((count for count in range(most, 0, -1) if count * replica.replica_size % each == 0), None)
    if found is None:
        raise PlanError(
            f"no number of replicas of {replica.replica_size} ranks fills workers of {count_gpus(each)} with `gpus: "
            f"{spec.gpus}`: raise it, or change `workers.gpusPerWorker`",
            "InvalidSpec",
        )
    return found


def _plan(
    spec: ParallelTrainingJobSpec, architecture: Architecture, chosen: FittingLayout, reasons: tuple[str, ...]
) -> Plan:
    plan = _pods(spec, chosen.strategy)
    plan = replace(plan, architecture=architecture, memory=chosen.memory, reasons=reasons)
    return plan.with_copies(spec)


def _pods(spec: ParallelTrainingJobSpec, strategy: Strategy) -> Plan:
    """The worker pods of a strategy."""
    return Plan(
        strategy=strategy,
        gpus_per_worker=spec.workers.gpus_per_worker,
        worker_request=parse_resources(worker_requests(spec.workers), spec.workers.gpu_resource, pods=1),
        global_batch_size=spec.training.global_batch_size if spec.training else None,
        gpus=spec.gpus,
        topology=spec.topology,
    )
