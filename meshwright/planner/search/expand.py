"""Fills in a layout: schedules, context methods, memory savings, and for the best candidates stages of equal time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from math import inf

from meshwright.api.parallelism import ContextMethod, PipelineSchedule
from meshwright.api.training import ActivationCheckpointing, OptimizerOffload
from meshwright.layout import Layout
from meshwright.planner.cluster.limits import usable_memory
from meshwright.planner.cost.accelerators import ACCELERATORS
from meshwright.planner.cost.estimate import Estimate, estimate, time_of
from meshwright.planner.cost.memory import Memory, memory_within, model_states_fit
from meshwright.planner.cost.step_time import StepTime
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.deadline import check_deadline
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.request import SearchRequest
from meshwright.planner.search.runtime_rules import allowed_schedules, allowed_stages_of
from meshwright.planner.search.search_space import micro_batch_sizes
from meshwright.rules.context import heads_divide
from meshwright.schedules.flop_costs import layer_costs, output_costs
from meshwright.schedules.partition import partition_layers
from meshwright.schedules.registry import kind_of
from meshwright.schedules.schedule import PipelineShape

TIE_TOLERANCE = 1.01
"""Plans within 1% of the best count as equally good, because estimates are not more exact. The simplest is chosen."""
FEW_MICRO_BATCHES = 2
"""With so few micro-batches, ZeRO-3 may be the fastest stage also with a pipeline."""
SMALLEST_MEMORY = usable_memory(int(min(gpu.memory for gpu in ACCELERATORS.values())))
"""Bytes that a plan may fill of the smallest GPU of the catalog."""
MAX_ESTIMATED = 16
"""How many numbers of micro-batches are estimated for a layout and schedule, in order of preference. More take time."""


def strategy_of(request: SearchRequest, layout: Layout, size: int, **more: object) -> Strategy:
    """Return a strategy for a layout with micro-batches of `size` sequences; `more` are other fields of `Strategy`.

    Raises:
        ValueError: there are more stages than layers.
    """
    count = request.work.global_batch // layout.data // size
    if request.job is not None:
        return request.job.strategy(layout, count, **more)  # type: ignore[arg-type]
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
        micro_batches=count,
        **more,  # type: ignore[arg-type]
    )


def estimate_cost(request: SearchRequest, strategy: Strategy, memory: Memory | None = None) -> Estimate:
    """Estimate the cost of a strategy on the request's machine. `memory` is its memory, if that is known already."""
    check_deadline()
    return estimate(request.work, strategy, request.required_machine, memory=memory)


def base_strategies(request: SearchRequest, layout: Layout, size: int) -> Iterator[Strategy]:
    """Yield strategies with each schedule and context method of a layout, without memory savings."""
    stage = fastest_update(request, layout)
    for schedule, chunks in _schedules(request, layout, size):
        for method in _context_methods(request, layout):
            yield strategy_of(
                request,
                layout,
                size,
                schedule=schedule,
                virtual_stages=chunks,
                context_method=method,
                zero_stage=stage,
            )


def fastest_update(request: SearchRequest, layout: Layout) -> int:
    """Return a ZeRO stage of a layout whose optimizer step is as short as that of any other, for a lower bound."""
    stages = _zero_stages(request, layout.shard_ranks)
    return stages[min(1, len(stages) - 1)]


def _zero_stages(request: SearchRequest, replicas: int) -> tuple[int, ...]:
    if request.job is not None and replicas == 1:
        return (0,)
    if request.pins.zero_stage is not None:
        return (request.pins.zero_stage,)
    stages = request.techniques.zero_stages
    return stages if replicas > 1 else stages[:1]


def stages_to_try(request: SearchRequest, layout: Layout, schedule: PipelineSchedule) -> Sequence[int | None]:
    """Return the ZeRO stages to choose from. Only None, which is the job's, if it states one."""
    if request.pins.zero_stage is not None or layout.shard_ranks == 1:
        return (None,)
    return allowed_stages_of(request.pinned_job, layout, schedule, request.techniques.zero_stages)


