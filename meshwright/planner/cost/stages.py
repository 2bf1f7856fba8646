"""How a model's layers, embedding and output are distributed over the pipeline's ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from meshwright.api.parallelism import PipelineSchedule
from meshwright.models.architecture import Architecture
from meshwright.models.counts import (
    LayerCounts,
    embedding_parameters,
    layer_counts,
    output_parameters,
    prediction_parameters,
)
from meshwright.planner.cost.strategy import Strategy
from meshwright.schedules.registry import kind_of


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers of one pipeline rank."""

    rank: int
    layers: int
    mixtures: int
    """Of `layers`, those with a mixture of experts."""
    embedding: bool
    output: bool

    @property
    def dense(self) -> int:
        """Layers with a dense feed-forward part."""
        return self.layers - self.mixtures


@dataclass(frozen=True, slots=True)
class StageParameters:
    """Parameters on each rank of a stage, before any sharding over replicas."""

    dense: float
    """Divided over the replicas by ZeRO."""
    experts: float
    """Divided over the experts' replicas by ZeRO."""
    largest_unit: float
    """The largest group that ZeRO-3 gathers at once: a layer, or a table."""
    layer: float = 0.0
    """Parameters of a layer, including experts. If there are two kinds of layers, of the larger one."""
    tables: float = 0.0
    """Of `dense`, embedding and output projection."""

    @property
    def total(self) -> float:
        """All parameters."""
        return self.dense + self.experts

    def shard(self, ranks: int, expert: int) -> float:
        """The shard of each of `ranks` ranks. Experts are already split over `expert` of them."""
        return self.dense / ranks + self.experts / max(1, ranks // expert)


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """A pipeline's ranks, and which of them differ. Its identity is a cache key of the search."""

    every: tuple[Stage, ...]
    distinct: tuple[Stage, ...]
    """The ranks that can be the worst. Of inner ranks with equal contents only the first, which has most in flight."""
    count: tuple[int, ...]
    """Number of ranks that are equal to each of `distinct`."""
    heaviest: tuple[Stage, ...]
    """`distinct` without inner ranks that have no more of any part than an earlier inner rank."""
    mirrored: tuple[tuple[int, int, int], ...] = ()
    """If micro-batches enter at both ends: (index in `distinct` of a rank's stage, of its mirrored stage, number of
    ranks with these two), each stage for half of the micro-batches. Empty if a rank has all of them."""


@lru_cache(maxsize=16384)
def _stages(
    model: Architecture, pipeline: int, split: tuple[int, ...] | None, schedule: PipelineSchedule, chunks: int
) -> Stages:
    layers_by_rank = Strategy(pipeline=pipeline, layer_split=split, schedule=schedule, virtual_stages=chunks).layers_of(
        model.layers
    )
    listed, last = [], 0 if kind_of(schedule).v_shaped else len(layers_by_rank) - 1
    kinds: dict[tuple[int, int, bool, bool], list[Stage]] = {}
    for rank, parts in enumerate(layers_by_rank):
        layers = sum(len(part) for part in parts)
        mixtures = sum(model.count_mixtures(part.start, part.stop) for part in parts)
        stage = Stage(rank, layers, mixtures, rank == 0, rank == last)
        kinds.setdefault((layers, mixtures, stage.embedding, stage.output), []).append(stage)
        listed.append(stage)
    distinct_stages = tuple(like[0] for like in kinds.values())
    heaviest = tuple(
        stage for stage in distinct_stages if not any(_dominates(other, stage) for other in distinct_stages)
    )
    mirrored: tuple[tuple[int, int, int], ...] = ()
    if kind_of(schedule).bidirectional:
        numbers = {stage.rank: number for number, like in enumerate(kinds.values()) for stage in like}
        both = Counter(tuple(sorted((numbers[rank], numbers[pipeline - 1 - rank]))) for rank in range(pipeline))
        mirrored = tuple((one, other, count) for (one, other), count in both.items())
    return Stages(tuple(listed), distinct_stages, tuple(len(like) for like in kinds.values()), heaviest, mirrored)


def _dominates(one: Stage, other: Stage) -> bool:
    """Whether rank `one` has at least as many layers of each kind as inner rank `other`, and is not later."""
    inner = not (one.embedding or one.output or other.embedding or other.output)
    return inner and one.rank < other.rank and one.dense >= other.dense and one.mixtures >= other.mixtures


def stages_of(model: Architecture, strategy: Strategy) -> Stages:
    """The pipeline's ranks in order.

    Raises:
        ValueError: there are more ranks than layers, or `layer_split` does not add up.
    """
    return _stages(model, strategy.pipeline, strategy.layer_split, *_split_key(strategy))


def _split_key(strategy: Strategy) -> tuple[PipelineSchedule, int]:
    """The part of the schedule that determines the stages. Equal for schedules with equal stages."""
    kind = strategy.schedule_kind
    if strategy.pipeline > 1 and kind.bidirectional:
        return PipelineSchedule.DUAL_PIPE, 1
    if strategy.pipeline == 1 or not (kind.virtual_stages or kind.v_shaped):
        return PipelineSchedule.ONE_F_ONE_B, 1
    like = PipelineSchedule.ZB_V if kind.v_shaped else PipelineSchedule.INTERLEAVED
    return like, strategy.virtual_stages


@lru_cache(maxsize=65536)
def stage_parameters(model: Architecture, stage: Stage, tensor: int, expert_parts: int) -> StageParameters:
    """Parameters of one rank of `stage`. Tables are split over the tensor-parallel group, norms are not.

    `expert_parts` is the number of ranks that a layer's experts are split over, `Strategy.expert_parts`.
    """
    dense = stage.dense * _parameters_per_rank(layer_counts(model, False), tensor)
    mixed = layer_counts(model, True)
    experts = stage.mixtures * mixed.experts / expert_parts
    dense += stage.mixtures * _parameters_per_rank(mixed, tensor)
    tables = 0.0
    if stage.embedding:
        tables += embedding_parameters(model) / tensor
    if stage.output:
        tables += 0.0 if model.tie_embeddings and stage.embedding else output_parameters(model) / tensor
        dense += model.hidden_size + model.prediction_layers * prediction_parameters(model) / tensor
    layer = (mixed.total if stage.mixtures else layer_counts(model, False).total) / tensor
    largest_unit_parameters = max(layer, embedding_parameters(model) / tensor if tables else 0.0)
    if stage.mixtures:
        layer = _parameters_per_rank(mixed, tensor) + mixed.experts / expert_parts
    return StageParameters(dense + tables, experts, largest_unit_parameters, layer, tables)


@lru_cache(maxsize=65536)
def fullest_stage(model: Architecture, stages: Stages, tensor: int, expert_parts: int) -> StageParameters:
    """Parameters of the rank with the most parameters."""
    each = [stage_parameters(model, stage, tensor, expert_parts) for stage in stages.distinct]
    return max(each, key=lambda parameters: parameters.total)


def _parameters_per_rank(counts: LayerCounts, tensor: int) -> float:
    return (counts.attention + counts.dense) / tensor + counts.latent + counts.router + counts.norms
