"""Everything that a plan decides, and the workload that it decides it for: the arguments of an estimate."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import isqrt
from typing import NamedTuple

from meshwright.api.parallelism import ContextMethod, PipelineSchedule
from meshwright.api.precision import Precision
from meshwright.api.training import ActivationCheckpointing, OptimizerOffload
from meshwright.figures import counted
from meshwright.layout import Layout, split_layers
from meshwright.models.architecture import Architecture
from meshwright.schedules.registry import kind_of, schedules_where
from meshwright.schedules.schedule import PipelineScheduleKind, PipelineShape


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """The fields of `training` and `parallelism` that affect memory."""

    master_weights: bool = True
    """Whether parameters are fp32 if the compute format is not."""
    master_gradient: float | None = None
    """Bytes of a gradient with sharded master weights. None without them."""
    muon: bool = False
    """Whether matrices of layers have one moment (Muon) instead of AdamW's two."""
    flat: bool = False
    """Whether ZeRO stage 2 is on flat shards (`dataParallel.strategy: ZeRO`), not FSDP's."""
    shard_size: int | None = None
    """Number of replicas that share one set of shards (HSDP). None for all replicas."""
    reshard_size: int | None = None
    """Number of ranks that share a gathered copy between the forward and the backward pass (hpZ)."""
    gathers_fp8: bool = False
    """Whether FSDP gathers the weights of fp8 products in fp8 (`training.fp8.allGather`)."""
    reduces_each: bool = False
    """Whether FSDP reduces gradients in each micro-batch (`dataParallel.reduceEveryMicroBatch`)."""
    bucket: int = 16777216
    """Number of gradient elements that one collective sums."""
    feedback: int = 0
    """Number of stored copies of the error feedback of compression."""
    islands: int = 1
    """Groups of replicas that train separately. ZeRO shards within one."""
    outer: float = 0.0
    """Values that the outer optimizer stores for each parameter that a rank updates."""
    loss_chunk: int | None = None
    """Number of tokens whose logits are in memory at once. None for all tokens of a micro-batch."""
    rematerialize: bool = False
    """Whether only a stage's input is stored, and the stage is recomputed."""
    activation_limit: int | None = None
    """Micro-batches that a rank may store with an automatic schedule. Defaults to the pipeline's ranks."""
    parameter_offload: bool = False
    """Whether shards of parameters, gradients and optimizer state are in main memory."""
    adapters: tuple[int, int] | None = None
    """Parameters of the low-rank adapters of a dense layer and of a mixture. None if everything is trained."""

    def adapters_of(self, dense: int, mixtures: int) -> int:
        """Parameters of the adapters of the given numbers of layers. 0 if everything is trained."""
        if self.adapters is None:
            return 0
        return dense * self.adapters[0] + mixtures * self.adapters[1]


DEFAULT_MEMORY_OPTIONS = MemoryOptions()


SEARCHED_SCHEDULES = schedules_where(lambda kind: kind.searched)
"""Schedules that a search tries: synchronous ones with a closed formula."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one optimizer step, independent of the layout."""

    model: Architecture
    sequence_length: int
    global_batch: int
    """Sequences per step."""
    causal: bool = True
    """Whether attention skips masked positions. (Flash attention does; a stored score matrix does not.)"""

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.sequence_length * self.global_batch


