"""The question a search answers: what to train, on what, with which techniques, and what is better."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from meshwright.api.parallelism import ContextMethod, PipelineSchedule
from meshwright.api.training import ActivationCheckpointing, OptimizerOffload
from meshwright.planner.cluster.limits import USABLE_FRACTION, ClusterLimits
from meshwright.planner.cost.frameworks import Framework
from meshwright.planner.cost.machine import Machine
from meshwright.planner.cost.strategy import SEARCHED_SCHEDULES, Strategy, Workload
from meshwright.planner.search.runtime_rules import AllowsStrategy, rules_of_worker
from meshwright.planner.workload import TrainingJob


class Objective(StrEnum):
    """What the best plan has most, or least, of."""

    TIME = "time"
    """Least time per step."""
    COST = "cost"
    """Most tokens per GPU-hour."""
    GPUS = "gpus"
    """Fewest GPUs that hold the model; of those, the least time."""
    ROBUST = "robust"
    """Least time per step after one node is lost and the replicas on it are gone."""


@dataclass(frozen=True, slots=True)
class Techniques:
    """What a runtime can do. A search proposes nothing else."""

    schedules: tuple[PipelineSchedule, ...] = SEARCHED_SCHEDULES
    virtual_stages: tuple[int, ...] = (2, 4)
    """Chunks to try with schedules that take more than one."""
    context: tuple[ContextMethod, ...] = (ContextMethod.RING_ZIG_ZAG, ContextMethod.ULYSSES, ContextMethod.ALL_GATHER)
    """Empty where the runtime has no context parallelism."""
    expert: bool = True
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    checkpointing: tuple[ActivationCheckpointing, ...] = (
        ActivationCheckpointing.NONE,
        ActivationCheckpointing.SELECTIVE,
        ActivationCheckpointing.FULL,
        ActivationCheckpointing.SQRT,
    )
    """In order of what they cost."""
    offload: tuple[OptimizerOffload, ...] = (OptimizerOffload.NONE, OptimizerOffload.CPU, OptimizerOffload.FILE)
    uneven_split: bool = True
    """Whether stages may have any number of layers."""
    ties_over_stages: bool = True
    """Whether the first and the last stage may share one table."""
    pads_vocabulary: bool = True
    """Whether a vocabulary is padded to a multiple of the tensor-parallel degree."""
    replicates_kv_heads: bool = True
    """Whether there may be more tensor-parallel ranks than key-value heads."""
    runs: AllowsStrategy | None = None
    """Which combinations the runtime executes; every one where left out."""

    def allow(self, work: Workload, strategy: Strategy) -> bool:
        """Whether a layout may be proposed."""
        return self.runs is None or self.runs(work, strategy)


ALL_TECHNIQUES = Techniques()
MESHWRIGHT_TECHNIQUES = Techniques(
    offload=(OptimizerOffload.NONE, OptimizerOffload.CPU),
    pads_vocabulary=False,
    replicates_kv_heads=False,
    runs=rules_of_worker(),
)
"""What this repository's worker executes. Offload to files needs a path, which only a person can name."""


@dataclass(frozen=True, slots=True)
class Pins:
    """What is already decided; None for what the search decides."""

    tensor: int | None = None
    sequence_parallel: bool | None = None
    context: int | None = None
    context_method: ContextMethod | None = None
    pipeline: int | None = None
    schedule: PipelineSchedule | None = None
    virtual_stages: int | None = None
    expert: int | None = None
    data: int | None = None
    zero_stage: int | None = None
    micro_batch_size: int | None = None
    micro_batches: int | None = None
    checkpointing: ActivationCheckpointing | None = None


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """One search.

    Without `job` every degree that `pins` leaves open is free, and the objective decides. With it the choices of the
    job stand, its layouts are tried in order of preference, and only layouts with as many GPUs as the first that fits
    are compared by time: see `order_of_preference`.

    Raises:
        ValueError: there is no GPU to plan for, `usable` is not a fraction, or there is neither machine nor job.
    """

    work: Workload
    machine: Machine | None
    """None if the cost model knows none of the GPUs: then the first layout in order of preference that fits is taken.
    """
    gpus: int
    """As many as the plan may use."""
    objective: Objective = Objective.TIME
    techniques: Techniques = ALL_TECHNIQUES
    pins: Pins = field(default_factory=Pins)
    fixed: Strategy = Strategy()
    """What the job decides beside what is searched: number formats, offloading, memory options."""
    gpus_per_worker: int = 1
    """Tensor-parallel groups fill workers or share them evenly."""
    usable: float = USABLE_FRACTION
    """Part of a GPU's memory that the estimate may fill."""
    max_tensor: int | None = None
    """Limit of the tensor-parallel degree; the innermost domain's GPUs where left out."""
    job: TrainingJob | None = None
    """The job whose schedule, split, virtual stages and savings stand where its spec states them."""
    limits: ClusterLimits | None = None
    """GPUs by memory, where they differ; those of `machine` where left out."""
    world_size: int | None = None
    """The number of GPUs of every layout; any up to `gpus` where left out."""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"`gpus` must be at least 1, not {self.gpus}")
        if not 0 < self.usable <= 1:
            raise ValueError(f"`usable` must be above 0 and at most 1, not {self.usable}")
        if self.gpus_per_worker < 1:
            raise ValueError(f"`gpus_per_worker` must be at least 1, not {self.gpus_per_worker}")
        if self.machine is None and self.job is None:
            raise ValueError("`machine` or `job` must be set: without either nothing says how much memory is used")

    @property
    def domain(self) -> int:
        """The widest tensor-parallel group to try."""
        return self.max_tensor or self.required_machine.fabric.domain

    @property
    def node(self) -> int:
        """GPUs of one node: what one failure takes."""
        return self.required_machine.gpu.node

    @property
    def required_machine(self) -> Machine:
        """The machine.

        Raises:
            ValueError: there is none, so nothing has a price.
        """
        if self.machine is None:
            raise ValueError("`machine` must be set to estimate a step's time")
        return self.machine

    @property
    def pinned_job(self) -> TrainingJob:
        """The job whose choices stand.

        Raises:
            ValueError: there is none.
        """
        if self.job is None:
            raise ValueError("`job` must be set for an order of preference")
        return self.job

    @property
    def runtime(self) -> Framework:
        """The framework whose memory is estimated."""
        if self.job is not None:
            return self.job.runtime
        return self.required_machine.runtime

    @property
    def order_of_preference(self) -> bool:
        """Whether layouts are tried in a fixed order, and the first that fits determines the number of GPUs.

        The order is fewest stages, then fewest tensor-parallel ranks, then fewest parts of the experts. A
        tensor-parallel group communicates in every layer, but over NVLink. A pipeline communicates little, but idles
        (p - 1) / (m + p - 1) of the time (PipeDream-Flush, arXiv 2006.09503): a replica has one stage if the model fits
        in an NVLink domain.
        """
        return self.job is not None

    def memory_limit(self, gpus: int) -> float:
        """Bytes that an estimate may fill on each of `gpus` GPUs."""
        if self.limits is not None:
            return self.limits.memory_for(gpus)
        return self.usable * self.required_machine.gpu.memory
