"""What each group of ranks sends per step, and what a further place therefore costs it.

The bytes and the part of them that computation hides come from the cost model, so that a placement is judged by the
traffic of the very job: a long pipeline of small activations may cross racks where its gradients' rings should not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.layout import Layout
from meshwright.planner.cost.choices import Choices
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.fabric import Span
from meshwright.planner.cost.groups import Groups, groups_of
from meshwright.planner.cost.replicas import replica_bytes, replica_seconds
from meshwright.planner.cost.stages import stages_of
from meshwright.planner.cost.traffic import hop_bytes
from meshwright.planner.placement.weights import Traffic, Weights
from meshwright.planner.pricing import Pricer
from meshwright.planner.topology.links import Links

HIDDEN = 0.05
"""Part of hidden bytes that counts all the same: other traffic still meets them on the way."""
MILLI = 1000.0


def traffic_of(pricer: Pricer, layout: Layout, micro_batches: int, gpus_per_worker: int) -> Traffic:
    """Exposed bytes per step that one more place adds to one group of each dimension.

    Stages and ring neighbours send at the same time, so the slowest link sets the pace of all of a group: what it sends
    is spread over the places that it can touch, and a group that is wholly scattered pays for all of it.

    Raises:
        ValueError: there are more stages than layers.
    """
    choices = pricer.choices(layout, micro_batches)
    time = estimate(pricer.work, choices, pricer.machine, _scattered(pricer, choices)).time
    beside = max(1, gpus_per_worker // layout.replica_size)
    rings = max(1, -(-choices.replicas // beside) - 1)
    nic = pricer.machine.gpu.nic
    return Traffic(
        context=time.context * nic / max(1, choices.context - 1),
        expert=time.expert * nic / max(1, choices.expert - 1),
        pipeline=_pipeline_bytes(pricer, choices),
        data=_data_bytes(pricer, choices, time.data) / beside / rings,
    )


def weights_for(
    pricer: Pricer, layout: Layout, micro_batches: int, gpus_per_worker: int, levels: Sequence[str]
) -> Weights:
    """Milliseconds per step that one more place of each level costs a group of each dimension of this job.

    Args:
        pricer: the job's work and its GPUs.
        layout: the degrees.
        micro_batches: per replica and step.
        gpus_per_worker: consecutive ranks of one worker; the replicas it holds share their network cards' work.
        levels: the inventory's levels, closest first.

    Raises:
        ValueError: there are more stages than layers.
    """
    gpu = pricer.machine.gpu
    links = Links(levels, inside=gpu.link, nic=gpu.nic)
    return Weights.from_traffic(traffic_of(pricer, layout, micro_batches, gpus_per_worker), links).scaled(MILLI)


def _pipeline_bytes(pricer: Pricer, choices: Choices) -> float:
    """Of one boundary: filling and draining wait at every boundary, the steady sends of all of them at once."""
    if choices.pipeline == 1:
        return 0.0
    runtime = pricer.machine.runtime
    steady = 2.0 * choices.micro_batches * choices.virtual_stages * (HIDDEN if runtime.overlap_pipeline else 1.0)
    return (2.0 + steady / (choices.pipeline - 1)) * hop_bytes(pricer.work, choices, runtime)


def _data_bytes(pricer: Pricer, choices: Choices, exposed: float) -> float:
    """Of one rank, to reduce gradients and gather parameters: the part that takes `exposed` seconds when scattered."""
    if choices.replicas == 1:
        return 0.0
    work, machine = pricer.work, pricer.machine
    stages = stages_of(work.model, choices)
    whole = replica_seconds(work, choices, machine, _scattered(pricer, choices), stages, (0.0, 0.0))
    part = exposed / whole if whole > 0 else 0.0
    return max(part, HIDDEN) * replica_bytes(work, choices, machine.runtime, stages)


def _scattered(pricer: Pricer, choices: Choices) -> Groups:
    """Groups without two ranks in one place; tensor-parallel ones stay together."""
    fabric = pricer.machine.fabric
    ordered = groups_of(choices, fabric, pricer.machine.runtime.order)

    def apart(span: Span) -> Span:
        return Span((*[1] * (len(fabric.levels) - 1), span.size))

    return replace(
        ordered,
        context=apart(ordered.context),
        expert=apart(ordered.expert),
        replicas=apart(ordered.replicas),
        expert_replicas=apart(ordered.expert_replicas),
    )