def _schedules(request: SearchRequest, layout: Layout, size: int) -> Iterator[tuple[PipelineSchedule, int]]:
    """Yield (schedule, chunks) for which the layout has enough layers and micro-batches."""
    micro_batches = request.work.global_batch // layout.data // size
    for schedule, chunks in schedules_of(request, layout):
        if kind_of(schedule).accepts(layout.pipeline, micro_batches):
            yield schedule, chunks


def schedules_of(request: SearchRequest, layout: Layout) -> Iterator[tuple[PipelineSchedule, int]]:
    """Yield (schedule, chunks) with which every stage of the layout has a layer."""
    pinned, techniques = request.pins, request.techniques
    if layout.pipeline == 1:
        yield pinned.schedule or PipelineSchedule.ONE_F_ONE_B, 1
        return
    for schedule in (pinned.schedule,) if pinned.schedule else techniques.schedules:
        kind = kind_of(schedule)
        if kind.virtual_stages:
            counts = (pinned.virtual_stages,) if pinned.virtual_stages else techniques.virtual_stages
        else:
            counts = (kind.stages_per_rank(1),)
        for chunks in counts:
            if request.work.model.layers >= kind.stages_per_rank(chunks) * layout.pipeline:
                yield schedule, chunks


def stage_layouts(request: SearchRequest, layout: Layout) -> list[dict[str, object]]:
    """Arguments of `strategy_of` for schedules of which one has the fastest slowest rank, for a lower bound.

    A rank of both directions has the mean of two stages, so its slowest rank is at least as fast as with one stage on
    each rank. In a V, light dense layers at the front may share a rank with the output. Stages that follow each other,
    one or several on a rank, make no rank faster than one stage each.
    """
    moe = request.work.model.mixture
    plain: dict[str, object] = {}
    both_ends: dict[str, object] | None = None
    folded: dict[str, object] | None = None
    if layout.pipeline > 1:
        for schedule, chunks in schedules_of(request, layout):
            kind, chosen = kind_of(schedule), {"schedule": schedule, "virtual_stages": chunks}
            if kind.bidirectional and not (kind.even and layout.pipeline % 2):
                both_ends = both_ends or chosen
            elif kind.v_shaped and moe is not None and moe.dense_layers:
                folded = folded or chosen
    return [both_ends or plain, *([folded] if folded else [])]


def most_paired(request: SearchRequest, layout: Layout) -> float:
    """The largest fraction of passes that overlap in any schedule of a layout, for a lower bound."""
    if layout.expert == 1 or layout.pipeline == 1:
        return 0.0
    micro_batches = request.work.global_batch // layout.data
    return max(
        (
            kind_of(schedule).paired(PipelineShape(layout.pipeline, micro_batches, chunks))
            for schedule, chunks in schedules_of(request, layout)
        ),
        default=0.0,
    )


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
    """Yield strategies that fit, with their memory: for each ZeRO stage the first recomputation that fits.

    If none fits, the optimizer is offloaded. Once a ZeRO stage fits without recomputation, higher stages have nothing
    to save. Two are tried nevertheless: the lowest that shards, which also makes the optimizer step shorter, and
    without a pipeline ZeRO-3, which overlaps its traffic with the entire step.
    """
    techniques = request.techniques
    stages = _zero_stages(request, base.shard_ranks)
    recompute = request.recomputations
    fitted = whole = sharded = False
    for zero in stages:
        if whole and ((zero == 2 and sharded) or (zero == 3 and base.pipeline > 1)):
            continue
        stage = replace(base, zero_stage=zero, checkpointing=recompute[0])
        if not _states_fit(request, stage):
            continue
        for recompute_option in recompute:
            strategy = (
                stage if recompute_option is stage.checkpointing else replace(stage, checkpointing=recompute_option)
            )
            memory = memory_if_fits(request, strategy)
            if memory is not None and request.allows(strategy):
                fitted = True
                if recompute_option is ActivationCheckpointing.NONE:
                    whole, sharded = True, zero > 0
                yield strategy, memory
                if strategy.activation_offload:
                    yield from _faster_with_more(request, strategy, recompute)
                break
    if fitted or request.fixed.optimizer_offload is not OptimizerOffload.NONE:
        return
    for offload in techniques.offload:
        strategy = replace(base, zero_stage=stages[-1], checkpointing=recompute[-1], optimizer_offload=offload)
        allowed = offload is not OptimizerOffload.NONE and request.allows(strategy)
        memory = memory_if_fits(request, strategy) if allowed else None
        if memory is not None:
            yield strategy, memory
            return