@dataclass(frozen=True, slots=True)
class Strategy(Layout):
    """One way to run a job: its degrees, and everything else that a plan decides or that its cost depends on.

    Raises:
        ValueError: a number is below 1, or `expert` does not divide `data x context`.
    """

    sequence_parallel: bool = True
    tensor_overlap: bool = False
    """Whether products hide sequence parallelism's collectives, in a runtime with that option."""
    context_method: ContextMethod = ContextMethod.RING_ZIG_ZAG
    ulysses: int = 1
    """With `RingUlysses`, the number of neighbors of a context group that exchange heads."""
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    virtual_stages: int = 1
    """Model chunks of one pipeline rank."""
    layer_split: tuple[int, ...] | None = None
    """Number of layers of each pipeline rank or, if ranks have several stages, of each stage in the model's order.

    None for an even split, where the first stages get the remainder.
    """
    expert_tensor: bool = True
    """Whether tensor parallelism splits the widths of experts."""
    zero_stage: int = 0
    """What is sharded over `data x context`. 0: nothing, 1: optimizer state, 2: gradients too, 3: parameters too."""
    micro_batch_size: int = 1
    micro_batches: int = 1
    checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE
    checkpoint_every: int = 1
    """With `EveryK`: number of layers in one recomputed group."""
    checkpoint_layers: int | None = None
    """With `Full`: number of layers of a stage that recompute; the others store everything. None for every layer."""
    optimizer_offload: OptimizerOffload = OptimizerOffload.NONE
    activation_offload: bool = False
    """Whether activations are stored in main memory until the backward pass."""
    precision: Precision = Precision.BF16
    fp8: bool = False
    """Whether the layers' matrix products are in fp8."""
    settings: MemoryOptions = DEFAULT_MEMORY_OPTIONS

    def __post_init__(self) -> None:
        Layout.__post_init__(self)
        if min(self.virtual_stages, self.micro_batch_size, self.micro_batches, self.checkpoint_every) < 1:
            names = ("virtual_stages", "micro_batch_size", "micro_batches", "checkpoint_every")
            name = next(name for name in names if getattr(self, name) < 1)
            raise ValueError(f"`{name}` must be at least 1, not {getattr(self, name)}")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ValueError(f"`zero_stage` must be 0, 1, 2 or 3, not {self.zero_stage}")

    @property
    def shards_masters(self) -> bool:
        """Whether parameters are bf16, and ranks have fp32 master weights of only their rows."""
        return self.settings.master_gradient is not None and self.zero_stage > 0 and self.shard_ranks > 1

    @property
    def gradient_reductions(self) -> int:
        """Number of times that replicas reduce their gradients in a step: once, or with FSDP in each micro-batch."""
        return self.micro_batches if self.settings.reduces_each and self.zero_stage >= 2 else 1

    @property
    def schedule_kind(self) -> PipelineScheduleKind:
        """The schedule's declared properties."""
        return kind_of(self.schedule)

    @property
    def pipeline_shape(self) -> PipelineShape:
        """The sizes that the schedule is generated for."""
        return PipelineShape(self.pipeline, self.micro_batches, self.virtual_stages, self.settings.activation_limit)

    @property
    def layout(self) -> Layout:
        """Only the degrees."""
        return Layout(self.tensor, self.pipeline, self.data, self.context, self.expert)

    @property
    def expert_parts(self) -> int:
        """Number of ranks that a layer's experts are split over, by number and by width."""
        return self.expert * (self.tensor if self.expert_tensor else 1)

    def layers_of(self, layers: int) -> tuple[tuple[range, ...], ...]:
        """The consecutive layers of each stage of each pipeline rank.

        Raises:
            ValueError: `layer_split` does not add up, or a rank gets no layer.
        """
        ranks, split, v_shaped = self.pipeline, self.layer_split, self.schedule_kind.v_shaped
        stages = ranks * self.schedule_kind.stages_per_rank(self.virtual_stages)
        stage_ranks = [min(stage, stages - 1 - stage) if v_shaped else stage % ranks for stage in range(stages)]
        if split is not None and (len(split) not in (ranks, stages) or sum(split) != layers or min(split) < 0):
            raise ValueError(
                f"`layer_split` {split} must give each of {ranks} pipeline ranks, or each of their {stages} stages, "
                f"its part of {layers} layers"
            )
        if ranks > layers:
            raise ValueError(f"{counted(layers, 'layer')} cannot be split over {counted(ranks, 'pipeline rank')}")
        if split is not None and len(split) == stages:
            sizes = list(split)
        elif split is None and stages <= layers:
            sizes = [len(stage_layers) for stage_layers in split_layers(layers, stages)]
        else:
            totals = split if split is not None else [len(stage_layers) for stage_layers in split_layers(layers, ranks)]
            chunk_sizes = [_even_parts(total, stages // ranks) for total in totals]
            sizes = [chunk_sizes[pipeline_rank].pop(0) for pipeline_rank in stage_ranks]
        bounds = [0, *accumulate(sizes)]
        layers_by_rank: list[list[range]] = [[] for _ in range(ranks)]
        for stage, pipeline_rank in enumerate(stage_ranks):
            layers_by_rank[pipeline_rank].append(range(bounds[stage], bounds[stage + 1]))
        return tuple(tuple(stage_layers) for stage_layers in layers_by_rank)

    def recompute_group(self, layers: int) -> int:
        """Number of layers that are recomputed together from one stored input, on a rank with `layers` layers."""
        if self.checkpointing is ActivationCheckpointing.SQRT:
            return max(1, isqrt(layers))
        return self.checkpoint_every if self.checkpointing is ActivationCheckpointing.EVERY_K else 1


def matmul_bytes(strategy: Strategy | LayerStrategy) -> float:
    """Bytes per element of the inputs of a layer's matrix products."""
    return 1.0 if strategy.fp8 else strategy.precision.bytes


def _even_parts(total: int, parts: int) -> list[int]:
    size, extra = divmod(total, parts)
    return [size + (part < extra) for part in range(parts)]


class LayerStrategy(NamedTuple):
    """The choices that one layer's time depends on: the key of a search's cache."""

    tensor: int
    sequence_parallel: bool
    tensor_overlap: bool
    context: int
    context_method: ContextMethod
    ulysses: int
    expert: int
    expert_tensor: bool
    micro_batch_size: int
    precision: Precision
    fp8: bool

    @classmethod
    def of(cls, strategy: Strategy) -> LayerStrategy:
        """Return these fields of `strategy`."""
        return cls(
            strategy.tensor,
            strategy.sequence_parallel,
            strategy.tensor_overlap,
            strategy.context,
            strategy.context_method,
            strategy.ulysses,
            strategy.expert,
            strategy.expert_tensor,
            strategy.micro_batch_size,
            strategy.precision,
            strategy.fp8,
        )
