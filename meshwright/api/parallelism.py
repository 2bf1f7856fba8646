"""`spec.parallelism`: how one replica of the model is split."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from meshwright.api.base import ApiModel
from meshwright.api.data_parallel import DataParallelEngine, DataParallelSpec, DataParallelStrategy, Degree


class PipelineSchedule(StrEnum):
    """The order in which a pipeline runs its micro-batches."""

    NAIVE = "Naive"
    GPIPE = "GPipe"
    ONE_F_ONE_B = "1F1B"
    INTERLEAVED = "Interleaved1F1B"
    LOOPED_BFS = "LoopedBFS"
    ZB_H1 = "ZBH1"
    ZB_H2 = "ZBH2"
    ZB_V = "ZBV"
    AUTOMATIC = "Automatic"
    DUAL_PIPE = "DualPipe"
    DUAL_PIPE_V = "DualPipeV"
    PIPEDREAM = "PipeDream"
    PIPEDREAM_2BW = "PipeDream2BW"

    @classmethod
    def named(cls, name: str) -> PipelineSchedule:
        """The value with this name. A schedule from outside this package has none and gets a new one here.

        `parallelism.schedule` accepts the new value. The CRD does not, because it lists only the values above.
        """
        try:
            return cls(name)
        except ValueError:
            pass
        value = str.__new__(cls, name)
        value._name_, value._value_ = name, name
        _ADDED_SCHEDULES[name] = value
        return value

    @classmethod
    def _missing_(cls, value: object) -> PipelineSchedule | None:
        return _ADDED_SCHEDULES.get(value) if isinstance(value, str) else None


_ADDED_SCHEDULES: dict[str, PipelineSchedule] = {}


class StageBalance(StrEnum):
    """What is distributed evenly over the stages of a pipeline."""

    LAYERS = "Layers"
    FLOPS = "Flops"
    MEASURED = "Measured"


class ContextMethod(StrEnum):
    """How the ranks of a context group compute attention."""

    RING = "Ring"
    """Keys and values move around the ring of ranks (arXiv 2310.01889). Each rank has consecutive tokens."""
    RING_ZIG_ZAG = "RingZigZag"
    """The same, but each rank has an early and a late part, so that causal attention takes all ranks the same time."""
    ULYSSES = "Ulysses"
    """All-to-all from tokens to heads and back (arXiv 2309.14509)."""
    ALL_GATHER = "AllGather"
    """Keys and values are gathered (Llama 3, arXiv 2407.21783, section 3.3.2)."""
    RING_ULYSSES = "RingUlysses"
    """All-to-all inside groups of neighbors, a ring across them (USP, arXiv 2405.07719)."""


class ExpertDispatch(StrEnum):
    """How tokens get to their experts."""

    PER_EXPERT = "PerExpert"
    """A copy for each expert, in as many rows as there are."""
    PADDED = "Padded"
    """A copy for each expert, in rows for the full capacity of each: all sizes are known beforehand."""
    ONCE_PER_NODE = "OncePerNode"
    """One copy for each node, which sends it on to its experts (DeepSeek-V3, arXiv 2412.19437, section 3.2.2)."""


ASSUMED_CONTEXT = 1
"""The context degree that rules assume until the planner has chosen one."""

ASSUMED_SCHEDULE = PipelineSchedule.ONE_F_ONE_B
"""The schedule that rules assume until the planner has chosen one."""

ASSUMED_CONTEXT_METHOD = ContextMethod.RING_ZIG_ZAG
"""The context method that rules assume until the planner has chosen one."""

ASSUMED_ZERO_STAGE = 0
"""The ZeRO stage that rules assume until the planner has chosen one."""


_ENGINE_OF_STAGE = {
    0: DataParallelEngine.ALL_REDUCE,
    1: DataParallelEngine.FLAT,
    2: DataParallelEngine.FSDP,
    3: DataParallelEngine.FSDP,
}


class ParallelismSpec(ApiModel):
    """How one replica of the model is split. The planner chooses what is left out."""

    tensor: Degree | None = None
    """Tensor-parallel degree: every layer is split over this many GPUs of one NVLink domain."""
    pipeline: Degree | None = None
    """Pipeline-parallel degree: number of stages the layers are split into."""
    expert: Degree | None = None
    """Expert-parallel degree: the experts of a mixture are spread over this many of the ranks that have the same dense
    parameters. Must divide `replicas` times `context`, and `model.mixture.experts`; 1 without a mixture."""
    sequence: bool = True
    """Megatron sequence parallelism: norms and residuals split along the sequence inside a tensor-parallel group."""
    expert_tensor: bool = True
    """Whether `tensor` splits experts too. If false, each GPU of a tensor group has full experts and routes its own
    positions: fewer collectives, and larger matrix products of narrow experts. False needs `sequence: true` and no
    `training.fp8`."""
    expert_dispatch: ExpertDispatch | None = None
    """How tokens get to their experts. Experimental, except for the default `PerExpert`. `Padded`: rows for the full
    capacity, so that the host does not wait for sizes. `OncePerNode`: a token crosses the network once per node."""
    tensor_overlap: bool = False
    """Asynchronous tensor parallelism (10.1145/3567955.3567959): sends between neighbors, during matrix products,
    replace the collectives of `sequence`. Needs `tensor` of at least 2, `sequence: true`, and no `training.fp8` and
    `training.lora`."""
    context: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Context-parallel degree: number of GPUs that share the tokens of each sequence. Defaults to 1, or the smallest
    degree with which a layout fits. `training.sequenceLength` must be at least twice `context` times `tensor`; with
    `Ring` and `Ulysses` once."""
    context_method: ContextMethod | None = None
    """How the GPUs of a context group compute attention. Defaults to `RingZigZag`, or to `Ulysses` or `AllGather` if
    that fits and is estimated to be more than 1% faster. `RingZigZag`: keys and values move around the ring of GPUs,
    with even work for causal attention. `Ring`: the same with consecutive tokens. `Ulysses`: GPUs exchange tokens for
    heads. `AllGather`: keys and values are gathered. `RingUlysses`: groups of `ulysses` GPUs exchange heads, in a ring.
    """
    ulysses: Degree | None = None
    """Number of neighbors that exchange heads. Required with `contextMethod: RingUlysses`, and only allowed then. Must
    divide `context`; times `tensor` it must divide `model.heads`."""
    schedule: PipelineSchedule | None = None
    """Order in which a pipeline runs its micro-batches. Defaults to `1F1B`, or to a synchronous schedule that fits and
    is estimated to be more than 1% faster. `Naive`: one micro-batch at a time. `GPipe`, `1F1B` (PipeDream-Flush),
    `Interleaved1F1B`, `LoopedBFS`. With a split backward pass: `ZBH1`, `ZBH2`, `ZBV`, and `Automatic`, searched for the
    measured times of the job's own stages. With overlapping forward and backward passes: `DualPipe`, `DualPipeV`.
    Without a flush, and so with stale weights: `PipeDream`, `PipeDream2BW`. docs/pipelines.md names the papers."""
    virtual_stages: Annotated[int, Field(ge=2, le=64)] | None = None
    """Number of stages of one rank. Only allowed with `Interleaved1F1B` and `LoopedBFS`. Defaults to 2, or to 4 if
    that fits and is estimated to be more than 1% faster. Rules assume 2 until it is chosen."""
    layer_split: Annotated[list[Annotated[int, Field(ge=1, le=1024)]], Field(min_length=1, max_length=1024)] | None = (
        None
    )
    """Number of layers of each stage, in the model's order. Must add up to `model.layers`. Defaults to a split by
    `stageBalance`. There are `pipeline` stages, times `virtualStages`, or times 2 with `ZBV` and `DualPipeV`."""
    stage_balance: StageBalance = StageBalance.LAYERS
    """What is distributed evenly over the stages. `Layers`: the number of layers. `Flops`: the work, with the last
    stage's output projection. `Measured` (Experimental): the same, and once the first steps are timed, their times: if
    that makes the slowest rank at least 3% faster, the ranks restart once, from a checkpoint, with other layers."""
    rematerialize: bool = False
    """Store only the input of each stage for a micro-batch, and recompute the stage before its backward pass (GPipe,
    arXiv 1811.06965, section 2.3)."""
    activation_limit: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Number of micro-batches whose activations a rank may store with the schedule `Automatic`. Defaults to `pipeline`,
    as with 1F1B."""
    micro_batches: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Number of micro-batches per replica and step: at least one for every stage. `training.globalBatchSize` must be
    divisible by `replicas` times this."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """Sharding over replicas (ZeRO, arXiv 1910.02054): 0 none, 1 optimizer state, 2 gradients too, 3 parameters too.
    Defaults to the lowest of the fastest stages that fit. Rules assume 0 until it is chosen, or a stage of
    `dataParallel.strategy`."""
    data_parallel: DataParallelSpec = DataParallelSpec()
    """How replicas stay equal."""

    @property
    def order(self) -> PipelineSchedule:
        """The schedule, or the one that rules assume if it is left out."""
        return self.schedule or ASSUMED_SCHEDULE

    @property
    def context_or_default(self) -> int:
        """The context degree, or the one that rules assume if it is left out."""
        return self.context or ASSUMED_CONTEXT

    @property
    def context_method_or_default(self) -> ContextMethod:
        """The context method, or the one that rules assume if it is left out."""
        return self.context_method or ASSUMED_CONTEXT_METHOD

    @property
    def zero_stage_or_default(self) -> int:
        """The ZeRO stage, or the one that rules assume if it is left out."""
        return ASSUMED_ZERO_STAGE if self.zero_stage is None else self.zero_stage

    @property
    def data_parallel_engine(self) -> DataParallelEngine:
        """The engine of `dataParallel.strategy`, or of `zeroStage` if it is left out."""
        if self.data_parallel.strategy is DataParallelStrategy.ZERO:
            return DataParallelEngine.FLAT
        return _ENGINE_OF_STAGE[self.zero_stage_or_default]
