"""Between a job's spec and a search over every degree: what the search may do for it, and its result as a spec."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from meshwright.api.parallelism import ContextMethod, ParallelismSpec, PipelineSchedule
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.training import ActivationCheckpointing, OptimizerName, OptimizerOffload, OuterSpec, TrainingSpec
from meshwright.planner.cluster.limits import ClusterLimits
from meshwright.planner.cost.machine import Machine
from meshwright.planner.cost.strategy import Strategy, Workload
from meshwright.planner.cost_model import CostModel
from meshwright.planner.search.request import MESHWRIGHT_TECHNIQUES, Objective, Pins, SearchRequest, Techniques, runs
from meshwright.planner.workload import TrainingJob
from meshwright.rules.parallelism import MAX_WORKERS, MAX_WORLD_SIZE
from meshwright.schedules.pipeline_layout import DEFAULT_VIRTUAL_STAGES
from meshwright.schedules.registry import kind_of, schedules_where


def search_request(
    spec: ParallelTrainingJobSpec,
    cost_model: CostModel,
    gpus: int,
    objective: Objective = Objective.TIME,
    techniques: Techniques = MESHWRIGHT_TECHNIQUES,
) -> SearchRequest:
    """A search in which `replicas` and every degree are free, and what trains stays as the job says.

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
            context_method=ContextMethod.RING_ZIG_ZAG,
            ulysses=1,
            settings=replace(
                job.fixed.settings,
                flat=False,
                shard_size=None,
                reshard_size=None,
                feedback=0,
                rematerialize=False,
                activation_limit=None,
            ),
        ),
        gpus_per_worker=spec.workers.gpus_per_worker,
    )


def pinned_request(
    spec: ParallelTrainingJobSpec,
    job: TrainingJob,
    machine: Machine | None,
    limits: ClusterLimits | None = None,
    techniques: Techniques | None = None,
) -> SearchRequest:
    """A search that keeps every choice of the job, with `replicas` as they are, and decides what its spec leaves out.

    Args:
        spec: the job's spec.
        job: its model and training.
        machine: where it runs; None if the cost model knows none of the GPUs.
        limits: the GPUs by memory and the widest NVLink domain; those of `machine` where left out.
        techniques: what may be chosen; what the worker runs with everything that the job states where left out.
    """
    stated, workers = spec.parallelism, spec.workers
    return SearchRequest(
        job.work,
        machine,
        min(MAX_WORLD_SIZE, MAX_WORKERS * workers.gpus_per_worker),
        techniques=techniques or _preferred_techniques(job),
        pins=Pins(
            tensor=stated.tensor,
            sequence_parallel=stated.sequence,
            context=stated.context or _only_context(job, stated.order),
            context_method=stated.context_method,
            pipeline=stated.pipeline,
            schedule=stated.schedule,
            virtual_stages=stated.virtual_stages,
            expert=stated.expert,
            data=spec.replicas,
            zero_stage=stated.zero_stage,
            micro_batches=stated.micro_batches,
            checkpointing=job.training.activation_checkpointing,
        ),
        fixed=job.fixed,
        gpus_per_worker=workers.gpus_per_worker,
        max_tensor=(limits.domain_gpus or job.architecture.heads) if limits is not None else None,
        job=job,
        limits=limits,
    )


CANDIDATE_SCHEDULES = tuple(
    sorted(
        schedules_where(lambda kind: kind.candidate_rank is not None),
        key=lambda order: kind_of(order).candidate_rank or 0,
    )
)
"""Synchronous schedules that may be worth it, the simplest first; the others hold more and wait as long."""


def _preferred_techniques(job: TrainingJob) -> Techniques:
    """Of the worker's techniques, those of a search in order of preference; what ranks refuse is not asked yet."""
    return replace(
        techniques_for(job),
        schedules=CANDIDATE_SCHEDULES,
        virtual_stages=(DEFAULT_VIRTUAL_STAGES,),
        expert=True,
        uneven_split=False,
        ties_over_stages=not kind_of(job.parallelism.order).asynchronous,
        runs=None,
    )