def job_savings(request: SearchRequest, base: Strategy, longest: float) -> Iterator[tuple[Strategy, Memory]]:
    """Yield strategies of a job that fit, with their memory: for each ZeRO stage the first recomputation that fits.

    The highest stage needs the least memory, so no other one fits with less recomputation. If that alone makes the step
    longer than `longest` seconds, nothing is yielded.
    """
    stages = _zero_stages(request, base.shard_ranks)
    options = request.recomputations
    most_saved = replace(base, zero_stage=stages[-1])
    options = tuple(_from_first_that_fits(request, most_saved, options))
    if not options or _exceeds(request, replace(most_saved, checkpointing=options[0]), longest):
        return
    whole = False
    for zero in stages:
        # Stages 1 and 2 take the same time, and with a pipeline stage 3 gathers parameters for every micro-batch.
        if whole and (zero == 2 or (zero == 3 and base.pipeline > 1 and base.micro_batches > FEW_MICRO_BATCHES)):
            continue
        if not _states_fit(request, replace(base, zero_stage=zero, checkpointing=options[0])):
            continue
        for option in options:
            strategy = replace(base, zero_stage=zero, checkpointing=option)
            memory = memory_if_fits(request, strategy)
            if memory is not None and request.allows(strategy):
                whole = whole or (zero > 0 and option is ActivationCheckpointing.NONE)
                yield strategy, memory
                yield from _faster_with_more(request, strategy, options)
                break


def _faster_with_more(
    request: SearchRequest, strategy: Strategy, options: Sequence[ActivationCheckpointing]
) -> Iterator[tuple[Strategy, Memory]]:
    """Yield strategies that fit with more recomputation, if that makes their step clearly shorter.

    The next one can if GPUs wait for the CPU's launches as well as for gradients: both go on while layers are computed
    again. All of them can if GPUs wait for activations that are in main memory, since fewer are then.
    """
    time = time_of(request.work, strategy, request.required_machine)
    following = options[options.index(strategy.checkpointing) + 1 :]
    if hideable_offload(strategy, time) <= 0.0:
        following = following[:1] if time.host > 0.0 and time.data > 0.0 else ()
    for option in following:
        more = replace(strategy, checkpointing=option)
        if time_of(request.work, more, request.required_machine).total * TIE_TOLERANCE >= time.total:
            continue
        memory = memory_if_fits(request, more)
        if memory is not None and request.allows(more):
            yield more, memory


def hideable_offload(strategy: Strategy, time: StepTime) -> float:
    """Seconds of offloading that other decisions can hide or avoid: those of activations."""
    return time.offload if strategy.activation_offload else 0.0


def _from_first_that_fits(
    request: SearchRequest, strategy: Strategy, options: Sequence[ActivationCheckpointing]
) -> Sequence[ActivationCheckpointing]:
    """Return the recomputation options of a strategy from the first that fits on."""
    fitting = (
        index
        for index, option in enumerate(options)
        if memory_if_fits(request, replace(strategy, checkpointing=option)) is not None
    )
    first = next(fitting, None)
    return () if first is None else options[first:]


def _exceeds(request: SearchRequest, strategy: Strategy, longest: float) -> bool:
    """Whether a step takes longer than `longest` seconds, even without reducing gradients."""
    time = time_of(request.work, strategy, request.required_machine)
    return time.total - time.data - hideable_offload(strategy, time) > longest


def memory_if_fits(request: SearchRequest, strategy: Strategy) -> Memory | None:
    """Return the memory of the fullest stage if every rank is within the request's memory limit, else None."""
    return memory_within(request.work, strategy, request.runtime, request.memory_limit(strategy.world_size))


def _states_fit(request: SearchRequest, strategy: Strategy) -> bool:
    return model_states_fit(request.work, strategy, request.runtime, request.memory_limit(strategy.world_size))


