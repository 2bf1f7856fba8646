"""Between a job's spec and a search over every degree: what the search may do for it, and its result as a spec."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from meshwright.api.parallelism import ContextMethod, ParallelismSpec
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.training import ActivationCheckpointing, OptimizerName, OptimizerOffload, OuterSpec, TrainingSpec
from meshwright.planner.cost.strategy import Strategy, Workload
from meshwright.planner.cost_model import CostModel
from meshwright.planner.search.request import MESHWRIGHT_TECHNIQUES, Objective, Pins, SearchRequest, Techniques, runs
from meshwright.planner.workload import TrainingJob
from meshwright.rules.parallelism import MAX_WORKERS, MAX_WORLD_SIZE


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
    spec: ParallelTrainingJobSpec, cost_model: CostModel, gpus: int, techniques: Techniques = MESHWRIGHT_TECHNIQUES
) -> SearchRequest:
    """A search that keeps every choice that the job sets."""
    stated, training = spec.parallelism, cost_model.job.training
    return SearchRequest(
        cost_model.work,
        cost_model.machine,
        gpus,
        techniques=techniques,
        pins=Pins(
            tensor=stated.tensor,
            pipeline=stated.pipeline,
            zero_stage=stated.zero_stage,
            context=stated.context,
            context_method=stated.context_method,
            schedule=stated.schedule,
            checkpointing=training.activation_checkpointing,
        ),
        fixed=cost_model.job.fixed,
        gpus_per_worker=spec.workers.gpus_per_worker,
    )


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
    mixture, training = job.architecture.mixture, job.training
    needs_whole_sequences = training.attention_dropout > 0 or (
        mixture is not None and mixture.capacity_factor is not None
    )
    return Pins(
        context=1 if needs_whole_sequences else None,
        data=spec.replicas if training.outer is not None else None,
        expert=1 if training.outer is not None else None,
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
