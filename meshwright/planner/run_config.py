"""The run of a job's ranks in a layout, and the reasons why ranks would reject it, before there is a pod."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.api.parallelism import ParallelismSpec, PipelineSchedule, StageBalance
from meshwright.api.progress_patterns import FRAMEWORK_PATTERNS
from meshwright.api.spec import ParallelTrainingJobSpec, ProgressSpec
from meshwright.models.architecture import Architecture
from meshwright.planner.cost.strategy import Strategy
from meshwright.protocol.run_config import DEGREES, CommandRun, NativeRun, RunConfig
from meshwright.rules.facts import facts_of_run
from meshwright.rules.validation import is_allowed, run_problems

Runnable = Callable[[Strategy], bool]
"""Whether ranks accept a strategy."""


def run_config_of(spec: ParallelTrainingJobSpec, architecture: Architecture | None, strategy: Strategy) -> RunConfig:
    """Return the run of the ranks, with every field that the spec leaves open filled in.

    Raises:
        ValueError: the spec has neither a model with data and training, nor a command.
    """
    command = spec.runtime.command
    if command is not None:
        return CommandRun(
            **_shared_fields(spec, strategy, strategy.schedule, {}),
            checkpoint=spec.checkpoint,
            command=command,
            progress=_progress(spec),
            replica_group_ranks=_replica_group_ranks(spec, strategy),
        )
    if architecture is None or spec.data is None or spec.training is None:
        raise ValueError("`model`, `data` and `training` are required unless `runtime.command` is set")
    checkpoint = spec.checkpoint
    if checkpoint is not None:
        steps = checkpoint.interval if checkpoint.every is None else None
        checkpoint = checkpoint.model_copy(update={"every_steps": steps, "keep": checkpoint.retained})
    # With one stage the schedule has no effect, and stays as in the spec.
    schedule = spec.parallelism.order if strategy.pipeline == 1 else strategy.schedule
    return NativeRun(
        **_shared_fields(spec, strategy, schedule, techniques_of(spec.parallelism, strategy)),
        architecture=architecture,
        data=spec.data,
        training=spec.training.model_copy(update={"activation_checkpointing": strategy.checkpointing}),
        checkpoint=checkpoint,
    )


def _replica_group_ranks(spec: ParallelTrainingJobSpec, strategy: Strategy) -> int | None:
    """Ranks of a replica group: those of a worker, or of as many workers as a replica needs."""
    replica = strategy.tensor * strategy.pipeline * strategy.context
    return max(replica, spec.workers.gpus_per_worker) if spec.runtime.has_replica_groups else None


def _progress(spec: ParallelTrainingJobSpec) -> ProgressSpec | None:
    """How step and loss are found in the command's log: by the job's own patterns, else by those of its framework."""
    stated, framework = spec.runtime.progress, spec.runtime.framework
    if framework is None:
        return stated
    known = FRAMEWORK_PATTERNS.get(framework.value)
    patterns = stated.patterns if stated is not None else None
    total = stated.total_steps if stated is not None else None
    return ProgressSpec(
        patterns=patterns if patterns is not None or known is None else list(known),
        total_steps=total if total is not None or spec.training is None else spec.training.steps,
    )


def techniques_of(stated: ParallelismSpec, strategy: Strategy) -> dict[str, Any]:
    """What the spec may leave open besides degrees. A field that has no effect in this layout stays as stated."""
    has_stages = strategy.pipeline > 1 and strategy.schedule_kind.virtual_stages
    allowed = stated.data_parallel.strategy.zero_stages if stated.data_parallel.strategy else (strategy.zero_stage,)
    # One rank has nothing to shard: the stage has no effect, but must match `dataParallel.strategy`.
    zero_stage = strategy.zero_stage if strategy.zero_stage in allowed else allowed[0]
    split: dict[str, Any] = {}
    if stated.stage_balance is StageBalance.MEASURED:
        # Ranks get the split itself: they do not know which times were measured, and 0.1.0 does not know the value.
        layers = list(strategy.layer_split) if strategy.layer_split is not None else None
        split = {"layer_split": layers, "stage_balance": StageBalance.FLOPS}
    method = strategy.context_method if strategy.context > 1 else stated.context_method_or_default
    return {
        "virtual_stages": strategy.virtual_stages if has_stages else stated.virtual_stages,
        "context_method": stated.context_method or method,
        "zero_stage": zero_stage if stated.zero_stage is None else stated.zero_stage,
        **split,
    }


def _shared_fields(
    spec: ParallelTrainingJobSpec, strategy: Strategy, schedule: PipelineSchedule, techniques: dict[str, Any]
) -> dict[str, Any]:
    """The fields of both kinds of runs."""
    return {
        "tensor": strategy.tensor,
        "pipeline": strategy.pipeline,
        "data_parallel": strategy.data,
        "context": strategy.context,
        "expert": strategy.expert,
        "micro_batches": strategy.micro_batches,
        "parallelism": spec.parallelism.model_copy(
            update={**dict.fromkeys(DEGREES), "schedule": schedule, **techniques}
        ),
    }


def refusals_of(run: RunConfig) -> list[str]:
    """Return the reasons why ranks would reject a run. Always empty for a user's command."""
    return run_problems(run) if isinstance(run, NativeRun) else []


def runnable(spec: ParallelTrainingJobSpec, architecture: Architecture) -> Runnable:
    """Return the check that a search for `spec` makes for its candidates."""

    def runs(strategy: Strategy) -> bool:
        run = run_config_of(spec, architecture, strategy)
        return not isinstance(run, NativeRun) or is_allowed(facts_of_run(run))

    return runs
