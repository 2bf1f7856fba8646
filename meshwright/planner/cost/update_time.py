"""Seconds between the micro-batches of two steps: gradient reduction, parameter gathering, optimizer and offload."""

from __future__ import annotations

from meshwright.api.training import OptimizerOffload
from meshwright.planner.cost.activations import layer_activations, requantizes, saved_bytes
from meshwright.planner.cost.collectives import all_gather, all_reduce
from meshwright.planner.cost.comm_groups import GroupSpans
from meshwright.planner.cost.fabric import Fabric, Span
from meshwright.planner.cost.frameworks import Framework
from meshwright.planner.cost.machine import Machine
from meshwright.planner.cost.roofline import MEMORY_PART
from meshwright.planner.cost.stages import Stage, StageParameters, Stages, fullest_stage, stage_parameters
from meshwright.planner.cost.strategy import Strategy, Workload, matmul_bytes
from meshwright.planner.units import FP32_BYTES

FP8_BYTES = 1.0
OPTIMIZER_BYTES = 34.0
"""Bytes that Adam reads and writes per parameter, with the gradient's norm."""
HOST_PER_COPY = 13e-6
"""Seconds of the host to slice and copy one small tensor: those of a kernel in a layer of 60 (`HOST_PER_LAYER`)."""
HOST_ADAM = 0.5
"""Fraction of the rate to host memory that an optimizer on the CPU reaches."""


def gradient_sync_seconds(
    work: Workload,
    strategy: Strategy,
    machine: Machine,
    groups: GroupSpans,
    stages: Stages,
    overlappable: tuple[float, float],
) -> float:
    """Exposed seconds of reducing gradients and gathering parameters, on the rank with the most parameters.

    Args:
        work: what a step processes.
        strategy: the layout.
        machine: the hardware and framework.
        groups: shapes of the communication groups.
        stages: the pipeline's ranks.
        overlappable: seconds of one micro-batch's (backward pass, both passes). A reduction hides behind the backward
            pass that computes its gradients; ZeRO-3's traffic behind all of every pass.
    """
    runtime, fabric = machine.runtime, machine.fabric
    stage_params = fullest_stage(work.model, stages, strategy.tensor, strategy.expert_parts)
    comm_seconds = _scale_seconds(strategy, groups, fabric)
    for count, small, span in (
        (stage_params.dense, _fp8_weights(stage_params, strategy), groups.shard_ranks),
        (stage_params.experts, 0.0, groups.expert_shard_ranks),
    ):
        comm_seconds += _reduction_seconds(count, small, strategy, runtime, span, fabric)
    if strategy.tensor > 1 and not strategy.expert_tensor:
        comm_seconds += all_reduce(stage_params.experts * runtime.reduced, groups.tensor, fabric)
    overlap_seconds = overlappable[0] * strategy.gradient_reductions
    if strategy.zero_stage == 3:
        gather_seconds = _parameter_gather_seconds(stage_params, strategy, runtime, groups, fabric)
        comm_seconds += 2.0 * strategy.micro_batches * gather_seconds
        overlap_seconds = overlappable[1] * strategy.micro_batches
    comm_seconds *= machine.constants.communication
    overlap = runtime.overlap_gradients
    return max(comm_seconds - overlap * overlap_seconds, (1.0 - overlap) * comm_seconds)


def gradient_sync_bytes(work: Workload, strategy: Strategy, runtime: Framework, stages: Stages) -> float:
    """Bytes that the rank with the most parameters sends in one step to reduce gradients and gather parameters."""
    stage_params = fullest_stage(work.model, stages, strategy.tensor, strategy.expert_parts)
    # In a ring an all-reduce is a scatter and a gather.
    scattered, gathered = _scattered_and_gathered(strategy, runtime)
    sent = stage_params.total * (strategy.gradient_reductions * scattered + gathered)
    if strategy.zero_stage == 2:
        sent -= (gathered - FP8_BYTES) * _fp8_weights(stage_params, strategy)
    if strategy.zero_stage == 3:
        sent += 2.0 * strategy.micro_batches * sum(_gathered_bytes(stage_params, strategy, runtime))
    return sent * (strategy.shard_ranks - 1) / strategy.shard_ranks


def _fp8_weights(stage_params: StageParameters, strategy: Strategy) -> float:
    """Number of weights that are gathered in fp8."""
    gathers = strategy.settings.gathers_fp8 and strategy.zero_stage >= 2
    return stage_params.dense - stage_params.tables if gathers else 0.0


def _scale_seconds(strategy: Strategy, groups: GroupSpans, fabric: Fabric) -> float:
    """Seconds to find the largest numbers of all weights that are gathered in fp8, once per step.

    They are few bytes: only the latency counts.
    """
    if not (strategy.settings.gathers_fp8 and strategy.zero_stage >= 2):
        return 0.0
    return sum(all_reduce(FP32_BYTES, span, fabric) for span in (groups.shard_ranks, groups.tensor))


