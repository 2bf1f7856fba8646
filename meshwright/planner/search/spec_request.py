"""Makes a search request from a job's spec, and a spec from the result of a search."""

from __future__ import annotations

from dataclasses import replace

from meshwright.api.parallelism import ASSUMED_CONTEXT_METHOD, ParallelismSpec
from meshwright.api.spec import ParallelTrainingJobSpec, ReplicaLossAction
from meshwright.api.training import ActivationCheckpointing, OptimizerOffload
from meshwright.planner.cluster.limits import ClusterLimits
from meshwright.planner.cost.machine import Machine
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.cost_model import CostModel
from meshwright.planner.search.request import MESHWRIGHT_TECHNIQUES, Objective, Pins, SearchRequest, Techniques
from meshwright.planner.search.runtime_rules import (
    allowed_offload,
    allowed_zero_stages,
    allows_shared_sequences,
    allows_split_experts,
    parallelism_of,
    rules_of_job,
    rules_of_worker,
    training_of,
)
from meshwright.planner.workload import TrainingJob
from meshwright.rules.parallelism import MAX_WORKERS, MAX_WORLD_SIZE
from meshwright.schedules.registry import kind_of, schedules_where


def search_request(
    spec: ParallelTrainingJobSpec,
    cost_model: CostModel,
    gpus: int,
    objective: Objective = Objective.TIME,
    techniques: Techniques = MESHWRIGHT_TECHNIQUES,
) -> SearchRequest:
    """Return a search in which `replicas` and all degrees are free, and the job's model and training are kept.

    Raises:
        ValueError: there is no GPU to plan for.
    """
    job, restricted = cost_model.job, techniques.runs is not None
    return SearchRequest(
        job.work,
        cost_model.machine,
        min(gpus, MAX_WORLD_SIZE, MAX_WORKERS * spec.workers.gpus_per_worker) if restricted else gpus,
        objective=objective,
        techniques=techniques_for(job, techniques) if restricted else techniques,
        pins=_pins(spec, job) if restricted else Pins(),
        fixed=replace(
            job.fixed,
            tensor_overlap=False,
            context_method=ASSUMED_CONTEXT_METHOD,
            ulysses=1,
            settings=replace(
                job.fixed.settings,
                flat=False,
                shard_size=None,
                reshard_size=None,
                reduces_each=False,
                feedback=0,
                rematerialize=False,
                activation_limit=None,
            ),
        ),
        gpus_per_worker=spec.workers.gpus_per_worker,
        fewest_replicas=spec.elastic.min_replicas if restricted and spec.elastic is not None else 1,
        most_replicas=spec.elastic.max_replicas if restricted and spec.elastic is not None else None,
    )


def pinned_request(
    spec: ParallelTrainingJobSpec,
    job: TrainingJob,
    machine: Machine | None,
    limits: ClusterLimits | None = None,
    techniques: Techniques | None = None,
) -> SearchRequest:
    """Return a search that keeps all stated fields of the job, and decides those that are left out.

    Also `replicas` is kept, unless the job has `gpus`: then their number is decided too, for at most so many GPUs.

    Args:
        spec: the job's spec.
        job: its model and training.
        machine: the hardware; None if no GPU is in the catalog.
        limits: the GPUs by memory and the largest NVLink domain. Defaults to those of `machine`.
        techniques: the techniques to choose from. Defaults to those of the runtime that the job allows.
    """
    stated, workers = spec.parallelism, spec.workers
    if techniques is None:
        techniques = _preferred_techniques(job)
        if spec.gpus is not None:
            techniques = replace(techniques, runs=rules_of_job(job))
    return SearchRequest(
        job.work,
        machine,
        min(spec.gpus or MAX_WORLD_SIZE, MAX_WORLD_SIZE, MAX_WORKERS * workers.gpus_per_worker),
        techniques=techniques,
        pins=Pins(
            tensor=stated.tensor,
            sequence_parallel=stated.sequence,
            context=stated.context or _only_context(job, stated),
            context_method=stated.context_method,
            pipeline=stated.pipeline,
            schedule=stated.schedule,
            virtual_stages=stated.virtual_stages,
            expert=stated.expert,
            data=spec.replicas if spec.gpus is None else None,
            zero_stage=stated.zero_stage,
            micro_batches=stated.micro_batches,
            checkpointing=job.training.activation_checkpointing,
        ),
        fixed=job.fixed,
        gpus_per_worker=workers.gpus_per_worker,
        max_tensor=(limits.linked_gpus or limits.domain_gpus or job.architecture.heads) if limits is not None else None,
        job=job,
        limits=limits,
        pipelines_in_domain=spec.gpus is None,
    )


