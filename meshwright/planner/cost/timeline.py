"""A layout's pipeline on a clock: its schedule, simulated with the estimated seconds of every stage.

The search uses closed forms. What it chose is drawn, and checked in tests, with this.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.planner.cost.comm_groups import GroupSpans
from meshwright.planner.cost.machine import Machine
from meshwright.planner.cost.stage_time import stage_times
from meshwright.planner.cost.stages import Stage
from meshwright.planner.cost.step_time import stage_transfer_seconds
from meshwright.planner.cost.strategy import Strategy, Workload
from meshwright.schedules.actions import Schedule
from meshwright.schedules.simulator import ActionCosts, Simulation, simulate


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The pipeline of one step."""

    schedule: Schedule
    simulation: Simulation
    """In seconds, without the reduction of gradients and the optimizer."""

    @property
    def slowest(self) -> int:
        """The rank that computes longest."""
        ranks = range(len(self.simulation.timeline))
        return max(ranks, key=self.simulation.busy)


def simulate_pipeline(
    work: Workload, strategy: Strategy, machine: Machine, groups: GroupSpans, micro_batches: int | None = None
) -> Pipeline:
    """Generate and simulate the pipeline of a layout.

    Args:
        work: what a step processes.
        strategy: the layout.
        machine: the hardware and framework.
        groups: shapes of the communication groups.
        micro_batches: micro-batches to simulate. Default: those of a step.

    Raises:
        ValueError: the layers cannot be split, or the schedule does not exist for these numbers.
    """
    if micro_batches is not None:
        strategy = replace(strategy, micro_batches=micro_batches)
    schedule = strategy.schedule_kind.generate(strategy.pipeline_shape)
    costs = [
        ActionCosts(*stage_times(work, strategy, machine, groups, stage)) for stage in model_stages(work, strategy)
    ]
    hop = stage_transfer_seconds(work, strategy, machine, groups)
    return Pipeline(schedule, simulate(schedule, costs, hop))


def model_stages(work: Workload, strategy: Strategy) -> list[Stage]:
    """Return every stage of the model, in the model's order."""
    parts = sorted(
        (part for parts in strategy.layers_of(work.model.layers) for part in parts),
        key=lambda part: (part.start, part.stop),
    )
    return [
        Stage(
            number,
            len(part),
            work.model.count_mixtures(part.start, part.stop),
            embedding=number == 0,
            output=number == len(parts) - 1,
        )
        for number, part in enumerate(parts)
    ]
