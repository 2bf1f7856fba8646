"""What a framework needs to run a plan: its techniques, what it cannot express, and its command line and files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.api import labels
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.training import OptimizerSpec, TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.planner.cost.strategy import Strategy, Workload
from meshwright.planner.search.request import Techniques

CHECKPOINT_DIRECTORY = f"${labels.ENV_CHECKPOINT_DIR}"
"""The directory of checkpoints, which ranks have in their environment. Agents replace a word that is equal to it."""


@dataclass(frozen=True, slots=True)
class FrameworkRun:
    """A job with its plan, to be written for a framework."""

    spec: ParallelTrainingJobSpec
    training: TrainingSpec
    architecture: Architecture
    strategy: Strategy

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return self.training.steps

    @property
    def stage_layers(self) -> list[int]:
        """Number of layers of each stage, in the order of the model."""
        ranks = self.strategy.layers_of(self.architecture.layers)
        return [len(ranks[rank][chunk]) for chunk in range(len(ranks[0])) for rank in range(len(ranks))]

    @property
    def has_even_stages(self) -> bool:
        """Whether all stages have the same number of layers."""
        return len(set(self.stage_layers)) == 1


@dataclass(frozen=True, slots=True)
class Launch:
    """How every rank starts the framework. The variables of torchrun are set already."""

    command: tuple[str, ...]
    """Words; `$NAME` is a variable of the rank's environment."""
    flags: tuple[str, ...] = ()
    """What a job's own command needs in addition: the words of `command` after the program, without those about data,
    and with the content of files. Empty if the framework takes a configuration only as a file."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Configuration files in the working directory, by name."""
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What the framework does not take from the job, and what to add by hand."""


@dataclass(frozen=True, slots=True)
class Target:
    """A framework that plans can be written for."""

    name: str
    account: str
    """Its properties in the cost model (`cost/frameworks.py`)."""
    techniques: Techniques
    """The techniques of a search, without the check of each candidate."""
    model_problem: Callable[[Architecture], str]
    """Why it cannot express a model. Empty if it can."""
    strategy_problem: Callable[[Architecture, Strategy], str]
    """Why it cannot express a strategy. Empty if it can."""
    launch: Callable[[FrameworkRun], Launch]
    handled: frozenset[str]
    """Fields of the job that `launch` writes; notes name the others that the job sets."""
    stages_outermost: bool = False
    """Whether the framework numbers ranks by pipeline stage first and replica second. The mesh has replicas first."""

    def renumbers(self, strategy: Strategy) -> bool:
        """Whether its ranks have other numbers than those of the mesh."""
        return self.stages_outermost and strategy.pipeline > 1 and strategy.data > 1

    def runs(self, work: Workload, strategy: Strategy) -> bool:
        """Whether the framework can run a strategy."""
        return not self.strategy_problem(work.model, strategy)


_PARTS = ("data", "training", "parallelism", "checkpoint")


def fields_without_equivalent(spec: ParallelTrainingJobSpec, handled: Collection[str]) -> list[str]:
    """The paths of fields about training, data, layout and checkpoints that a job sets and a target does not take."""
    fields: dict[str, Any] = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, include=set(_PARTS))
    paths = [path for part in _PARTS if isinstance(fields.get(part), dict) for path in _paths(part, fields[part])]
    return [path for path in paths if not any(path == one or path.startswith(f"{one}.") for one in handled)]


def _paths(prefix: str, fields: Mapping[str, Any]) -> Iterator[str]:
    for name, value in fields.items():
        path = f"{prefix}.{name}"
        if isinstance(value, Mapping) and value:
            yield from _paths(path, value)
        else:
            yield path


LAYOUT_FIELDS = frozenset(
    f"parallelism.{name}"
    for name in (
        *("tensor", "pipeline", "context", "expert", "sequence", "expertTensor", "contextMethod", "ulysses"),
        *("schedule", "virtualStages", "layerSplit", "stageBalance", "microBatches", "zeroStage"),
        *("dataParallel.shardSize", "dataParallel.strategy"),
    )
)
"""The plan has resolved these: a target rejects what it cannot express."""
BATCH_FIELDS = frozenset({"training.steps", "training.globalBatchSize", "training.sequenceLength"})
OPTIMIZER_FIELDS = frozenset(
    f"training.optimizer.{name}"
    for name in (
        *("learningRate", "minLearningRate", "warmupSteps", "decay", "decaySteps"),
        *("weightDecay", "beta1", "beta2", "gradientClip"),
    )
)
"""A target that cannot express a `decay` names it in a note (`decay_note`)."""
CHECKPOINT_FIELDS = frozenset({"checkpoint.claimName", "checkpoint.everySteps"})


def decay_note(optimizer: OptimizerSpec) -> str:
    """The note of a target that has no schedule like the job's, and writes none."""
    parts = {"decay": optimizer.decay, "decaySteps": optimizer.decay_steps}
    stated = " and ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
    return f"no equivalent: spec.training.optimizer.{stated}: set the schedule in the framework"


def number(value: float) -> str:
    """A number as a flag's value: `3e-04` becomes `0.0003`."""
    return f"{value:.12g}"
