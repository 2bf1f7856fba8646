"""The input of a search: the work, the hardware, the techniques and the objective."""

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
    """What the search optimizes."""

    TIME = "time"
    """Minimum time per step."""
    COST = "cost"
    """Most tokens per GPU-hour."""
    GPUS = "gpus"
    """Fewest GPUs with which the model fits, then minimum time per step."""
    ROBUST = "robust"
    """Minimum time per step after one node and the replicas on it are lost."""


@dataclass(frozen=True, slots=True)
class Techniques:
    """The techniques of a runtime. A search proposes no others."""

    schedules: tuple[PipelineSchedule, ...] = SEARCHED_SCHEDULES
    virtual_stages: tuple[int, ...] = (2, 4)
    """Numbers of chunks to try with schedules that have several."""
    context: tuple[ContextMethod, ...] = (ContextMethod.RING_ZIG_ZAG, ContextMethod.ULYSSES, ContextMethod.ALL_GATHER)
    """Empty if the runtime has no context parallelism."""
    expert: bool = True
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    checkpointing: tuple[ActivationCheckpointing, ...] = (
        ActivationCheckpointing.NONE,
        ActivationCheckpointing.SELECTIVE,
        ActivationCheckpointing.FULL,
        ActivationCheckpointing.SQRT,
    )
    """In the order of their cost."""
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
    """Which strategies the runtime runs. None for all."""

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
"""What Meshwright's runtime runs. Offload to files is not searched: it needs a path, which the user sets."""


@dataclass(frozen=True, slots=True)
class Pins:
    """Decisions that are fixed. None for those that the search makes."""

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

    The objective decides all degrees that `pins` leaves open. With `job`, the fields that the job states are kept. If
    the job also fixes its replicas, its layouts are tried in order of preference, and only layouts with as many GPUs as
    the first that fits are compared by time: see `order_of_preference`.

    Raises:
        ValueError: there is no GPU to plan for, `usable` is not a fraction, or there is neither machine nor job.
    """

    work: Workload
    machine: Machine | None
    """None if no GPU is in the catalog: then the first layout in order of preference that fits is taken."""
    gpus: int
    """Maximum number of GPUs of a plan."""
    objective: Objective = Objective.TIME
    techniques: Techniques = ALL_TECHNIQUES
    pins: Pins = field(default_factory=Pins)
    fixed: Strategy = Strategy()
    """Fields that are not searched: number formats, offloading, memory options."""
    gpus_per_worker: int = 1
    """A tensor-parallel group has full workers, or a worker has full groups."""
    usable: float = USABLE_FRACTION
    """Fraction of a GPU's memory that an estimate may fill."""
    max_tensor: int | None = None
    """Maximum tensor-parallel degree. Defaults to the GPUs of the innermost domain."""
    job: TrainingJob | None = None
    """The job whose schedule, layer split, virtual stages and memory savings are kept if its spec states them."""
    limits: ClusterLimits | None = None
    """GPUs by memory, if they differ. Defaults to those of `machine`."""
    pipelines_in_domain: bool = True
    """Whether a pipeline may be tried for a replica that is not larger than an NVLink domain."""
    world_size: int | None = None
    """Number of GPUs of every layout. Defaults to any number up to `gpus`."""
    fewest_replicas: int = 1
    """The `elastic.minReplicas` of a job whose replicas are not pinned."""
    most_replicas: int | None = None
    """Its `elastic.maxReplicas`."""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"`gpus` must be at least 1, not {self.gpus}")
        if not 0 < self.usable <= 1:
            raise ValueError(f"`usable` must be above 0 and at most 1, not {self.usable}")
        if self.gpus_per_worker < 1:
            raise ValueError(f"`gpus_per_worker` must be at least 1, not {self.gpus_per_worker}")
        if self.machine is None and self.job is None:
            raise ValueError("`machine` or `job` must be set: memory cannot be estimated without either")

    def outside_elastic(self, strategy: Strategy) -> str:
        """Which bound of `elastic` the replicas of a strategy exceed. Empty if none."""
        if strategy.data < self.fewest_replicas:
            return f"has fewer replicas than `elastic.minReplicas` ({self.fewest_replicas})"
        if self.most_replicas is not None and strategy.data > self.most_replicas:
            return f"has more replicas than `elastic.maxReplicas` ({self.most_replicas})"
        return ""

    def allows(self, strategy: Strategy) -> bool:
        """Whether a strategy may be proposed."""
        return not self.outside_elastic(strategy) and self.techniques.allow(self.work, strategy)

    @property
    def domain(self) -> int:
        """The largest tensor-parallel degree to try."""
        return self.max_tensor or self.required_machine.fabric.domain

    @property
    def node(self) -> int:
        """GPUs of one node, which one failure makes unavailable."""
        return self.required_machine.gpu.node

    @property
    def required_machine(self) -> Machine:
        """The machine.

        Raises:
            ValueError: there is none, so no cost can be estimated.
        """
        if self.machine is None:
            raise ValueError("`machine` must be set to estimate a step's time")
        return self.machine

    @property
    def pinned_job(self) -> TrainingJob:
        """The job whose stated fields are kept.

        Raises:
            ValueError: there is none.
        """
        if self.job is None:
            raise ValueError("`job` must be set for an order of preference")
        return self.job

    @property
    def recomputations(self) -> tuple[ActivationCheckpointing, ...]:
        """The recomputations to choose from, in the order of their cost."""
        pinned = self.pins.checkpointing
        return self.techniques.checkpointing if pinned is None else (pinned,)

    @property
    def least_memory_schedule(self) -> PipelineSchedule:
        """The pinned schedule, or the one that stores the fewest activations."""
        schedules, default = self.techniques.schedules, PipelineSchedule.ONE_F_ONE_B
        return self.pins.schedule or (default if default in schedules else schedules[0])

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
        in an NVLink domain. If the number of replicas is open, the machine decides, and this order only without one.
        """
        return self.job is not None and (self.pins.data is not None or self.machine is None)

    def memory_limit(self, gpus: int) -> float:
        """Bytes that an estimate may fill on each of `gpus` GPUs."""
        if self.limits is not None:
            # A budget is not shrunk to the cluster: GPUs that are missing are assumed to be like its smallest.
            return self.limits.memory_for(min(gpus, self.limits.gpus) if self.pins.data is None else gpus)
        return self.usable * self.required_machine.gpu.memory
