"""Estimates the cost of one layout in one call. A search calls it some hundred thousand times.

    machine = machine_for(accelerator("NVIDIA-H100-80GB-HBM3"))
    estimate(Workload(PRESETS["llama-3-8b"], 8192, 64), Strategy(tensor=8, data=8), machine)

`fits` estimates only memory, which is fast, to discard a layout before its time is estimated. For groups that a
placement splits, pass their real `GroupSpans`.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.api.precision import Precision
from meshwright.models.counts import training_flops
from meshwright.planner.cost.accelerators import Accelerator
from meshwright.planner.cost.comm_groups import GroupSpans, group_spans
from meshwright.planner.cost.constants import constants_for
from meshwright.planner.cost.fabric import Fabric
from meshwright.planner.cost.frameworks import FRAMEWORKS, Framework
from meshwright.planner.cost.machine import Machine
from meshwright.planner.cost.memory import Memory, worst_stage
from meshwright.planner.cost.step_time import StepTime, step_time
from meshwright.planner.cost.strategy import Strategy, Workload


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated cost of a layout."""

    memory: Memory
    """Bytes on each rank of the fullest stage, by kind."""
    time: StepTime
    """Seconds of one optimizer step, by part."""
    gpus: int
    tokens_per_second: float
    mfu: float
    """Model FLOPs (full attention matrix, without recomputation) relative to the peak of bf16."""

    @property
    def seconds(self) -> float:
        """Seconds of one step."""
        return self.time.total

    @property
    def bubble(self) -> float:
        """Fraction of a step in which a rank waits for its pipeline."""
        return self.time.bubble / self.time.total

    @property
    def tokens_per_gpu_hour(self) -> float:
        """Throughput per GPU-hour."""
        return self.tokens_per_second * 3600.0 / self.gpus


def machine_for(
    gpu: Accelerator, runtime: Framework | None = None, fabric: Fabric | None = None, *, slowest: float = 1.0
) -> Machine:
    """Return a machine with fitted constants. Defaults: Meshwright's runtime and the GPU's usual fabric."""
    framework = runtime or FRAMEWORKS["meshwright"]
    return Machine(gpu, fabric or Fabric.of(gpu), framework, constants_for(gpu.name, framework.name), slowest=slowest)


def memory_of(work: Workload, strategy: Strategy, machine: Machine) -> Memory:
    """Bytes on each rank of the fullest stage.

    Raises:
        ValueError: the layers cannot be split over the pipeline's ranks.
    """
    return worst_stage(work, strategy, machine.runtime)


def fits(work: Workload, strategy: Strategy, machine: Machine, *, usable: float = 1.0) -> bool:
    """Whether every rank's bytes are within `usable` times the GPU's memory."""
    return memory_of(work, strategy, machine).total <= usable * machine.gpu.memory


def time_of(
    work: Workload,
    strategy: Strategy,
    machine: Machine,
    groups: GroupSpans | None = None,
    paired: float | None = None,
) -> StepTime:
    """Seconds of one step, by part. Does not check memory. `paired` is as for `step_time`.

    Raises:
        ValueError: the layers cannot be split over the pipeline's ranks.
    """
    groups = groups or group_spans(strategy, machine.fabric, machine.runtime.order)
    return step_time(work, strategy, machine, groups, paired)


def estimate(
    work: Workload, strategy: Strategy, machine: Machine, groups: GroupSpans | None = None, memory: Memory | None = None
) -> Estimate:
    """Memory and time of one layout.

    Args:
        work: the model and what a step processes.
        strategy: the layout. `micro_batch_size x micro_batches x data` should be `work.global_batch`.
        machine: where it runs.
        groups: shapes of the communication groups as placed. Default: those of ranks that fill domains in order.
        memory: the layout's memory, if it is already known.

    Raises:
        ValueError: the layers cannot be split over the pipeline's ranks.
    """
    time = time_of(work, strategy, machine, groups)
    rate = work.tokens / time.total
    useful = rate * training_flops(work.model, work.sequence_length)
    return Estimate(
        memory=memory or memory_of(work, strategy, machine),
        time=time,
        gpus=strategy.world_size,
        tokens_per_second=rate,
        mfu=useful / (strategy.world_size * machine.gpu.peak(Precision.BF16)),
    )
