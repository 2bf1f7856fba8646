"""`spec.parallelism`: how one replica of the model is split."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from meshwright.api.base import ApiModel
from meshwright.api.data_parallel import DataParallelSpec, Degree


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
        """The value called `name`. A schedule from outside of this package, which has none, gets a new one here:
        `parallelism.schedule` accepts it, and the CRD, which lists the values above, does not.
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
    """What is dealt evenly to the stages of a pipeline."""

    LAYERS = "Layers"
    FLOPS = "Flops"


class ContextMethod(StrEnum):
    """How attention goes over the ranks that share a sequence."""

    RING = "Ring"
    """Keys and values go round (arXiv 2310.01889); each rank has consecutive tokens."""
    RING_ZIG_ZAG = "RingZigZag"
    """The same; each rank has an early and a late part, so that causal attention costs all alike."""
    ULYSSES = "Ulysses"
    """All-to-all from tokens to heads and back (arXiv 2309.14509)."""
    ALL_GATHER = "AllGather"
    """Keys and values are gathered (Llama 3, arXiv 2407.21783, section 3.3.2)."""
    RING_ULYSSES = "RingUlysses"
    """All-to-all inside groups of neighbours, a ring across them (USP, arXiv 2405.07719)."""


class ParallelismSpec(ApiModel):
    """How one replica of the model is split. What is left out the planner chooses."""

    tensor: Degree | None = None
    """Tensor-parallel degree: every layer split over this many GPUs of one NVLink domain."""
    pipeline: Degree | None = None
    """Pipeline-parallel degree: number of stages the layers are split into."""
    expert: Degree | None = None
    """Expert-parallel degree: the experts of a mixture are spread over this many of the ranks that hold the same dense
    parameters. Must divide `replicas` times `context`, and `model.mixture.experts`; 1 without a mixture."""
    sequence: bool = True
    """Megatron sequence parallelism: norms and residuals split along the sequence inside a tensor-parallel group."""
    expert_tensor: bool = True
    """Whether `tensor` splits the experts of a mixture too. With false each GPU of a tensor-parallel group holds them
    whole and routes its own positions, which saves the collectives around them and makes larger products of narrow
    experts. Needs `sequence: true` and no `training.fp8`."""
    tensor_overlap: bool = False
    """Asynchronous tensor parallelism (ASPLOS 2023, 10.1145/3567955.3567959): the collectives of `sequence` are taken
    apart into sends between neighbours, which run during the products around them. Needs `tensor` of at least 2,
    `sequence: true`, and no `training.fp8` and `training.lora`."""
    context: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Context-parallel degree: GPUs that share the tokens of each sequence. A replica has this many times as many.
    When left out: 1, or the fewest with which a layout fits. Rules about it take it for 1 until it is chosen.
    `training.sequenceLength` must be at least twice `context` times `tensor`; with `Ring` and `Ulysses` once."""
    context_method: ContextMethod = ContextMethod.RING_ZIG_ZAG
    """How attention goes over the GPUs of `context`. `RingZigZag`: keys and values go round them, causal work is even.
    `Ring`: the same with consecutive tokens. `Ulysses`: heads are exchanged for tokens; `context` times `tensor` must
    divide `model.heads`. `AllGather`: keys and values are gathered. `RingUlysses`: heads inside groups of `ulysses`,
    a ring across them."""
    ulysses: Degree | None = None
    """With `contextMethod: RingUlysses`, and only then: how many neighbours exchange heads; it divides `context`, and
    times `tensor` it divides `model.heads`."""
    schedule: PipelineSchedule | None = None
    """Order in which a pipeline runs its micro-batches. When left out: `1F1B`, or a synchronous one that is estimated
    to be faster by more than 2 % and fits; rules about it take it for `1F1B` until it is chosen. `Naive`: one at a
    time. `GPipe` (arXiv 1811.06965), `1F1B` (PipeDream-Flush, arXiv 2006.09503), `Interleaved1F1B` (arXiv 2104.04473),
    `LoopedBFS` (arXiv 2211.05953). Backward in halves: `ZBH1`, `ZBH2`, `Automatic` (arXiv 2401.10241; searched for the
    times of the job's own stages, which its first steps measure), `ZBV` (arXiv 2405.15362). Forward and backward
    overlapped: `DualPipe`, `DualPipeV` (arXiv 2412.19437). Without a flush, and so with stale weights: `PipeDream`
    (arXiv 1806.03377), `PipeDream2BW` (arXiv 2006.09503)."""
    virtual_stages: Annotated[int, Field(ge=2, le=64)] | None = None
    """Stages of one rank with `Interleaved1F1B` and `LoopedBFS`, the only schedules that allow it; 2 when left out."""
    layer_split: Annotated[list[Annotated[int, Field(ge=1, le=1024)]], Field(min_length=1, max_length=1024)] | None = (
        None
    )
    """Layers of each stage, in the model's order; must add up to `model.layers`. As `stageBalance` says when left
    out. There are `pipeline` stages, times `virtualStages`, or times 2 with `ZBV` and `DualPipeV`."""
    stage_balance: StageBalance = StageBalance.LAYERS
    """What stages have the same of. `Layers`: their number, the first stages taking what is left over. `Flops`: the
    work, of dense layers, of mixtures and of the last stage's output projection each its own."""
    rematerialize: bool = False
    """Keep only the input of each stage for a micro-batch and compute the stage again before its backward pass (GPipe,
    arXiv 1811.06965, section 2.3)."""
    activation_limit: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Micro-batches whose activations a rank may hold with the schedule `Automatic`; `pipeline`, which is what 1F1B
    holds, when left out."""
    micro_batches: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Micro-batches per replica and step: at least one for every stage. `training.globalBatchSize` must be divisible by
    `replicas` times this."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """Sharding over replicas (ZeRO, arXiv 1910.02054): 0 none, 1 optimizer state, 2 gradients too, 3 parameters too."""
    data_parallel: DataParallelSpec = DataParallelSpec()
    """How replicas are kept equal."""

    @property
    def order(self) -> PipelineSchedule:
        """The schedule; the one that is taken for it where it is left out."""
        return self.schedule or PipelineSchedule.ONE_F_ONE_B

    @property
    def context_or_default(self) -> int:
        """The context degree; 1 where it is left out."""
        return self.context or 1