def can_fit(request: SearchRequest, layout: Layout, size: int) -> bool:
    """Whether the strategy of a layout that needs the least memory fits."""
    return any(
        memory_if_fits(request, strategy) is not None for strategy in least_memory_strategies(request, layout, size)
    )


def least_recomputation(
    request: SearchRequest, layout: Layout, size: int, at_least: ActivationCheckpointing | None = None
) -> ActivationCheckpointing | None:
    """The least recomputation with which a job's layout can fit, in any of its strategies. None if it cannot.

    It is `at_least` or more, if smaller micro-batches need that much.
    """
    check_deadline()
    options = request.recomputations
    for option in options if at_least is None else options[options.index(at_least) :]:
        for method in _context_methods(request, layout):
            strategy = strategy_of(
                request,
                layout,
                size,
                schedule=request.least_memory_schedule,
                virtual_stages=request.pins.virtual_stages,
                context_method=method,
                zero_stage=_zero_stages(request, layout.shard_ranks)[-1],
                checkpointing=option,
            )
            if memory_if_fits(request, strategy) is not None:
                return option
    return None


def preferred_strategies(request: SearchRequest, layout: Layout) -> Iterator[tuple[Strategy, Memory]]:
    """Yield a layout's strategies that fit, with their memory, for a request with an order of preference.

    The simplest schedule and the fewest micro-batches come first. At most `MAX_ESTIMATED` numbers of micro-batches are
    tried for each schedule. Without a machine it is only the first, because there is no time to compare.
    """
    if request.memory_limit(layout.world_size) <= 0.0:
        return  # The cluster has fewer GPUs.
    if not any(_fits_any_gpu(request, smallest) for smallest in least_memory_strategies(request, layout)):
        return
    for choices in _choices(request, layout):
        fitting = _fitting_micro_batches(request, layout, choices)
        yield from islice(fitting, MAX_ESTIMATED if request.machine is not None else 1)


@dataclass(frozen=True, slots=True)
class Choices:
    """What a job may leave open in a layout, besides micro-batches and checkpointing. None: as in its spec."""

    schedule: PipelineSchedule | None = None
    virtual_stages: int | None = None
    context_method: ContextMethod | None = None
    zero_stage: int | None = None


def _choices(request: SearchRequest, layout: Layout) -> Iterator[Choices]:
    """Yield the schedules, context methods and ZeRO stages of a layout, the simplest first."""
    for schedule, chunks in _preferred_schedules(request, layout):
        for method in _context_methods(request, layout):
            for stage in stages_to_try(request, layout, schedule):
                yield Choices(schedule, chunks, method if layout.context > 1 else None, stage)


def _preferred_schedules(request: SearchRequest, layout: Layout) -> list[tuple[PipelineSchedule, int | None]]:
    """Return the job's schedule or, if the job leaves it open, those that the runtime runs with its other fields.

    Each has a number of virtual stages, or None if that is the job's.
    """
    job = request.pinned_job
    if layout.pipeline == 1 or request.machine is None:
        return [(job.parallelism.order, None)]
    possible = list(schedules_of(request, layout))
    if request.pins.schedule is None:
        allowed = allowed_schedules(job, layout, {schedule: None for schedule, _ in possible})
        possible = [one for one in possible if one[0] in allowed]
    elif not possible:
        return [(request.pins.schedule, None)]
    return [(schedule, chunks if kind_of(schedule).virtual_stages else None) for schedule, chunks in possible]


def _fitting_micro_batches(
    request: SearchRequest, layout: Layout, choices: Choices
) -> Iterator[tuple[Strategy, Memory]]:
    """Yield the layout with each number of micro-batches that fits, the fewest first.

    On GPUs of unknown memory, the fewest are those that fit the smallest GPU of the catalog, if any do.
    """
    sizes = micro_batch_sizes(request, layout, choices.schedule)
    if not _ranks_accept(request, layout, sizes, choices):
        return
    known = request.memory_limit(layout.world_size) < inf
    for size in reversed(sizes):
        check_deadline()
        strategy = job_strategy(request, layout, size, choices)
        memory = memory_if_fits(request, strategy)
        if memory is not None and (known or size == sizes[0] or memory.total <= SMALLEST_MEMORY):
            yield strategy, memory


_AS_STATED = Choices()