def _reduction_seconds(
    parameters: float, small: float, strategy: Strategy, runtime: Framework, span: Span, fabric: Fabric
) -> float:
    """Seconds to all-reduce gradients, or with ZeRO to scatter them and to gather parameters, `small` of them in fp8
    with stage 2.
    """
    if strategy.zero_stage == 0:
        return all_reduce(parameters * runtime.reduced, span, fabric)
    scattered, gathered = _scattered_and_gathered(strategy, runtime)
    scatter_seconds = strategy.gradient_reductions * all_gather(parameters * scattered, span, fabric)
    bytes_gathered = parameters * gathered
    if strategy.zero_stage == 2:
        bytes_gathered -= (gathered - FP8_BYTES) * small
    return scatter_seconds + all_gather(bytes_gathered, span, fabric)


def _scattered_and_gathered(strategy: Strategy, runtime: Framework) -> tuple[float, float]:
    """Bytes of a parameter in the two halves of its gradient's reduction. With ZeRO the second is of parameters."""
    if strategy.zero_stage == 0:
        return runtime.reduced, runtime.reduced
    gradient = strategy.settings.master_gradient
    if strategy.shards_masters and gradient is not None:
        return gradient, strategy.precision.bytes
    return runtime.reduced, runtime.reduced / 2


def _parameter_gather_seconds(
    stage_params: StageParameters, strategy: Strategy, runtime: Framework, groups: GroupSpans, fabric: Fabric
) -> float:
    dense, experts = _gathered_bytes(stage_params, strategy, runtime)
    return all_gather(dense, groups.shard_ranks, fabric) + all_gather(experts, groups.expert_shard_ranks, fabric)


def _gathered_bytes(stage_params: StageParameters, strategy: Strategy, runtime: Framework) -> tuple[float, float]:
    """Bytes of the dense parameters and of the experts that one pass gathers.

    This runtime gathers in the compute format, or the dense weights of products in fp8. Others gather in the format of
    products.
    """
    if not runtime.stores_masters:
        size = matmul_bytes(strategy)
        return stage_params.dense * size, stage_params.experts * size
    element = strategy.precision.bytes
    small = _fp8_weights(stage_params, strategy)
    return element * (stage_params.dense - small) + FP8_BYTES * small, element * stage_params.experts


def part_copies_seconds(strategy: Strategy, machine: Machine, stage: Stage) -> float:
    """Seconds in which the host copies gathered parameters part by part: each replica's part of each tensor is one.

    nanotron's `all_gather_coalesced` (its `distributed.py`) slices, flattens and copies them in Python.
    """
    if strategy.zero_stage not in (1, 2) or strategy.shard_ranks == 1:
        return 0.0
    parts = strategy.shard_ranks * machine.runtime.gathered_tensors * (stage.dense + stage.mixtures)
    return parts * HOST_PER_COPY * machine.constants.host


def _optimizer_parameters(work: Workload, strategy: Strategy, stage: Stage) -> float:
    """Parameters whose optimizer state is on each rank of a stage."""
    stage_params = stage_parameters(work.model, stage, strategy.tensor, strategy.expert_parts)
    if not strategy.zero_stage:
        return stage_params.total
    return stage_params.shard(strategy.shard_ranks, strategy.expert)


def optimizer_seconds(work: Workload, strategy: Strategy, machine: Machine, stage: Stage) -> float:
    """Seconds of the optimizer's memory traffic on the device. 0 if its state is offloaded."""
    if strategy.optimizer_offload is not OptimizerOffload.NONE:
        return 0.0
    moved = _optimizer_parameters(work, strategy, stage) * OPTIMIZER_BYTES
    return moved / (machine.gpu.bandwidth * MEMORY_PART) * machine.constants.compute


def offload_seconds(work: Workload, strategy: Strategy, machine: Machine, stage: Stage, busy: float) -> float:
    """Exposed seconds of moving offloaded data.

    Optimizer state: gradients are moved out, updated parameters in, and the CPU updates. With NVMe the state is also
    moved in and out. Activations: moved out and in once per micro-batch, hidden behind its `busy` seconds.
    """
    seconds = 0.0
    if strategy.optimizer_offload is not OptimizerOffload.NONE:
        parameter_count, runtime = _optimizer_parameters(work, strategy, stage), machine.runtime
        seconds += parameter_count * (runtime.reduced + runtime.weights) / machine.gpu.host
        seconds += parameter_count * OPTIMIZER_BYTES / (machine.gpu.host * HOST_ADAM)
        if strategy.optimizer_offload is OptimizerOffload.FILE:
            seconds += 2.0 * parameter_count * runtime.optimizer / machine.nvme
    if strategy.activation_offload:
        moved = 2.0 * _activation_bytes(work, strategy, machine, stage) / machine.gpu.host
        seconds += strategy.micro_batches * max(0.0, moved - busy)
    return seconds


def _activation_bytes(work: Workload, strategy: Strategy, machine: Machine, stage: Stage) -> float:
    """Bytes that one micro-batch stores on a rank of a stage until its backward pass."""
    tokens = -(-work.sequence_length * strategy.micro_batch_size // strategy.context)
    rest = (
        work.sequence_length,
        strategy.tensor,
        strategy.sequence_parallel,
        strategy.precision,
        strategy.fp8,
        machine.runtime,
        strategy.expert > 1,
        requantizes(strategy, machine.runtime),
    )
    kinds = ((False, stage.dense), (True, stage.mixtures))
    return tokens * sum(
        saved_bytes(layer_activations(work.model, mixture, *rest), layers, strategy)
        for mixture, layers in kinds
        if layers
    )
