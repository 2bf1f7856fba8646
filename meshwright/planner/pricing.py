"""The price of a job's layouts on the cluster it would run on: spec and inventory in the cost model's terms.

A cluster whose GPUs the catalogue does not know has no price: plans are then made by memory alone, as they can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from meshwright.api.parallelism import ContextMethod
from meshwright.api.precision import Precision
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.layout import Layout
from meshwright.models.architecture import Architecture
from meshwright.models.transformer import Transformer
from meshwright.planner.cost.accelerators import Accelerator, accelerator
from meshwright.planner.cost.choices import Choices, Numbers, Work
from meshwright.planner.cost.constants import Constants
from meshwright.planner.cost.estimate import Estimate, estimate, machine_for
from meshwright.planner.cost.fabric import Fabric, Level
from meshwright.planner.cost.groups import Groups
from meshwright.planner.cost.step import Machine
from meshwright.planner.hardware import Hardware
from meshwright.planner.inventory import Inventory
from meshwright.planner.topology.levels import RACK
from meshwright.planner.topology.links import SHARE_OF_NIC

_NUMBERS = {
    Precision.FP32: Numbers.FP32,
    Precision.BF16: Numbers.BF16,
    Precision.FP16: Numbers.FP16,
    Precision.FP64: Numbers.FP32,
}
"""By number format; fp64, for comparisons of layouts alone, counts as the widest that the model knows."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants learnt from running jobs, by accelerator; they take the place of the shipped ones."""

    constants: Mapping[str, Constants] = field(default_factory=dict)

    def on(self, machine: Machine) -> Machine:
        """The machine with what was learnt about its GPU."""
        learnt = self.constants.get(machine.gpu.name)
        return replace(machine, constants=learnt) if learnt else machine

    def with_constants(self, gpu: str, constants: Constants) -> Calibration:
        """The same, with other constants for one GPU."""
        return Calibration({**self.constants, gpu: constants})


@dataclass(frozen=True, slots=True)
class Pricer:
    """Estimates for the layouts of one job."""

    work: Work
    machine: Machine
    zero_stage: int
    sequence_parallel: bool
    numbers: Numbers
    context_method: ContextMethod = ContextMethod.RING_ZIG_ZAG
    ulysses: int = 1
    """With `RingUlysses`, neighbours that exchange heads."""

    def choices(self, layout: Layout, micro_batches: int) -> Choices:
        """The layout in the cost model's terms."""
        return Choices(
            tensor=layout.tensor,
            sequence_parallel=self.sequence_parallel and layout.tensor > 1,
            context=layout.context,
            context_method=self.context_method,
            ulysses=self.ulysses,
            pipeline=layout.pipeline,
            data=layout.data,
            expert=layout.expert,
            zero_stage=self.zero_stage if layout.replicas > 1 else 0,
            micro_batch_size=max(1, self.work.global_batch // (layout.data * micro_batches)),
            micro_batches=micro_batches,
            numbers=self.numbers,
        )

    def price(self, layout: Layout, micro_batches: int, groups: Groups | None = None) -> Estimate:
        """Memory and time of one step; `groups` are those of a placement, without it ranks fill domains in order.

        Raises:
            ValueError: there are more stages than layers.
        """
        return estimate(self.work, self.choices(layout, micro_batches), self.machine, groups)


def pricer_for(
    spec: ParallelTrainingJobSpec,
    architecture: Architecture | None,
    inventory: Inventory,
    calibration: Calibration | None = None,
) -> Pricer | None:
    """The pricer for a job; None for a command of the user's, and where no usable node's GPU is in the catalogue."""
    training = spec.training
    if architecture is None or training is None:
        return None
    machine = machine_of(inventory, spec.workers.gpus_per_worker)
    if machine is None:
        return None
    return Pricer(
        work=Work(Transformer.of(architecture), training.sequence_length, training.global_batch_size),
        machine=(calibration or Calibration()).on(machine),
        zero_stage=spec.parallelism.zero_stage,
        sequence_parallel=spec.parallelism.sequence,
        numbers=_NUMBERS[training.precision] if training.fp8 is None else Numbers.FP8,
        context_method=spec.parallelism.context_method,
        ulysses=spec.parallelism.ulysses or 1,
    )


def machine_of(inventory: Inventory, gpus_per_worker: int) -> Machine | None:
    """The machine that a cluster's usable nodes make up, most of them deciding; None where their GPUs are not known.

    A job may land on any of them and waits for its slowest rank, so a mixed cluster runs at its slowest GPU's pace.
    """
    counted: Counter[str] = Counter()
    for node in inventory.usable:
        found = accelerator(node.gpu_product) if node.gpu_product else None
        if found is not None:
            counted[found.name] += node.capacity.gpus
    if not counted:
        return None
    gpus = [_known(name) for name in counted]
    chosen = _known(counted.most_common(1)[0][0])
    hardware = Hardware.of(inventory, gpus_per_worker)
    usable = replace(
        chosen,
        memory=float(min(hardware.gpus_by_memory, default=int(min(gpu.memory for gpu in gpus)))),
        node=hardware.node_gpus or chosen.node,
    )
    slowest = min(1.0, min(gpu.half for gpu in gpus) / chosen.half)
    domain = (hardware.domain_gpus or chosen.domain) if chosen.domain > 1 else 1
    return machine_for(usable, fabric=_with_racks(Fabric.of(usable, domain=domain), inventory), slowest=slowest)


def _with_racks(fabric: Fabric, inventory: Inventory) -> Fabric:
    """The fabric with a level for racks, where labels name racks of several NVLink domains."""
    racks: Counter[str] = Counter()
    domains: set[tuple[str, str]] = set()
    for node in inventory.usable:
        racks[node.place.rack] += node.capacity.gpus
        domains.add((node.place.rack, node.place.domain))
    if len(racks) == len(domains) or len(fabric.levels) < 2:
        return fabric
    inner, network = fabric.levels[0], fabric.levels[-1]
    width = max(inner.gpus, min(racks.values()))
    across = replace(network, bandwidth=network.bandwidth * SHARE_OF_NIC[RACK])
    return Fabric((inner, Level("rack", width, network.bandwidth, network.latency), across))


def _known(name: str) -> Accelerator:
    found = accelerator(name)
    assert found is not None
    return found