CANDIDATE_SCHEDULES = tuple(
    sorted(
        schedules_where(lambda kind: kind.candidate_order is not None),
        key=lambda order: kind_of(order).candidate_order or 0,
    )
)
"""Synchronous schedules to choose from, the simplest first. The others need more memory and have the same bubble."""


def _preferred_techniques(job: TrainingJob) -> Techniques:
    """Return the techniques of a search in order of preference. Rules are not checked for each candidate."""
    stages, named = MESHWRIGHT_TECHNIQUES.zero_stages, job.parallelism.data_parallel.strategy
    return replace(
        techniques_for(job),
        schedules=CANDIDATE_SCHEDULES,
        # Ranks run a stage of the strategy, whatever is chosen: another one would be estimated and reported only.
        zero_stages=tuple(stage for stage in stages if named is None or stage in named.zero_stages),
        expert=True,
        offload=(OptimizerOffload.NONE,),
        uneven_split=False,
        ties_over_stages=not kind_of(job.parallelism.order).asynchronous,
        runs=None,
    )


def _only_context(job: TrainingJob, stated: ParallelismSpec) -> int | None:
    """1 if ranks cannot share a sequence; None if the degree is free."""
    # An asynchronous schedule may have context-parallel ranks, but the search does not choose them.
    return None if allows_shared_sequences(job, stated) and not kind_of(stated.order).asynchronous else 1


def techniques_for(job: TrainingJob, techniques: Techniques = MESHWRIGHT_TECHNIQUES) -> Techniques:
    """Return the runtime's techniques for a job.

    The rule book decides about each candidate. A technique that it rejects in every layout is not tried at all.
    """
    training = job.training
    zero_stages = allowed_zero_stages(job, techniques.zero_stages)
    checkpointing = techniques.checkpointing
    if training.compile:
        # The rules allow `Selective` for compiled layers that nothing splits. A search does not try it.
        checkpointing = tuple(method for method in checkpointing if method is not ActivationCheckpointing.SELECTIVE)
    return replace(
        techniques,
        # A job that breaks a rule itself is planned as it is: the plan's check names the rule.
        zero_stages=zero_stages or techniques.zero_stages,
        offload=allowed_offload(job, techniques.offload) or techniques.offload,
        checkpointing=checkpointing,
        expert=techniques.expert and allows_split_experts(job),
        runs=rules_of_worker(job.parallelism, training),
    )


def _pins(spec: ParallelTrainingJobSpec, job: TrainingJob) -> Pins:
    """Return the decisions that a free search may not make: some jobs fix the replicas or need entire sequences."""
    # A replica that is left must have the whole state (`recovery.onReplicaLoss`).
    whole = spec.recovery.on_replica_loss is ReplicaLossAction.CONTINUE
    return Pins(
        context=_only_context(job, ParallelismSpec()),
        expert=1 if whole else None,
        zero_stage=0 if whole else None,
        data=spec.replicas if job.training.outer is not None else None,
    )


def apply_strategy(spec: ParallelTrainingJobSpec, strategy: Strategy) -> ParallelTrainingJobSpec:
    """Return the job's spec with all decisions of a strategy written out.

    Raises:
        ValueError: the spec has no `training`.
    """
    if spec.training is None:
        raise ValueError("`training` is required")
    return spec.model_copy(
        update={
            "replicas": strategy.data,
            "gpus": None,
            "parallelism": parallelism_of(strategy, spec.parallelism),
            "training": training_of(spec.training, strategy.checkpointing, strategy.optimizer_offload),
        }
    )
