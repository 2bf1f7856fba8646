"""Bytes that each group of ranks sends per step, and the cost of a further location that follows from them.

The bytes, and the fraction of them that computation hides, come from the cost model. A placement is therefore chosen by
the traffic of the job itself. For example, a long pipeline with small activations may cross racks if the rings of its
gradients should not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.planner.cost.comm_groups import GroupSpans, group_spans
from meshwright.planner.cost.comm_time import stage_send_bytes
from meshwright.planner.cost.estimate import estimate
from meshwright.planner.cost.fabric import Span
from meshwright.planner.cost.stages import stages_of
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.cost.update_time import gradient_sync_bytes, gradient_sync_seconds
from meshwright.planner.cost_model import CostModel
from meshwright.planner.placement.weights import GroupTraffic, Weights
from meshwright.planner.topology.links import Links
from meshwright.planner.topology.site import DEFAULT_SITE, SiteFabric

HIDDEN_WEIGHT = 0.05
"""Fraction of the hidden bytes that counts nevertheless: they still compete with other traffic."""
MILLI = 1000.0


def group_traffic(cost_model: CostModel, strategy: Strategy, gpus_per_worker: int) -> GroupTraffic:
    """Exposed bytes per step that one more location adds to one group of each dimension.

    Stages and ring neighbors send at the same time, so the slowest link limits the entire group. A group's bytes are
    divided by the number of locations that it can touch. A group with all ranks in different locations has the full
    cost.

    Raises:
        ValueError: there are more stages than layers.
    """
    time = estimate(cost_model.work, strategy, cost_model.machine, _scattered_spans(cost_model, strategy)).time
    replicas_per_worker = max(1, gpus_per_worker // strategy.replica_size)
    rings = max(1, -(-strategy.shard_ranks // replicas_per_worker) - 1)
    nic = cost_model.machine.gpu.nic
    return GroupTraffic(
        context=time.context * nic / max(1, strategy.context - 1),
        expert=time.expert * nic / max(1, strategy.expert - 1),
        pipeline=_pipeline_bytes(cost_model, strategy),
        data=_data_bytes(cost_model, strategy, time.data) / replicas_per_worker / rings,
    )


def weights_for(
    cost_model: CostModel,
    strategy: Strategy,
    gpus_per_worker: int,
    levels: Sequence[str],
    site: SiteFabric = DEFAULT_SITE,
) -> Weights:
    """Milliseconds per step that one more location of each level adds for a group of each dimension.

    Args:
        cost_model: the job's workload and GPUs.
        strategy: the strategy that runs.
        gpus_per_worker: number of consecutive ranks on one worker. Replicas on one worker share its network cards.
        levels: the inventory's levels, closest first.
        site: what the administrator states about the fabric.

    Raises:
        ValueError: there are more stages than layers.
    """
    gpu = cost_model.machine.gpu
    links = Links(levels, inside=gpu.link, nic=gpu.nic, measured=site.measured(levels))
    return Weights.from_traffic(group_traffic(cost_model, strategy, gpus_per_worker), links).scaled(MILLI)


def _pipeline_bytes(cost_model: CostModel, strategy: Strategy) -> float:
    """Bytes over one stage boundary.

    Filling and draining wait at each boundary, steady sends overlap at all of them.
    """
    if strategy.pipeline == 1:
        return 0.0
    runtime = cost_model.machine.runtime
    steady = (
        2.0 * strategy.micro_batches * strategy.virtual_stages * (HIDDEN_WEIGHT if runtime.overlap_pipeline else 1.0)
    )
    return (2.0 + steady / (strategy.pipeline - 1)) * stage_send_bytes(cost_model.work, strategy, runtime)


def _data_bytes(cost_model: CostModel, strategy: Strategy, exposed: float) -> float:
    """Bytes that one rank sends to reduce gradients and gather parameters.

    Only those that take `exposed` seconds if scattered.
    """
    if strategy.shard_ranks == 1:
        return 0.0
    work, machine = cost_model.work, cost_model.machine
    stages = stages_of(work.model, strategy)
    total_seconds = gradient_sync_seconds(
        work, strategy, machine, _scattered_spans(cost_model, strategy), stages, (0.0, 0.0)
    )
    exposed_fraction = exposed / total_seconds if total_seconds > 0 else 0.0
    return max(exposed_fraction, HIDDEN_WEIGHT) * gradient_sync_bytes(work, strategy, machine.runtime, stages)


def _scattered_spans(cost_model: CostModel, strategy: Strategy) -> GroupSpans:
    """Spans of groups with every rank in a different location. Tensor-parallel groups stay together."""
    fabric = cost_model.machine.fabric
    contiguous = group_spans(strategy, fabric, cost_model.machine.runtime.order)

    def scattered(span: Span) -> Span:
        return Span((*[1] * (len(fabric.levels) - 1), span.size))

    return replace(
        contiguous,
        context=scattered(contiguous.context),
        expert=scattered(contiguous.expert),
        shard_ranks=scattered(contiguous.shard_ranks),
        expert_shard_ranks=scattered(contiguous.expert_shard_ranks),
    )
