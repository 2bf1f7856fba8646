"""Seconds of one optimizer step, by part.

The sum of the fullest rank's time (`stage_time`) times the micro-batches, the time that fills and drains the pipeline,
the gradient reduction, the optimizer, and everything that no computation hides. Every part uses the constants of its
(accelerator, runtime) pair, so the same function calibrates and predicts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.planner.cost.comm_groups import GroupSpans
from meshwright.planner.cost.comm_time import stage_send_seconds
from meshwright.planner.cost.constants import PER_STEP, SYNCHRONIZE
from meshwright.planner.cost.machine import Machine
from meshwright.planner.cost.schedule_cost import bubble_seconds, paired_passes
from meshwright.planner.cost.stage_time import MicroBatchTime, bottleneck_of, forward_and_backward_parts
from meshwright.planner.cost.stages import stages_of
from meshwright.planner.cost.strategy import Strategy, Workload
from meshwright.planner.cost.update_time import (
    gradient_sync_seconds,
    offload_seconds,
    optimizer_seconds,
    part_copies_seconds,
)
from meshwright.schedules.schedule import StageTimes


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step on the slowest rank, by part. Only exposed time counts."""

    compute: float
    recompute: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    bubble: float
    data: float
    """Reducing gradients and gathering parameters over the replicas."""
    optimizer: float
    offload: float
    host: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return (
            self.compute
            + self.recompute
            + self.tensor
            + self.context
            + self.expert
            + self.pipeline
            + self.bubble
            + self.data
            + self.optimizer
            + self.offload
            + self.host
        )


def step_time(
    work: Workload, strategy: Strategy, machine: Machine, groups: GroupSpans, paired: float | None = None
) -> StepTime:
    """Estimate the time of one step.

    Args:
        work: what a step processes.
        strategy: the layout.
        machine: the hardware and framework.
        groups: shapes of the communication groups.
        paired: fraction of the passes that overlap those of another micro-batch. Default: as in the schedule.

    Raises:
        ValueError: the layers cannot be split over the pipeline's ranks.
    """
    stages = stages_of(work.model, strategy)
    slowest, worst, longest, mean = bottleneck_of(work, strategy, machine, groups, stages)
    count = strategy.micro_batches
    paired = paired_passes(strategy) if paired is None else paired
    slowdown = 1.0 / machine.slowest
    compute = worst.forward + worst.backward_input + worst.backward_weight
    return StepTime(
        compute=count * compute * slowdown,
        recompute=count * worst.recompute * slowdown,
        tensor=count * worst.tensor,
        context=count * worst.context,
        expert=count * (worst.expert - paired * worst.paired),
        pipeline=_sending(work, strategy, machine, groups),
        bubble=_bubble(strategy, worst, mean / longest) * slowdown,
        data=gradient_sync_seconds(work, strategy, machine, groups, stages, _overlappable_seconds(worst)),
        optimizer=optimizer_seconds(work, strategy, machine, slowest),
        offload=offload_seconds(work, strategy, machine, slowest, longest),
        host=count * worst.host + part_copies_seconds(strategy, machine, slowest) + PER_STEP * machine.constants.host,
    )


def _overlappable_seconds(worst: MicroBatchTime) -> tuple[float, float]:
    """Seconds of a micro-batch's (backward pass, both passes) that can hide communication."""
    return worst.backward_input + worst.backward_weight + worst.recompute, worst.total


def _bubble(strategy: Strategy, worst: MicroBatchTime, part: float) -> float:
    """Idle seconds of the slowest rank: the schedule's bubble times `part`, the average rank's share of its time."""
    if strategy.pipeline == 1:
        return 0.0
    times = StageTimes(*(part * seconds for seconds in forward_and_backward_parts(worst)))
    if paired_passes(strategy) > 0.0:
        # The bubble of such a schedule has one overlapped pair for each of its phases.
        times = replace(times, forward=times.forward - part * worst.paired)
    return bubble_seconds(strategy, times)


def stage_transfer_seconds(work: Workload, strategy: Strategy, machine: Machine, groups: GroupSpans) -> float:
    """Seconds to send one micro-batch to the next stage."""
    if strategy.pipeline == 1:
        return 0.0
    tokens = -(-work.sequence_length * strategy.micro_batch_size // strategy.context)
    one = stage_send_seconds(float(tokens), work.model, strategy, groups, machine.fabric, machine.runtime)
    return one * machine.constants.communication + SYNCHRONIZE * machine.constants.host


def _sending(work: Workload, strategy: Strategy, machine: Machine, groups: GroupSpans) -> float:
    """Exposed seconds of sends between stages.

    Sends while filling and draining always count, and those of every micro-batch if nothing hides them.
    """
    one = stage_transfer_seconds(work, strategy, machine, groups)
    filling = 2 * (strategy.pipeline - 1) * one
    steady = 0.0 if machine.runtime.overlap_pipeline else 2 * strategy.micro_batches * strategy.virtual_stages * one
    return filling + steady
