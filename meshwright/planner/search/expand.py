"""Filling a layout in: schedules, context methods, memory savings, and stages of equal time for the leaders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from meshwright.api.parallelism import ContextMethod, PipelineSchedule
from meshwright.api.training import ActivationCheckpointing, OptimizerOffload
from meshwright.layout import Layout
from meshwright.planner.cost.estimate import Estimate, estimate
from meshwright.planner.cost.memory import Memory, memory_within, model_states_fit
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.runtime_rules import allowed_schedules
from meshwright.planner.search.search_space import layouts, micro_batch_sizes
from meshwright.rules.context import heads_divide
from meshwright.schedules.flop_costs import layer_costs, output_costs
from meshwright.schedules.partition import partition_layers
from meshwright.schedules.registry import kind_of

MAX_ESTIMATED = 16
"""Numbers of micro-batches to price for one layout and schedule in order of preference; more only cost time."""


def strategy_of(request: SearchRequest, layout: Layout, size: int, **more: object) -> Strategy:
    """The layout of a shape with micro-batches of `size` sequences; `more` are further fields of `Strategy`."""
    sequence = request.pins.sequence_parallel
    return replace(
        request.fixed,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        data=layout.data,
        context=layout.context,
        expert=layout.expert,
        sequence_parallel=layout.tensor > 1 if sequence is None else sequence,
        micro_batch_size=size,
        micro_batches=request.work.global_batch // layout.data // size,
        **more,  # type: ignore[arg-type]
    )


def estimate_cost(request: SearchRequest, strategy: Strategy, memory: Memory | None = None) -> Estimate:
    """What a layout costs on the request's machine; `memory` is its account, where it is known already."""
    return estimate(request.work, strategy, request.required_machine, memory=memory)


def base_strategies(request: SearchRequest, layout: Layout, size: int) -> Iterator[Strategy]:
    """Every schedule and context method of a layout, with no memory saved yet."""
    stages = _zero_stages(request, layout.shard_ranks)
    for schedule, chunks in _schedules(request, layout, size):
        for method in _context_methods(request, layout):
            yield strategy_of(
                request,
                layout,
                size,
                schedule=schedule,
                virtual_stages=chunks,
                context_method=method,
                zero_stage=stages[min(1, len(stages) - 1)],
            )


def _zero_stages(request: SearchRequest, replicas: int) -> tuple[int, ...]:
    if request.pins.zero_stage is not None:
        return (request.pins.zero_stage,)
    stages = request.techniques.zero_stages
    return stages if replicas > 1 else stages[:1]


def _schedules(request: SearchRequest, layout: Layout, size: int) -> Iterator[tuple[PipelineSchedule, int]]:
    """(schedule, chunks) that the shape allows."""
    micro_batches = request.work.global_batch // layout.data // size
    for schedule, chunks in schedules_of(request, layout):
        if kind_of(schedule).accepts(layout.pipeline, micro_batches):
            yield schedule, chunks


def schedules_of(request: SearchRequest, layout: Layout) -> Iterator[tuple[PipelineSchedule, int]]:
    """(schedule, chunks) for which every stage of the layout has a layer."""
    pinned, techniques = request.pins, request.techniques
    if layout.pipeline == 1:
        yield pinned.schedule or PipelineSchedule.ONE_F_ONE_B, 1
        return
    layers = request.work.model.layers
    for schedule in (pinned.schedule,) if pinned.schedule else techniques.schedules:
        kind = kind_of(schedule)
        if kind.virtual_stages:
            counts = (pinned.virtual_stages,) if pinned.virtual_stages else techniques.virtual_stages
            yield from ((schedule, chunks) for chunks in counts if layers >= chunks * layout.pipeline)
        elif not kind.folded:
            yield schedule, 1
        elif layers >= 2 * layout.pipeline:
            yield schedule, 2


def _context_methods(request: SearchRequest, layout: Layout) -> Iterator[ContextMethod]:
    if layout.context == 1:
        yield ContextMethod.RING_ZIG_ZAG
        return
    pinned = request.pins.context_method
    model = request.work.model
    for method in (pinned,) if pinned else request.techniques.context:
        # Ulysses exchanges whole heads (arXiv 2309.14509): every rank needs its own.
        ranks = layout.context if method is ContextMethod.ULYSSES else 1
        if ranks == 1 or heads_divide(model.heads, model.kv_heads, layout.tensor, ranks):
            yield method


