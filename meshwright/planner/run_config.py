"""What ranks would run in a layout, and what they would have against it, asked before there is a pod."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.models.architecture import Architecture
from meshwright.planner.cost.strategy import Strategy
from meshwright.protocol.messages import RunConfig
from meshwright.rules.resolved.run_checks import run_problems

Runnable = Callable[[Strategy], bool]
"""Whether ranks take a strategy."""


def run_config_of(spec: ParallelTrainingJobSpec, architecture: Architecture | None, strategy: Strategy) -> RunConfig:
    """What the ranks run, with everything the spec left open filled in."""
    checkpoint = spec.checkpoint
    if checkpoint is not None and architecture is not None:
        checkpoint = checkpoint.model_copy(update={"every_steps": checkpoint.interval, "keep": checkpoint.retained})
    training = spec.training
    if training is not None:
        training = training.model_copy(update={"activation_checkpointing": strategy.checkpointing})
    decided = {
        "tensor": strategy.tensor,
        "pipeline": strategy.pipeline,
        "context": strategy.context,
        "expert": strategy.expert,
        "micro_batches": strategy.micro_batches,
    }
    # With one stage the schedule decides nothing, and stays as the spec has it.
    unused = strategy.pipeline == 1 and architecture is not None
    schedule = spec.parallelism.order if unused else strategy.schedule
    return RunConfig(
        **decided,
        data_parallel=strategy.data,
        parallelism=spec.parallelism.model_copy(update={**decided, "schedule": schedule}),
        architecture=architecture,
        data=spec.data,
        training=training,
        checkpoint=checkpoint,
        command=spec.runtime.command,
    )


def refusals_of(run: RunConfig) -> list[str]:
    """What ranks would have against a run; nothing is known of a command of the user's."""
    return run_problems(run) if run.command is None and run.architecture is not None else []


def runnable(spec: ParallelTrainingJobSpec, architecture: Architecture) -> Runnable:
    """What a search for `spec` asks of its candidates."""

    def runs(strategy: Strategy) -> bool:
        return not refusals_of(run_config_of(spec, architecture, strategy))

    return runs
