"""The stages of each pipeline rank, their layers, and the order in which the rank runs them.

Planner, validation and worker share these functions from the fields of `parallelism` to a schedule and a split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshwright.api.parallelism import ParallelismSpec, PipelineSchedule, StageBalance
from meshwright.layout import split_layers
from meshwright.models.architecture import Architecture
from meshwright.schedules.actions import Schedule
from meshwright.schedules.flop_costs import layer_costs, output_costs, stage_costs
from meshwright.schedules.multi_stage_partition import partition_over_ranks
from meshwright.schedules.registry import kind_of
from meshwright.schedules.schedule import PipelineShape
from meshwright.schedules.simulator import UNIT_COSTS, ActionCosts

DEFAULT_VIRTUAL_STAGES = 2


def stages_per_rank(parallelism: ParallelismSpec, ranks: int) -> int:
    """The number of the model's stages on one of `ranks` pipeline ranks, on average."""
    if ranks == 1:
        return 1
    return kind_of(parallelism.order).stages_per_rank(parallelism.virtual_stages or DEFAULT_VIRTUAL_STAGES)


def stage_ranks(parallelism: ParallelismSpec, ranks: int) -> list[int]:
    """The pipeline rank of each of the model's stages. In a bidirectional pipeline two ranks have the same stages; this
    is the first.
    """
    stages = ranks * stages_per_rank(parallelism, ranks)
    if kind_of(parallelism.order).folded:
        return [min(stage, stages - 1 - stage) for stage in range(stages)]
    return [stage % ranks for stage in range(stages)]


def activation_limit(parallelism: ParallelismSpec, ranks: int) -> int:
    """Micro-batches whose activations a rank may store with `Automatic`. Defaults to the number of 1F1B."""
    return parallelism.activation_limit or ranks


def schedule_of(
    parallelism: ParallelismSpec,
    ranks: int,
    micro_batches: int,
    costs: ActionCosts | Sequence[ActionCosts] = UNIT_COSTS,
) -> Schedule:
    """The order of one step.

    Args:
        parallelism: has the schedule.
        ranks: pipeline ranks.
        micro_batches: number of micro-batches of one step.
        costs: of every stage, or one for each stage, for schedules that are searched.

    Raises:
        ValueError: the schedule does not exist for these numbers; the message has the reason.
    """
    kind = kind_of(parallelism.order if ranks > 1 else PipelineSchedule.ONE_F_ONE_B)
    chunks = stages_per_rank(parallelism, ranks)
    return kind.generate(PipelineShape(ranks, micro_batches, chunks, parallelism.activation_limit), costs)


def layers_of_stages(parallelism: ParallelismSpec, ranks: int, model: Architecture, length: int) -> list[range]:
    """The consecutive layers of each stage, in the model's order.

    Args:
        parallelism: has schedule, `layerSplit` and `stageBalance`, which the split depends on.
        ranks: pipeline ranks.
        model: the model.
        length: tokens of a sequence.

    Raises:
        ValueError: there are more stages than layers, or `layerSplit` does not add up.
    """
    stages = ranks * stages_per_rank(parallelism, ranks)
    split = parallelism.layer_split
    if split is not None:
        if len(split) != stages or sum(split) != model.layers:
            raise ValueError(
                f"`parallelism.layerSplit` must give each of {stages} stages its part of `model.layers: {model.layers}`"
            )
        return _ranges(split)
    if parallelism.stage_balance is not StageBalance.LAYERS:
        ranks_of_stages = tuple(stage_ranks(parallelism, ranks))
        return _ranges(_balanced_by_flops(model, length, ranks_of_stages, parallelism.rematerialize))
    return split_layers(model.layers, stages)


@lru_cache(maxsize=256)
def _balanced_by_flops(
    model: Architecture, length: int, ranks_of_stages: tuple[int, ...], recomputes: bool
) -> tuple[int, ...]:
    """Layers of each stage by the costs that `stage_costs` adds up."""
    costs = [layer_costs(model, length, layer, recomputes=recomputes).total for layer in range(model.layers)]
    return partition_over_ranks(costs, ranks_of_stages, last=output_costs(model, recomputes=recomputes).total)


def _ranges(sizes: tuple[int, ...] | list[int]) -> list[range]:
    bounds = [sum(sizes[:stage]) for stage in range(len(sizes) + 1)]
    return [range(first, last) for first, last in zip(bounds, bounds[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """A pipeline: its schedule, its layers, and the ranks of its stages."""

    schedule: Schedule
    layers: tuple[range, ...]
    """Of each stage."""

    def stages(self, rank: int) -> list[int]:
        """The stages of a rank, in the model's order."""
        return sorted({action.stage for action in self.schedule.actions(rank)})

    def ranks_of_stage(self, stage: int) -> list[int]:
        """The ranks of a stage: two in a bidirectional pipeline, else one."""
        return [rank for rank in range(len(self.schedule.ranks)) if stage in self.stages(rank)]


def pipeline_layout(
    parallelism: ParallelismSpec, ranks: int, micro_batches: int, model: Architecture, length: int
) -> PipelineLayout:
    """The pipeline of a run. `Automatic` is searched with the counted operations of the model's stages. This order is
    used until the ranks have measured their times (`schedules.measured_costs`).

    Raises:
        ValueError: the layers cannot be split, or the schedule cannot be made for these numbers.
    """
    layers = layers_of_stages(parallelism, ranks, model, length)
    costs = stage_costs(model, length, layers, recomputes=parallelism.rematerialize)
    return PipelineLayout(schedule_of(parallelism, ranks, micro_batches, costs), tuple(layers))
