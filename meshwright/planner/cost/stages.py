"""How a model's layers, embedding and output lie on the pipeline's ranks."""

from __future__ import annotations

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
    """What one pipeline rank holds."""

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
    """A layer, the larger kind where there are two, its experts' part included."""
    tables: float = 0.0
    """Of `dense`, embedding and output projection."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.dense + self.experts

    def shard(self, ranks: int, expert: int) -> float:
        """What each of `ranks` ranks keeps that share them; experts are split over `expert` of them already."""
        return self.dense / ranks + self.experts / max(1, ranks // expert)


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """A pipeline's ranks, and which of them differ. Itself a key of what a search finds again, by identity."""

    every: tuple[Stage, ...]
    distinct: tuple[Stage, ...]
    """Those that can be worst: of inner ranks with equal contents the first, which holds most in flight."""
    count: tuple[int, ...]
    """How many ranks are like each of `distinct`."""
    heaviest: tuple[Stage, ...]
    """Of `distinct`, without inner ranks that hold no more of anything than an inner rank before them."""


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
    return Stages(tuple(listed), distinct_stages, tuple(len(like) for like in kinds.values()), heaviest)


def _dominates(one: Stage, other: Stage) -> bool:
    """Whether rank `one` holds at least what inner rank `other` does: as many layers of either kind, no later."""
    inner = not (one.embedding or one.output or other.embedding or other.output)
    return inner and one.rank < other.rank and one.dense >= other.dense and one.mixtures >= other.mixtures


def stages_of(model: Architecture, choices: Strategy) -> Stages:
    """The pipeline's ranks in order.

    Raises:
        ValueError: there are more ranks than layers, or `layer_split` does not add up.
    """
    return _stages(model, choices.pipeline, choices.layer_split, *_split_key(choices))


def _split_key(choices: Strategy) -> tuple[PipelineSchedule, int]:
    """What of the schedule the stages depend on, the same for all that lay them alike."""
    kind = choices.schedule_kind
    if choices.pipeline == 1 or not (kind.virtual_stages or kind.v_shaped):
        return PipelineSchedule.ONE_F_ONE_B, 1
    like = PipelineSchedule.ZB_V if kind.v_shaped else PipelineSchedule.INTERLEAVED
    return like, choices.virtual_stages


@lru_cache(maxsize=65536)
def stage_parameters(model: Architecture, stage: Stage, tensor: int, expert_parts: int) -> StageParameters:
    """Parameters of one rank of `stage`; tables are split over the tensor-parallel group, norms are whole.

    `expert_parts` is how many ranks a layer's experts are split over, `Strategy.expert_parts`.
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
    """Parameters of the rank that has most of them."""
    each = [stage_parameters(model, stage, tensor, expert_parts) for stage in stages.distinct]
    return max(each, key=lambda parameters: parameters.total)


def _parameters_per_rank(counts: LayerCounts, tensor: int) -> float:
    return (counts.attention + counts.dense) / tensor + counts.latent + counts.router + counts.norms
