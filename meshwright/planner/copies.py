"""Host memory of the copies of in-memory recovery (`recovery.copyEverySteps`): of a rank, and of a worker pod. Pure."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.figures import format_number
from meshwright.memory_copies import copies_bytes
from meshwright.models.architecture import Architecture
from meshwright.planner.cluster.quantities import parse_quantity
from meshwright.planner.cost.frameworks import Framework
from meshwright.planner.cost.model_states import states_of
from meshwright.planner.cost.stages import Stage, stage_parameters, stages_of
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.units import GIB, MIB
from meshwright.planner.workload import TrainingJob

PARAMETERS_PER_MOMENTS = 0.5
"""A parameter's share of its two moments in AdamW: recovery in memory supports no other optimizer."""


def rank_copies_bytes(model: Architecture, strategy: Strategy, runtime: Framework) -> float:
    """Return the bytes of host memory that a rank's copies take: its own state and a peer's, of two steps.

    The ranks of a pipeline differ. This is the rank that needs the most.
    """
    return copies_bytes(
        max(_state_bytes(model, strategy, runtime, stage) for stage in stages_of(model, strategy).every)
    )


def _state_bytes(model: Architecture, strategy: Strategy, runtime: Framework, stage: Stage) -> float:
    """Bytes of what a rank of the stage updates, its moments, and weights that are not trained."""
    parameters = stage_parameters(model, stage, strategy.tensor, strategy.expert_parts)
    states = states_of(parameters, strategy, runtime, stage)
    trained = (1 + PARAMETERS_PER_MOMENTS) * states.optimizer
    adapters = strategy.settings.adapters_of(stage.dense, stage.mixtures)
    if strategy.settings.adapters is None:
        return trained
    frozen = parameters.total / (parameters.total + adapters)
    return trained + (states.parameters + states.master) * frozen


def worker_copies_bytes(
    spec: ParallelTrainingJobSpec, architecture: Architecture | None, strategy: Strategy, gpus_per_worker: int
) -> int:
    """Return the bytes of host memory that copies take in each worker pod; 0 if the job makes none.

    With fewer replicas, ranks have larger shards. The pods of an elastic job stay when it shrinks, so they get what
    they need with `minReplicas`.
    """
    if spec.recovery.copy_every_steps is None or architecture is None or spec.training is None:
        return 0
    if spec.elastic is not None:
        fewest = min(strategy.data, spec.elastic.min_replicas)
        if fewest * strategy.context % strategy.expert == 0:
            strategy = replace(strategy, data=fewest)
    runtime = TrainingJob.of(spec, architecture).runtime
    return ceil(rank_copies_bytes(architecture, strategy, runtime) * gpus_per_worker)


def with_copies_memory(spec: ParallelTrainingJobSpec, copies: int) -> ParallelTrainingJobSpec:
    """Return the spec, whose pods request `copies` bytes besides `workers.resources.memory`, if that is stated."""
    resources = spec.workers.resources
    if not copies or resources.memory is None:
        return spec
    memory = f"{ceil((parse_quantity(resources.memory) + copies) / MIB)}Mi"
    workers = spec.workers.model_copy(update={"resources": resources.model_copy(update={"memory": memory})})
    return spec.model_copy(update={"workers": workers})


def about_copies(spec: ParallelTrainingJobSpec, copies: int) -> tuple[str, ...]:
    """Describe the host memory of copies, and what worker pods request for it."""
    if not copies:
        return ()
    stated = spec.workers.resources.memory
    size = f"{format_number(copies / GIB)} GiB in each worker"
    what = f"copies in host memory every {spec.recovery.copy_every_steps} steps: {size}"
    if stated is None:
        return (f"{what}, which pods do not request, because `workers.resources.memory` is left out",)
    total = (parse_quantity(stated) + copies) / GIB
    return (
        f"{what}, which pods request besides `workers.resources.memory`: {format_number(float(total))} GiB together",
    )
