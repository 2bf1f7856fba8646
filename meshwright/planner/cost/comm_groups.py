"""The shape of every communication group of a layout, from the order in which ranks fill the machine.

To estimate the cost of a known placement, build `GroupSpans` from the real spans of its groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import gcd, prod

from meshwright.planner.cost.fabric import Fabric, Span
from meshwright.planner.cost.strategy import Strategy


class RankOrder(StrEnum):
    """The order in which ranks fill the dimensions. Tensor is always innermost, context next."""

    PIPELINE_INNER = "pipeline before data"
    """Meshwright and Llama 3: the stages of a replica have consecutive ranks."""
    DATA_INNER = "data before pipeline"
    """Megatron-LM: the replicas of a stage have consecutive ranks."""


@dataclass(frozen=True, slots=True)
class GroupSpans:
    """Spans of the groups of each dimension."""

    tensor: Span
    context: Span
    expert: Span
    """Ranks that the experts are distributed over."""
    shard_ranks: Span
    """Ranks with the same dense parameters."""
    expert_shard_ranks: Span
    """Ranks with the same experts."""
    pipeline_level: int
    """Level that two neighboring stages share."""
    pipeline: Span


@lru_cache(maxsize=65536)
def _group_spans(
    tensor: int, context: int, pipeline: int, data: int, expert: int, order: RankOrder, fabric: Fabric
) -> GroupSpans:
    inner = tensor * context
    stage_stride = inner if order is RankOrder.PIPELINE_INNER else inner * data
    data_stride = inner * pipeline if order is RankOrder.PIPELINE_INNER else inner
    from_context = gcd(expert, context)
    from_data = expert // from_context
    neighbor_level = next(
        (index for index, level in enumerate(fabric.levels) if level.gpus // stage_stride >= 2), len(fabric.levels) - 1
    )
    return GroupSpans(
        tensor=_span_of(((tensor, 1),), fabric),
        context=_span_of(((context, tensor),), fabric),
        expert=_span_of(((from_context, tensor), (from_data, data_stride)), fabric),
        shard_ranks=_span_of(((context, tensor), (data, data_stride)), fabric),
        expert_shard_ranks=_span_of(
            ((context // from_context, tensor * from_context), (data // from_data, data_stride * from_data)), fabric
        ),
        pipeline_level=neighbor_level,
        pipeline=_span_of(((pipeline, stage_stride),), fabric),
    )


def group_spans(strategy: Strategy, fabric: Fabric, order: RankOrder) -> GroupSpans:
    """The spans of the groups if ranks fill domains in order, without gaps."""
    return _group_spans(
        strategy.tensor, strategy.context, strategy.pipeline, strategy.data, strategy.expert, order, fabric
    )


def _span_of(dimensions: tuple[tuple[int, int], ...], fabric: Fabric) -> Span:
    """The span of a group made of (size, stride) dimensions."""
    size = prod(count for count, _ in dimensions)
    members = [
        min(size, prod(max(1, min(count, level.gpus // stride)) for count, stride in dimensions))
        for level in fabric.levels
    ]
    members[-1] = size
    return Span(tuple(members))
