"""What the ranks of a mesh generation run, resolved by the planner: nothing is left to choose.

Meshwright's own runtime trains a `NativeRun`; a `CommandRun` is a command of the user's. On the wire a command run is
the one that has `command`. The kind is decided once, where a message is parsed; after that each has its own type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationInfo, field_serializer, field_validator

from meshwright.api.base import ApiModel
from meshwright.api.checkpoint import CheckpointSpec
from meshwright.api.data import DataSpec, Packing
from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.spec import ProgressSpec
from meshwright.api.training import TrainingSpec
from meshwright.layout import Layout
from meshwright.models.architecture import Architecture

DEGREES = ("tensor", "pipeline", "context", "expert", "micro_batches")
"""What a run's own fields say, and on the wire `parallelism` too."""


class Run(ApiModel):
    """How ranks share the work: all that process groups need. A script that trains its own module has no more."""

    tensor: int
    """Tensor-parallel degree."""
    pipeline: int
    """Pipeline-parallel degree."""
    data_parallel: int
    """Data-parallel degree."""
    context: int = 1
    """Context-parallel degree: ranks that share each sequence."""
    expert: int = 1
    """Expert-parallel degree; divides data x context."""
    micro_batches: int
    """Micro-batches per replica and step."""
    parallelism: ParallelismSpec
    """Schedule, sequence parallelism and ZeRO stage."""

    @field_validator("parallelism")
    @classmethod
    def _drop_degrees(cls, parallelism: ParallelismSpec, info: ValidationInfo) -> ParallelismSpec:
        """Check that `parallelism` has the run's degrees, where it has any, and keep the run's alone."""
        for name in DEGREES:
            given, own = getattr(parallelism, name), info.data.get(name)
            if given is not None and own is not None and given != own:
                raise ValueError(f"`parallelism` has {name} {given}, and the run has {own}")
        return parallelism.model_copy(update=dict.fromkeys(DEGREES))

    @field_serializer("parallelism")
    def _add_degrees(self, parallelism: ParallelismSpec) -> ParallelismSpec:
        return parallelism.model_copy(update=self.degrees)

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees that `ParallelismSpec` has too, by field."""
        return {name: getattr(self, name) for name in DEGREES}

    @property
    def layout(self) -> Layout:
        """The degrees as a layout.

        Raises:
            ValueError: they contradict each other.
        """
        return Layout(self.tensor, self.pipeline, self.data_parallel, self.context, self.expert)

    @property
    def islands(self) -> int:
        """Groups of replicas that train apart from each other; 1 without `training.outer`."""
        return 1

    @property
    def shards_masters(self) -> bool:
        """Whether parameters are bf16, and ranks have fp32 master weights of only their rows."""
        return False

    @property
    def deterministic(self) -> bool:
        """Whether kernels must give the same result every time."""
        return True

    @property
    def packs_documents(self) -> bool:
        """Whether rows contain several documents, between which there is no attention."""
        return False

    @property
    def uses_sliding_window(self) -> bool:
        """Whether the window of attention is shorter than a sequence."""
        return False


class NativeRun(Run):
    """A run of Meshwright's own runtime."""

    architecture: Architecture
    """The model."""
    data: DataSpec
    """The training text."""
    training: TrainingSpec
    """Length, batch, precision and optimizer."""
    checkpoint: CheckpointSpec | None = None
    """Checkpoint interval and retention; None when the job keeps no checkpoints."""

    @property
    def islands(self) -> int:
        """See `Run.islands`."""
        outer = self.training.outer
        return 1 if outer is None else outer.islands or self.data_parallel

    @property
    def shards_masters(self) -> bool:
        """See `Run.shards_masters`. One rank has all rows, so its parameters are their own masters."""
        return self.training.sharded_masters is not None and self.layout.shard_ranks > 1

    @property
    def deterministic(self) -> bool:
        """See `Run.deterministic`."""
        return self.training.deterministic

    @property
    def packs_documents(self) -> bool:
        """See `Run.packs_documents`."""
        return self.data.packing is Packing.DOCUMENTS

    @property
    def uses_sliding_window(self) -> bool:
        """See `Run.uses_sliding_window`."""
        return 0 < self.architecture.sliding_window < self.training.sequence_length


class CommandRun(Run):
    """A run of the user's own command, which brings its own model, data and training."""

    checkpoint: CheckpointSpec | None = None
    """Where the command may save its checkpoints; None when the job keeps none."""
    command: list[str]
    """The user's own command, run once per rank."""
    progress: ProgressSpec | None = None
    """How step and loss are found in the command's log. Agents before 0.2 ignore it."""
    replica_group_ranks: int | None = None
    """Ranks of each replica group, if these are worlds of their own (`runtime.framework: TorchFT`)."""
    stages_outermost: bool | None = None
    """Whether the framework of the command takes `RANK` for a number in which the pipeline stage comes first and the
    replica second (`runtime.framework: TorchTitan` and `DeepSpeed`). None is no. Agents before 0.2 ignore it."""


class UnsupportedRun(CommandRun):
    """A run that this release cannot execute, because a later release sent it. Ranks are not started."""

    tensor: int = 1
    pipeline: int = 1
    data_parallel: int = 1
    micro_batches: int = 1
    parallelism: ParallelismSpec = ParallelismSpec()
    command: list[str] = []
    reason: str
    """What the release does not support."""


def _parse_run(raw: Any) -> Any:
    """The run in a message: of the kind that has a command, or of the other."""
    if not isinstance(raw, Mapping):
        return raw
    return (NativeRun if raw.get("command") is None else CommandRun).model_validate(raw)


RunConfig = Annotated[NativeRun | CommandRun, BeforeValidator(_parse_run)]
"""What a mesh document announces: a run of either kind."""


class RunMessage(ApiModel):
    """A run by itself, to parse it apart from its mesh document."""

    run: RunConfig
