"""A layout's pipeline on a clock: the schedule simulated with every stage's own seconds.

The search uses closed forms; the plan that it picks, and the reasons that it gives, are checked and shown with this.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planner.cost.choices import Choices, Work
from meshwright.planner.cost.groups import Groups
from meshwright.planner.cost.machine import Machine
from meshwright.planner.cost.pace import stage_seconds
from meshwright.planner.cost.stages import stages_of
from meshwright.planner.cost.step import hop_seconds
from meshwright.schedules.actions import Schedule
from meshwright.schedules.generate import generate
from meshwright.schedules.simulate import Costs, Simulation, simulate


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


def simulate_pipeline(work: Work, choices: Choices, machine: Machine, groups: Groups) -> Pipeline:
    """Generates and simulates the pipeline of a layout.

    Raises:
        ValueError: the layers cannot be split, or the schedule cannot be made for these numbers.
    """
    schedule = generate(choices.schedule.value, choices.pipeline, choices.micro_batches, choices.virtual_stages)
    held = stages_of(work.model, choices).every
    costs: list[Costs] = [Costs()] * schedule.stages
    for rank, stage in enumerate(held):
        forward, backward_input, backward_weight = stage_seconds(work, choices, machine, groups, stage)
        own = sorted({action.stage for slot in schedule.ranks[rank] for action in slot})
        parts = 1 if choices.pipeline == schedule.stages else len(own)
        for number in own if parts > 1 else [rank]:
            costs[number] = Costs(forward / parts, backward_input / parts, backward_weight / parts)
    hop = hop_seconds(work, choices, machine, groups)
    return Pipeline(schedule, simulate(schedule, costs, hop))