def memory_savings(request: SearchRequest, base: Strategy) -> Iterator[tuple[Strategy, Memory]]:
    """For each ZeRO stage the first recomputation that fits, and the last resort, offloading, where none does; with
    the account of its memory.

    A stage that fits without recomputation leaves nothing for the next stages to save, but ZeRO-1, which also shortens
    the optimizer, is always tried, and ZeRO-3, which also overlaps its traffic with the whole step, where the pipeline
    does not multiply it.
    """
    pins, techniques = request.pins, request.techniques
    stages = _zero_stages(request, base.shard_ranks)
    recompute = (pins.checkpointing,) if pins.checkpointing is not None else techniques.checkpointing
    fitted, whole = False, False
    for zero in stages:
        if whole and zero != 1 and (zero < 3 or base.pipeline > 1):
            continue
        stage = replace(base, zero_stage=zero, checkpointing=recompute[0])
        if not _states_fit(request, stage):
            continue
        for recompute_option in recompute:
            strategy = (
                stage if recompute_option is stage.checkpointing else replace(stage, checkpointing=recompute_option)
            )
            if not techniques.allow(request.work, strategy):
                break
            memory = memory_if_fits(request, strategy)
            if memory is not None:
                fitted = True
                whole = whole or recompute_option is ActivationCheckpointing.NONE
                yield strategy, memory
                break
    if fitted or request.fixed.optimizer_offload is not OptimizerOffload.NONE:
        return
    for offload in techniques.offload:
        strategy = replace(base, zero_stage=stages[-1], checkpointing=recompute[-1], optimizer_offload=offload)
        allowed = offload is not OptimizerOffload.NONE and techniques.allow(request.work, strategy)
        memory = memory_if_fits(request, strategy) if allowed else None
        if memory is not None:
            yield strategy, memory
            return


def memory_if_fits(request: SearchRequest, strategy: Strategy) -> Memory | None:
    """The fullest rank's bytes where every rank is within what the request lets an estimate fill; None elsewhere."""
    return memory_within(request.work, strategy, request.runtime, request.memory_limit(strategy.world_size))


def _states_fit(request: SearchRequest, strategy: Strategy) -> bool:
    return model_states_fit(request.work, strategy, request.runtime, request.memory_limit(strategy.world_size))


def can_fit(request: SearchRequest, layout: Layout, size: int) -> bool:
    """Whether the layout that saves most memory fits."""
    return any(
        memory_if_fits(request, strategy) is not None for strategy in least_memory_strategies(request, layout, size)
    )


def preferred_strategies(request: SearchRequest, layout: Layout) -> Iterator[tuple[Strategy, Memory]]:
    """With an order of preference: what fits of a layout, the simplest schedule and the fewest micro-batches first;
    with the account of its memory.

    At most `MAX_ESTIMATED` numbers of micro-batches of a schedule are tried, and only the first without a machine, since
    nothing tells them apart then.
    """
    smallest = next(least_memory_strategies(request, layout), None)
    if smallest is None or not _some_gpu_holds(request, smallest):
        return
    for schedule in _preferred_schedules(request, layout):
        fitting = _fitting_micro_batches(request, layout, schedule)
        yield from islice(fitting, MAX_ESTIMATED if request.machine is not None else 1)


def _preferred_schedules(request: SearchRequest, layout: Layout) -> list[PipelineSchedule]:
    """What the job states, or schedules that the worker runs with everything else that the job states."""
    job = request.pinned_job
    if request.pins.schedule is not None or layout.pipeline == 1 or request.machine is None:
        return [job.parallelism.order]
    return allowed_schedules(job, layout, (schedule for schedule, _ in schedules_of(request, layout)))


def _fitting_micro_batches(
    request: SearchRequest, layout: Layout, schedule: PipelineSchedule
) -> Iterator[tuple[Strategy, Memory]]:
    """The layout with each number of micro-batches that fits, the fewest first."""
    sizes = micro_batch_sizes(request, layout, schedule)
    if not _ranks_accept(request, layout, sizes, schedule):
        return
    for size in reversed(sizes):
        strategy = pinned_strategy(request, layout, size, schedule)
        memory = memory_if_fits(request, strategy)
        if memory is not None:
            yield strategy, memory


