"""Asynchronous schedules: 1F1B without draining between steps (PipeDream and PipeDream-2BW, arXiv 2006.09503).

Nobody waits. A rank keeps versions of its weights instead: a micro-batch's backward pass uses those of its forward
pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.api.parallelism import PipelineSchedule
from meshwright.schedules.actions import Schedule
from meshwright.schedules.classic import one_f_one_b
from meshwright.schedules.schedule import PipelineScheduleKind, PipelineShape, StageTimes
from meshwright.schedules.simulator import UNIT_COSTS, ActionCosts


class _WithoutDraining(PipelineScheduleKind):
    """What both have in common."""

    asynchronous = True
    own_order = False
    searched = False

    def generate(self, shape: PipelineShape, costs: ActionCosts | Sequence[ActionCosts] = UNIT_COSTS) -> Schedule:
        """1F1B's order."""
        return one_f_one_b(shape.ranks, shape.micro_batches)

    def in_flight(self, shape: PipelineShape, rank: int) -> float:
        """As many as reach the last stage: the next step's follow this step's."""
        return float(shape.ranks - rank)

    def _bubble(self, shape: PipelineShape, times: StageTimes) -> float:
        return 0.0


class PipeDream(_WithoutDraining):
    """An update after every micro-batch."""

    name = PipelineSchedule.PIPEDREAM
    short_name = "pipedream"
    micro_batches_per_rank = 0
    single_micro_batch = True

    def extra_weight_versions(self, ranks: int, rank: int) -> float:
        """One for each micro-batch under way. The newest equals the weights until the next update."""
        return float(ranks - rank)


class PipeDream2BW(_WithoutDraining):
    """An update after several micro-batches, with double-buffered weights."""

    name = PipelineSchedule.PIPEDREAM_2BW
    short_name = "pipedream-2bw"
    double_buffered = True

    def extra_weight_versions(self, ranks: int, rank: int) -> float:
        """Two."""
        return 2.0
