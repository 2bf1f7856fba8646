"""DualPipe and DualPipeV (DeepSeek-V3, arXiv 2412.19437, section 3.2.1): a forward and a backward pass overlapped.

DualPipe feeds micro-batches from both ends of the pipeline, so every rank holds a stage of either direction and every
parameter lies on two ranks. DualPipeV folds it: two chunks a rank, the second running back, each parameter once. Both
follow the same eight phases, with a direction or a chunk as the `side`. In the bubbles (table 2 there) an overlapped
pair costs F+B; they are exact for F = B = W and otherwise close.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from meshwright.api.parallelism import PipelineSchedule
from meshwright.schedules.actions import Action, ActionKind, Schedule, Slot, check_counts
from meshwright.schedules.schedule import PipelineScheduleKind, PipelineShape, StageTimes
from meshwright.schedules.simulator import UNIT_COSTS, ActionCosts

StageOfPass = Callable[[int, int], tuple[int, int]]
"""(side, number of the side's pass) -> (stage, micro-batch)."""


def dual_pipe(ranks: int, micro_batches: int) -> Schedule:
    """Both directions; half of the micro-batches each.

    Raises:
        ValueError: ranks or micro-batches are odd, or there are fewer than two micro-batches a rank.
    """
    check_counts(ranks, micro_batches)
    if ranks % 2 or micro_batches % 2:
        raise ValueError(f"DualPipe needs even numbers of ranks and micro-batches, got {ranks} and {micro_batches}")
    _check_enough("DualPipe", ranks, micro_batches)
    half = micro_batches // 2
    rank_slots = []
    for rank in range(ranks):
        reversed_direction = rank >= ranks // 2

        def stage_of_pass(
            side: int, number: int, rank: int = rank, reversed_direction: bool = reversed_direction
        ) -> tuple[int, int]:
            direction = side ^ int(reversed_direction)
            return (rank if direction == 0 else ranks - 1 - rank), direction * half + number

        outer = ranks - 1 - rank if reversed_direction else rank
        rank_slots.append(_phases(outer, ranks // 2, half, stage_of_pass, first_apart=outer == ranks // 2 - 1))
    return Schedule("dualpipe", ranks, micro_batches, tuple(rank_slots))


def dual_pipe_v(ranks: int, micro_batches: int) -> Schedule:
    """Folded: rank r holds stages r and 2·ranks - 1 - r.

    Raises:
        ValueError: there are fewer than two micro-batches a rank.
    """
    check_counts(ranks, micro_batches)
    _check_enough("DualPipeV", ranks, micro_batches)
    rank_slots = []
    for rank in range(ranks):

        def stage_of_pass(side: int, number: int, rank: int = rank) -> tuple[int, int]:
            return (rank if side == 0 else 2 * ranks - 1 - rank), number

        rank_slots.append(_phases(rank, ranks, micro_batches, stage_of_pass, first_apart=rank == ranks - 1))
    return Schedule("dualpipe-v", 2 * ranks, micro_batches, tuple(rank_slots))


def _check_enough(name: str, ranks: int, micro_batches: int) -> None:
    if micro_batches < 2 * ranks:
        raise ValueError(f"{name} needs at least {2 * ranks} micro-batches, two for each rank, got {micro_batches}")


class _RankBuilder:
    """A rank's slots as they are laid down."""

    def __init__(self, stage_of_pass: StageOfPass) -> None:
        self.slots: list[Slot] = []
        self._place = stage_of_pass
        self._forwards, self._backwards = [0, 0], [0, 0]
        self._weights: deque[tuple[int, int]] = deque()

    def forward(self, side: int) -> None:
        self.slots.append((self._next_forward(side),))

    def backward(self, side: int, split: bool) -> None:
        """The side's next backward pass; `split` leaves the weights' gradients for `weight`."""
        self.slots.append((self._next_backward(side, split),))

    def overlapped(self, forward_side: int, backward_side: int) -> None:
        """A forward pass of one side overlapped with a backward pass of the other."""
        forward = self._next_forward(forward_side)
        self.slots.append((forward, self._next_backward(backward_side, split=False)))

    def weight(self) -> None:
        """The oldest weights' gradients that were left."""
        self.slots.append((Action(ActionKind.WEIGHT, *self._weights.popleft()),))

    def _next_forward(self, side: int) -> Action:
        number = self._forwards[side]
        self._forwards[side] += 1
        return Action(ActionKind.FORWARD, *self._place(side, number))

    def _next_backward(self, side: int, split: bool) -> Action:
        number = self._backwards[side]
        self._backwards[side] += 1
        stage, micro_batch = self._place(side, number)
        if split:
            self._weights.append((stage, micro_batch))
        return Action(ActionKind.INPUT if split else ActionKind.BACKWARD, stage, micro_batch)


def _phases(outer: int, depth: int, count: int, stage_of_pass: StageOfPass, first_apart: bool) -> tuple[Slot, ...]:
    """The eight phases of a rank `outer` places from its end of a fold `depth` deep, with `count` passes a side.

    `first_apart`: the innermost rank's first pair belongs to one micro-batch and cannot overlap.
    """
    rank, inner = _RankBuilder(stage_of_pass), depth - outer - 1
    for _ in range(2 * inner):
        rank.forward(0)
    for _ in range(outer + 1):
        rank.forward(0)
        rank.forward(1)
    for _ in range(inner):
        rank.backward(1, split=True)
        rank.weight()
        rank.forward(1)
    for turn in range(count - 2 * depth + outer + 1):
        if turn == 0 and first_apart:
            rank.forward(0)
            rank.backward(1, split=False)
        else:
            rank.overlapped(0, 1)
        rank.overlapped(1, 0)
    _draining(rank, outer, inner)
    return tuple(rank.slots)


def _draining(rank: _RankBuilder, outer: int, inner: int) -> None:
    for _ in range(inner):
        rank.backward(1, split=False)
        rank.overlapped(1, 0)
    split = False
    for turn in range(outer + 1):
        middle = turn == (outer + 1) // 2
        split = split or (middle and outer % 2 == 1)
        rank.backward(1, split)
        split = split or (middle and outer % 2 == 0)
        rank.backward(0, split)
    for _ in range(inner):
        rank.weight()
        rank.backward(0, split=True)
    for _ in range(outer + 1):
        rank.weight()


class DualPipe(PipelineScheduleKind):
    """Micro-batches from both ends."""

    name = PipelineSchedule.DUAL_PIPE
    short_name = "dualpipe"
    bidirectional = True
    splits_backward = True
    mixes_backward = True
    micro_batches_per_rank = 2
    even = True
    candidate_order = 6

    def generate(self, shape: PipelineShape, costs: ActionCosts | Sequence[ActionCosts] = UNIT_COSTS) -> Schedule:
        """As `dual_pipe`."""
        return dual_pipe(shape.ranks, shape.micro_batches)

    def in_flight(self, shape: PipelineShape, rank: int) -> float:
        """Of both directions together."""
        return float(min(shape.micro_batches, shape.ranks + 1))

    def paired(self, shape: PipelineShape) -> float:
        """On the outermost ranks."""
        return _paired(shape.ranks // 2, shape.micro_batches // 2)

    def _bubble(self, shape: PipelineShape, times: StageTimes) -> float:
        return max(shape.ranks / 2 - 1, 0.0) * _phase_seconds(times)


class DualPipeV(PipelineScheduleKind):
    """DualPipe folded: each parameter on one rank."""

    name = PipelineSchedule.DUAL_PIPE_V
    short_name = "dualpipe-v"
    v_shaped = True
    splits_backward = True
    mixes_backward = True
    micro_batches_per_rank = 2
    candidate_order = 5

    def generate(self, shape: PipelineShape, costs: ActionCosts | Sequence[ActionCosts] = UNIT_COSTS) -> Schedule:
        """As `dual_pipe_v`."""
        return dual_pipe_v(shape.ranks, shape.micro_batches)

    def in_flight(self, shape: PipelineShape, rank: int) -> float:
        """Of both chunks together."""
        return min(float(shape.micro_batches), shape.ranks + 0.5)

    def paired(self, shape: PipelineShape) -> float:
        """On the first rank."""
        return _paired(shape.ranks, shape.micro_batches)

    def _bubble(self, shape: PipelineShape, times: StageTimes) -> float:
        return (shape.ranks - 1) * _phase_seconds(times) / 2


def _phase_seconds(times: StageTimes) -> float:
    """What a rank waits for each rank of a half pipeline."""
    return max(times.forward + 2 * times.backward_input - times.backward_weight, 0.0)


def _paired(depth: int, count: int) -> float:
    """Fraction of the passes of the outermost rank of a fold `depth` deep that overlap, with `count` passes a side."""
    if count < 2 * depth:
        return 0.0  # The schedule does not exist.
    # Two for each turn of the middle phase, and one for each inner rank while draining: see `_phases`.
    pairs = 2 * (count - 2 * depth + 1) + depth - 1 - (depth == 1)
    return max(0.0, pairs / (2 * count))