def _only_context(job: TrainingJob, schedule: PipelineSchedule | None = None) -> int | None:
    """1 if ranks cannot share a sequence; None if the degree is free. `schedule` is the one that is given."""
    mixture = job.architecture.mixture
    needs_whole_sequences = (
        job.training.attention_dropout > 0
        or (schedule is not None and kind_of(schedule).asynchronous)
        or (mixture is not None and mixture.capacity_factor is not None)
    )
    return 1 if needs_whole_sequences else None


def techniques_for(job: TrainingJob, techniques: Techniques = MESHWRIGHT_TECHNIQUES) -> Techniques:
    """Of the worker's techniques, those that go with what the job trains and how."""
    training = job.training
    adamw_with_masters = training.optimizer.name is OptimizerName.ADAMW and training.master_weights
    if not adamw_with_masters:
        # Flat shards cut matrices anywhere and round by place; moments are only offloaded beside masters.
        techniques = replace(techniques, zero_stages=(0, 2, 3), offload=(OptimizerOffload.NONE,))
    if training.compile:
        recompute = tuple(
            method for method in techniques.checkpointing if method is not ActivationCheckpointing.SELECTIVE
        )
        techniques = replace(techniques, checkpointing=recompute)
    if training.outer is not None:
        techniques = replace(techniques, offload=(OptimizerOffload.NONE,), expert=False)
    if training.parameter_offload:
        techniques = replace(techniques, zero_stages=(3,), runs=partial(_parameters_sharded, training.outer))
    return techniques


def _parameters_sharded(outer: OuterSpec | None, work: Workload, choices: Strategy) -> bool:
    """Offloaded parameters are FSDP's shards: there must be someone of the same island to share with."""
    islands = 1 if outer is None else outer.islands or choices.data
    return choices.shard_ranks > islands and choices.zero_stage == 3 and runs(work, choices)


def _pins(spec: ParallelTrainingJobSpec, job: TrainingJob) -> Pins:
    """What a search may not change: islands are made of the replicas there are, and some jobs need whole rows."""
    return Pins(
        context=_only_context(job),
        data=spec.replicas if job.training.outer is not None else None,
        expert=1 if job.training.outer is not None else None,
    )


def apply_strategy(spec: ParallelTrainingJobSpec, choices: Strategy) -> ParallelTrainingJobSpec:
    """The job in a layout that a search found: its spec with everything written out.

    Raises:
        ValueError: the spec has no `training`.
    """
    if spec.training is None:
        raise ValueError("`training` is required")
    return spec.model_copy(
        update={
            "replicas": choices.data,
            "parallelism": _parallelism(spec, choices),
            "training": _training(spec.training, choices),
        }
    )


def _parallelism(spec: ParallelTrainingJobSpec, choices: Strategy) -> ParallelismSpec:
    has_pipeline = choices.pipeline > 1
    schedule = choices.schedule
    return ParallelismSpec(
        tensor=choices.tensor,
        pipeline=choices.pipeline,
        expert=choices.expert,
        sequence=choices.sequence_parallel if choices.tensor > 1 else spec.parallelism.sequence,
        expert_tensor=spec.parallelism.expert_tensor,
        tensor_overlap=spec.parallelism.tensor_overlap and choices.tensor > 1 and choices.sequence_parallel,
        context=choices.context,
        context_method=choices.context_method if choices.context > 1 else ContextMethod.RING_ZIG_ZAG,
        schedule=schedule if has_pipeline else None,
        virtual_stages=choices.virtual_stages if has_pipeline and choices.schedule_kind.virtual_stages else None,
        layer_split=list(choices.layer_split) if choices.layer_split is not None else None,
        micro_batches=choices.micro_batches,
        zero_stage=choices.zero_stage,
    )


def _training(training: TrainingSpec, choices: Strategy) -> TrainingSpec:
    optimizer = training.optimizer
    if choices.optimizer_offload is OptimizerOffload.CPU:
        optimizer = optimizer.model_copy(update={"offload": OptimizerOffload.CPU, "offload_path": None})
    return training.model_copy(update={"activation_checkpointing": choices.checkpointing, "optimizer": optimizer})