def job_strategy(request: SearchRequest, layout: Layout, size: int, choices: Choices = _AS_STATED) -> Strategy:
    """Return the strategy of the request's job in a layout with micro-batches of `size` sequences.

    Raises:
        ValueError: there are more stages than layers.
    """
    return request.pinned_job.strategy(
        layout,
        request.work.global_batch // layout.data // size,
        choices.schedule,
        request.pins.checkpointing,
        virtual_stages=choices.virtual_stages,
        context_method=choices.context_method,
        zero_stage=choices.zero_stage,
    )


def _ranks_accept(request: SearchRequest, layout: Layout, sizes: list[int], choices: Choices) -> bool:
    """Whether ranks accept the layout. If they reject it, they do so with every number of micro-batches."""
    if not sizes or request.techniques.runs is None:
        return bool(sizes)
    try:
        return request.allows(job_strategy(request, layout, sizes[-1], choices))
    except ValueError:
        return False  # There are stages without layers.


def _fits_any_gpu(request: SearchRequest, strategy: Strategy) -> bool:
    return memory_within(request.work, strategy, request.runtime, request.memory_limit(1)) is not None


def least_memory_sizes(sizes: list[int]) -> list[int]:
    """The sizes of micro-batches, of those in ascending order, that can need the least memory.

    The smallest needs the least for activations. The largest may be the only micro-batch of a step: then FSDP never has
    gradients of entire layers for longer than their reduction.
    """
    return sorted({*sizes[:1], *sizes[-1:]})


def least_memory_strategies(request: SearchRequest, layout: Layout, size: int | None = None) -> Iterator[Strategy]:
    """Yield the strategies of a layout that can need the least memory.

    There is one for each of the last two recomputations, since either can save more. `size` is the number of sequences
    of a micro-batch, and defaults to the smallest.
    """
    check_deadline()
    if request.order_of_preference:
        order = request.pinned_job.parallelism.order
        sizes = micro_batch_sizes(request, layout, order)
        for method in _context_methods(request, layout):
            for stage in stages_to_try(request, layout, order):
                choices = Choices(order, None, method if layout.context > 1 else None, stage)
                if _ranks_accept(request, layout, sizes, choices):
                    yield from (job_strategy(request, layout, one, choices) for one in least_memory_sizes(sizes))
        return
    if size is None:
        for one in least_memory_sizes(micro_batch_sizes(request, layout)):
            yield from least_memory_strategies(request, layout, one)
        return
    pins, techniques = request.pins, request.techniques
    schedule, offload = request.least_memory_schedule, request.fixed.optimizer_offload
    recompute = request.recomputations[-2:]
    if request.job is not None:
        for method in _context_methods(request, layout):
            options = {"schedule": schedule, "virtual_stages": pins.virtual_stages, "context_method": method}
            for stage, option in product(_zero_stages(request, layout.shard_ranks), recompute):
                yield strategy_of(request, layout, size, **options, zero_stage=stage, checkpointing=option)
        return
    for recompute_option in recompute:
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
    """Return the best candidates with a pipeline, to balance their stages."""
    if not request.techniques.uneven_split:
        return []
    piped = [one for one in found if one.strategy.pipeline > 1 and not one.strategy.schedule_kind.folded]
    return sorted(piped, key=lambda f: f.score(request.objective))[:12]


def with_balanced_stages(request: SearchRequest, one: Candidate) -> Iterator[Candidate]:
    """Yield the same layout with layers split by cost, if it is faster. The output counts by its cost too."""
    model, strategy = request.work.model, one.strategy
    if strategy.virtual_stages > 1:
        return
    again, length, causal = strategy.checkpointing in _WHOLE_LAYERS, request.work.sequence_length, request.work.causal
    costs = [layer_costs(model, length, layer, recomputes=again, causal=causal).total for layer in range(model.layers)]
    split = partition_layers(costs, strategy.pipeline, last=output_costs(model).total)
    changed = replace(strategy, layer_split=split)
    memory = memory_if_fits(request, changed) if request.allows(changed) else None
    if memory is not None:
        better = Candidate(changed, estimate_cost(request, changed, memory), request.node)
        if better.seconds < one.seconds:
            yield better
