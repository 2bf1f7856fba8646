"""A layout's pipeline on a clock: the schedule simulated with every stage's own seconds.

The search uses closed forms; the plan that it picks, and the reasons that it gives, are checked and shown with this.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """One step's pipeline."""

    schedule: Schedule
    simulation: Simulation
    """In seconds; without the gradients' reduction and the optimizer."""

    @property
    def slowest(self) -> int:
        """The rank that computes longest."""
        ranks = range(len(self.simulation.timeline))
        return max(ranks, key=self.simulation.busy)


def simulate_pipeline(work: Workload, strategy: Strategy, machine: Machine, groups: GroupSpans) -> Pipeline:
    """Generates and simulates the pipeline of a layout.

    Raises:
        ValueError: the layers cannot be split, or the schedule cannot be made for these numbers.
    """
    schedule = strategy.schedule_kind.generate(strategy.pipeline_shape)
    parts = [part for own in strategy.layers_of(work.model.layers) for part in own]
    costs = []
    for number, own in enumerate(sorted(parts, key=lambda part: (part.start, part.stop))):
        mixtures = work.model.count_mixtures(own.start, own.stop)
        stage = Stage(number, len(own), mixtures, number == 0, number == len(parts) - 1)
        costs.append(ActionCosts(*stage_times(work, strategy, machine, groups, stage)))
    hop = stage_transfer_seconds(work, strategy, machine, groups)
    return Pipeline(schedule, simulate(schedule, costs, hop))