def pinned_strategy(
    request: SearchRequest, layout: Layout, size: int, schedule: PipelineSchedule | None = None
) -> Strategy:
    """The request's job in a layout with micro-batches of `size` sequences.

    Raises:
        ValueError: there are more stages than layers.
    """
    micro_batches = request.work.global_batch // layout.data // size
    return request.pinned_job.strategy(layout, micro_batches, schedule, request.pins.checkpointing)


def _ranks_accept(request: SearchRequest, layout: Layout, sizes: list[int], schedule: PipelineSchedule) -> bool:
    """Whether ranks run the layout: what they refuse, they refuse with every number of micro-batches."""
    if not sizes or request.techniques.runs is None:
        return bool(sizes)
    try:
        return request.techniques.allow(request.work, pinned_strategy(request, layout, sizes[-1], schedule))
    except ValueError:
        return False  # There are stages without layers.


def _some_gpu_holds(request: SearchRequest, strategy: Strategy) -> bool:
    return memory_within(request.work, strategy, request.runtime, request.memory_limit(1)) is not None


def first_held_by_some_gpu(request: SearchRequest) -> tuple[Strategy, Memory] | None:
    """The first layout in order of preference that fits the largest GPUs, however few they are."""
    for strategy in (one for layout in layouts(request) for one in least_memory_strategies(request, layout)):
        memory = memory_within(request.work, strategy, request.runtime, request.memory_limit(1))
        if memory is not None:
            return strategy, memory
    return None


def least_memory_strategies(request: SearchRequest, layout: Layout, size: int | None = None) -> Iterator[Strategy]:
    """Strategies of a layout that save most memory: one for each last recomputation, since which saves most depends.

    `size` is that of the micro-batches; the smallest where left out.
    """
    if request.job is not None:
        order = request.job.parallelism.order
        sizes = micro_batch_sizes(request, layout, order)
        if _ranks_accept(request, layout, sizes, order):
            yield pinned_strategy(request, layout, sizes[0])
        return
    if size is None:
        sizes = micro_batch_sizes(request, layout)
        if not sizes:
            return
        size = sizes[0]
    pins, techniques = request.pins, request.techniques
    default_schedule, offload = PipelineSchedule.ONE_F_ONE_B, request.fixed.optimizer_offload
    schedule = pins.schedule or (
        default_schedule if default_schedule in techniques.schedules else techniques.schedules[0]
    )
    for recompute_option in (pins.checkpointing,) if pins.checkpointing is not None else techniques.checkpointing[-2:]:
        yield strategy_of(
            request,
            layout,
            size,
            schedule=schedule,
            zero_stage=pins.zero_stage if pins.zero_stage is not None else techniques.zero_stages[-1],
            checkpointing=recompute_option,
            optimizer_offload=offload if offload is not OptimizerOffload.NONE else techniques.offload[-1],
        )


_WHOLE_LAYERS = (ActivationCheckpointing.FULL, ActivationCheckpointing.SQRT)


def balance_candidates(request: SearchRequest, found: list[Candidate]) -> list[Candidate]:
    """The few whose stages are worth balancing."""
    if not request.techniques.uneven_split:
        return []
    piped = [one for one in found if one.strategy.pipeline > 1 and not one.strategy.schedule_kind.folded]
    return sorted(piped, key=lambda f: f.score(request.objective))[:12]


def with_balanced_stages(request: SearchRequest, one: Candidate) -> Iterator[Candidate]:
    """The same layout with layers dealt by cost: embedding and logits count as the layers they are worth."""
    model, strategy = request.work.model, one.strategy
    if strategy.virtual_stages > 1:
        return
    again, length, causal = strategy.checkpointing in _WHOLE_LAYERS, request.work.sequence_length, request.work.causal
    costs = [layer_costs(model, length, layer, recomputes=again, causal=causal).total for layer in range(model.layers)]
    split = partition_layers(costs, strategy.pipeline, last=output_costs(model).total)
    changed = replace(strategy, layer_split=split)
    memory = memory_if_fits(request, changed) if request.techniques.allow(request.work, changed) else None
    if memory is not None:
        better = Candidate(changed, estimate_cost(request, changed, memory), request.node)
        if better.seconds < one.seconds:
            yield better
