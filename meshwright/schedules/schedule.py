"""What a pipeline schedule declares: its limits, its order, its memory and its bubble, in one class.

A class with a `name` registers itself. Rules, planner and worker ask the registered classes; none of them lists names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from meshwright.api.parallelism import PipelineSchedule
from meshwright.schedules.actions import Schedule
from meshwright.schedules.simulator import UNIT_COSTS, ActionCosts


class PipelineShape(NamedTuple):
    """The numbers that a schedule is generated for."""

    ranks: int
    micro_batches: int
    """Of one step."""
    chunks: int = 1
    """Stages of one rank, for schedules that let a user choose."""
    activation_limit: int | None = None
    """Micro-batches whose activations a rank may store, for schedules with a limit. None means the number of ranks."""

    @property
    def limit(self) -> int:
        """The activation limit. Defaults to that of 1F1B."""
        return self.activation_limit or self.ranks


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one micro-batch on one pipeline rank, all its chunks together."""

    forward: float
    backward_input: float
    backward_weight: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward_input + self.backward_weight


class PipelineScheduleKind(ABC):
    """One pipeline schedule. A subclass with a `name` registers one instance of itself."""

    name: ClassVar[str]
    """The value of `parallelism.schedule`."""
    short_name: ClassVar[str]
    """The name in plans and benchmarks."""
    order: ClassVar[PipelineSchedule]
    """`name` as a value of the API; set by registration."""

    virtual_stages: ClassVar[bool] = False
    """Whether `parallelism.virtualStages` sets the number of stages of a rank, each a pipeline's length apart."""
    v_shaped: ClassVar[bool] = False
    """Whether a rank has two stages in a V: the first rank has the first and the last stage of the model."""
    bidirectional: ClassVar[bool] = False
    """Whether micro-batches enter at both ends, so that two ranks have each stage."""
    splits_backward: ClassVar[bool] = False
    """Whether some backward passes come in two halves, gradients of inputs and gradients of weights."""
    mixes_backward: ClassVar[bool] = False
    """Whether a stage also has whole backward passes, between the halves of others."""
    splits_at_peak: ClassVar[bool] = False
    """Whether they do when a rank's memory is at its peak."""
    defers_weights_at_peak: ClassVar[bool] = False
    """Whether a rank then has micro-batches between the halves."""
    forwards_first: ClassVar[bool] = False
    """Whether the last stage runs all forward passes before the first backward pass."""
    asynchronous: ClassVar[bool] = False
    """Whether the pipeline never drains between steps. Its results differ from those of one process by design."""
    double_buffered: ClassVar[bool] = False
    """Whether all stages of an asynchronous pipeline compute a step's gradients with the weights of two steps before.
    Otherwise a stage uses its newest weights.
    """
    takes_activation_limit: ClassVar[bool] = False
    """Whether `parallelism.activationLimit` bounds the memory of its order."""
    measures_costs: ClassVar[bool] = False
    """Whether ranks measure their passes in the first steps, then run what `generate_measured` returns. Such a schedule
    has one stage on each rank and splits every backward pass.
    """
    own_order: ClassVar[bool] = True
    """Whether its order depends only on its numbers, and no other schedule has the same order."""

    micro_batches_per_rank: ClassVar[int] = 1
    """The fewest micro-batches for each pipeline rank."""
    whole_rounds: ClassVar[bool] = False
    """Whether micro-batches must be a multiple of the ranks."""
    even: ClassVar[bool] = False
    """Whether ranks and micro-batches must be even."""
    single_micro_batch: ClassVar[bool] = False
    """Whether a step has one micro-batch."""

    searched: ClassVar[bool] = True
    """Whether a search over all layouts tries it."""
    candidate_order: ClassVar[int | None] = None
    """Its place among the schedules that the planner tries for a job that names none, the simplest first; None for a
    schedule that it never chooses."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in cls.__dict__:
            register(cls)

    @property
    def folded(self) -> bool:
        """Whether the stages are on the ranks in a V."""
        return self.v_shaped or self.bidirectional

    @property
    def whole_backward(self) -> bool:
        """Whether each backward pass comes in one piece, on the rank that updates the weights, before the update."""
        return not (self.splits_backward or self.asynchronous)

    def stages_per_rank(self, virtual_stages: int) -> int:
        """The number of the model's stages on each rank, on average over the ranks.

        Args:
            virtual_stages: the number that the user set, for schedules that use it.
        """
        return virtual_stages if self.virtual_stages else 2 if self.v_shaped else 1

    def accepts(self, ranks: int, micro_batches: int) -> bool:
        """Whether the schedule exists for these numbers, with work for every stage."""
        if ranks == 1:
            return True
        if self.single_micro_batch:
            return micro_batches == 1
        if (self.whole_rounds and micro_batches % ranks) or (self.even and (ranks % 2 or micro_batches % 2)):
            return False
        return micro_batches >= max(1, self.micro_batches_per_rank * ranks)

    @abstractmethod
    def generate(self, shape: PipelineShape, costs: ActionCosts | Sequence[ActionCosts] = UNIT_COSTS) -> Schedule:
        """The order of one step.

        Args:
            shape: ranks, micro-batches and chunks.
            costs: of every stage, or one for each stage, for schedules that are searched.

        Raises:
            ValueError: the schedule does not exist for these numbers; the message has the reason.
        """

    def generate_measured(self, shape: PipelineShape, costs: Sequence[ActionCosts], hop: float) -> Schedule:
        """Return the order of a step for measured times, for schedules with `measures_costs`.

        Args:
            shape: as for `generate`.
            costs: of every stage.
            hop: seconds to send hidden states to another rank.
        """
        return self.generate(shape, costs)

    @abstractmethod
    def in_flight(self, shape: PipelineShape, rank: int) -> float:
        """Micro-batches whose activations `rank` stores at its peak, over all of its chunks."""

    def pending_weight_gradients(self, shape: PipelineShape, rank: int) -> float:
        """Micro-batches of `in_flight` whose backward pass is halfway (arXiv 2401.10241, section 2.3). They store only
        what the gradients of weights need.
        """
        return 0.0

    def bubble(self, shape: PipelineShape, times: StageTimes) -> float:
        """Seconds in which a rank of an evenly split pipeline waits, sends costing nothing.

        Args:
            shape: ranks, micro-batches and chunks.
            times: of all chunks of a rank together.
        """
        return 0.0 if shape.ranks == 1 else self._bubble(shape, times)

    @abstractmethod
    def _bubble(self, shape: PipelineShape, times: StageTimes) -> float:
        """`bubble` with at least two ranks."""

    def paired(self, shape: PipelineShape) -> float:
        """Fraction of the forward passes that overlap a backward pass, on the rank with the fewest such pairs."""
        return 0.0

    def extra_weight_versions(self, ranks: int, rank: int) -> float:
        """Versions of the weights that a rank stores in addition to those that it updates, with at least two ranks."""
        return 0.0


_KINDS: dict[PipelineSchedule, PipelineScheduleKind] = {}


def register(kind: type[PipelineScheduleKind]) -> None:
    """Makes a schedule known by its names.

    Raises:
        ValueError: another class has one of its names.
    """
    kind.order = PipelineSchedule.named(kind.name)
    taken = {name for other in _KINDS.values() for name in (other.name, other.short_name)}
    if taken & {kind.name, kind.short_name}:
        raise ValueError(f"another pipeline schedule is called `{kind.name}` or `{kind.short_name}`")
    _KINDS[kind.order] = kind()


def unregister(kind: type[PipelineScheduleKind]) -> None:
    """Forgets a schedule that is registered."""
    del _KINDS[kind.order]


def registered() -> tuple[PipelineScheduleKind, ...]:
    """The registered schedules in the order of the API's values, those from outside of this package last."""
    declared = [order for order in PipelineSchedule if order in _KINDS]
    return tuple(_KINDS[order] for order in dict.fromkeys([*declared, *_KINDS]))


def registered_kind(order: PipelineSchedule) -> PipelineScheduleKind:
    """The class of a value of the API."""
    return _KINDS[order]
