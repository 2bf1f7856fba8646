"""The search against trying everything, and what it says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.api.mixture import MixtureSpec
from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.training import ActivationCheckpointing, OptimizerOffload
from meshwright.layout import Layout
from meshwright.models.architecture import Architecture
from meshwright.models.presets import published
from meshwright.planner.cost.accelerators import ACCELERATORS
from meshwright.planner.cost.estimate import estimate, machine_for, memory_of, time_of
from meshwright.planner.cost.strategy import Strategy, Workload
from meshwright.planner.search.alternatives import alternatives_of
from meshwright.planner.search.best_first import _layout_bound, search
from meshwright.planner.search.candidate import Candidate
from meshwright.planner.search.errors import NothingFitsError
from meshwright.planner.search.expand import TIE_TOLERANCE, base_strategies, schedules_of
from meshwright.planner.search.explain import reasons
from meshwright.planner.search.request import MESHWRIGHT_TECHNIQUES, Objective, Pins, SearchRequest, Techniques
from meshwright.planner.search.search_space import layouts, micro_batch_sizes
from meshwright.planner.search.what_if import what_ifs
from meshwright.rules.parallelism import MAX_WORKERS
from meshwright.schedules.registry import kind_of
from tests.tiers import mostly_long

MACHINE = machine_for(ACCELERATORS["H100-SXM5-80GB"])
DENSE = Architecture(layers=24, hidden_size=4096, intermediate_size=14336, heads=32, kv_heads=8, vocab_size=32000)
SHALLOW = Architecture(layers=4, hidden_size=512, intermediate_size=1536, heads=8, kv_heads=8, vocab_size=32000)
MIXTURE = DENSE.model_copy(update={"mixture": MixtureSpec(experts=8, per_token=2, intermediate_size=14336)})
SMALL = Techniques(
    schedules=(PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED, PipelineSchedule.ZB_H1),
    virtual_stages=(2,),
    zero_stages=(0, 1, 3),
    checkpointing=(ActivationCheckpointing.NONE, ActivationCheckpointing.FULL),
    offload=(OptimizerOffload.NONE,),
    uneven_split=False,
)


PAIRED = replace(
    SMALL,
    schedules=(
        PipelineSchedule.ONE_F_ONE_B,
        PipelineSchedule.ZB_V,
        PipelineSchedule.DUAL_PIPE,
        PipelineSchedule.DUAL_PIPE_V,
    ),
)
"""Schedules of which some hide the experts' exchange behind another micro-batch."""


def everything(request: SearchRequest) -> list[Candidate]:
    """All layouts that fit, with their cost: the search must not miss a better one."""
    return _everything(replace(request, objective=Objective.GPUS))  # with all numbers of replicas


@cache
def _everything(request: SearchRequest) -> list[Candidate]:
    found = []
    model, techniques = request.work.model, request.techniques
    limit = request.usable * request.machine.gpu.memory
    for layout in layouts(request):
        for size in micro_batch_sizes(request, layout):
            count = request.work.global_batch // layout.data // size
            for schedule, zero, again, method in product(
                techniques.schedules, techniques.zero_stages, techniques.checkpointing, techniques.context
            ):
                kind = kind_of(schedule)
                chunks = 2 if (kind.virtual_stages or kind.v_shaped) and layout.pipeline > 1 else 1
                if model.layers < kind.stages_per_rank(chunks) * layout.pipeline:
                    continue
                if not kind.accepts(layout.pipeline, count):
                    continue
                if method.value == "ulysses" and model.heads % (layout.tensor * layout.context):
                    continue
                strategy = Strategy(
                    tensor=layout.tensor,
                    sequence_parallel=layout.tensor > 1,
                    context=layout.context,
                    context_method=method,
                    pipeline=layout.pipeline,
                    schedule=schedule if layout.pipeline > 1 else PipelineSchedule.ONE_F_ONE_B,
                    virtual_stages=chunks,
                    expert=layout.expert,
                    data=layout.data,
                    zero_stage=zero,
                    micro_batch_size=size,
                    micro_batches=count,
                    checkpointing=again,
                )
                if memory_of(request.work, strategy, request.machine).total <= limit:
                    found.append(Candidate(strategy, estimate(request.work, strategy, request.machine), request.node))
    return found


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize(
    ("model", "gpus", "batch", "length"),
    [
        pytest.param(DENSE, 16, 32, 8192, id="16 GPUs", marks=pytest.mark.long),
        pytest.param(DENSE, 8, 16, 4096, id="8 GPUs"),
        pytest.param(MIXTURE, 16, 32, 4096, id="mixture", marks=pytest.mark.long),
        pytest.param(MIXTURE, 8, 16, 4096, id="small mixture"),
        pytest.param(DENSE, 2, 8, 2048, id="2 GPUs"),
        pytest.param(SHALLOW, 8, 60, 1024, id="fewer replicas with larger micro-batches"),
    ],
)
def test_nothing_better_is_missed(
    model: Architecture, gpus: int, batch: int, length: int, objective: Objective
) -> None:
    request = SearchRequest(Workload(model, length, batch), MACHINE, gpus, objective=objective, techniques=SMALL)
    tried = everything(request)
    if not tried:
        with pytest.raises(NothingFitsError, match="no layout fits"):
            search(request)
        return
    least = min(one.score(objective) for one in tried)
    result = search(request)
    assert result.best.score(objective) <= least * TIE_TOLERANCE * (1 + 1e-9)
    assert min(one.score(objective) for one in result.ranked) == pytest.approx(least, rel=1e-3)
    assert result.estimated < len(tried) or len(tried) < 50


@pytest.mark.parametrize(("gpus", "batch"), mostly_long([(16, 32), (32, 64)], lambda case: case[0] == 16))
def test_no_schedule_that_hides_exchanges_is_missed(gpus: int, batch: int) -> None:
    many = MixtureSpec(experts=64, per_token=8, intermediate_size=2048)
    model = DENSE.model_copy(update={"mixture": many, "layers": 27, "vocab_size": 128_000})
    request = SearchRequest(Workload(model, 4096, batch), MACHINE, gpus, objective=Objective.TIME, techniques=PAIRED)
    least = min(one.seconds for one in everything(request))
    assert search(request).best.seconds <= least * TIE_TOLERANCE * (1 + 1e-9)


@pytest.mark.parametrize(
    ("gpus", "layers"), mostly_long(product((16, 24), (12, 13, 19)), {(16, 12), (24, 13)}.__contains__)
)
def test_no_strategy_is_faster_than_the_bound_of_its_layout(layers: int, gpus: int) -> None:
    # Stages are uneven, the first are dense, and the last has a large output.
    many = MixtureSpec(experts=48, per_token=8, intermediate_size=1024, shared_intermediate_size=1024, dense_layers=3)
    changed = {"mixture": many, "layers": layers, "vocab_size": 256_000, "hidden_size": 2048}
    model = DENSE.model_copy(update=changed)
    techniques = Techniques(context=SMALL.context)
    request = SearchRequest(Workload(model, 4096, 48), MACHINE, gpus, objective=Objective.TIME, techniques=techniques)
    tried = 0
    for layout in layouts(request):
        sizes = micro_batch_sizes(request, layout)
        for size in sizes:
            bound = _layout_bound(request, layout, size)
            for smaller in sizes[: sizes.index(size) + 1]:
                for base in base_strategies(request, layout, smaller):
                    seconds = time_of(request.work, base, MACHINE).total
                    assert bound <= seconds * TIE_TOLERANCE, base
                    tried += 1
    assert tried > 200


def test_no_smaller_number_of_replicas_is_faster() -> None:
    """Eight sequences on 256 GPUs: with one replica, a pipeline has eight micro-batches."""
    machine = machine_for(ACCELERATORS["B200"])
    work = Workload(published("gpt3-175b"), 32768, 8)
    request = SearchRequest(work, machine, 256, techniques=MESHWRIGHT_TECHNIQUES, gpus_per_worker=8)
    fewest = search(replace(request, pins=Pins(data=1))).best
    assert search(request).best.seconds <= fewest.seconds * TIE_TOLERANCE


def test_a_schedule_is_tried_if_each_of_its_stages_has_a_layer() -> None:
    def tried(layers: int) -> set[PipelineSchedule]:
        model = DENSE.model_copy(update={"layers": layers})
        return {schedule for schedule, _ in schedules_of(SearchRequest(Workload(model, 4096, 64), MACHINE, 4), layout)}

    layout = Layout(tensor=1, pipeline=4, data=1)
    # DualPipe has as many stages as ranks, each on two of them; in a V a rank has two stages of its own.
    assert {PipelineSchedule.DUAL_PIPE, PipelineSchedule.ZB_H1} <= tried(4)
    assert not {PipelineSchedule.DUAL_PIPE_V, PipelineSchedule.ZB_V, PipelineSchedule.INTERLEAVED} & tried(4)
    assert {PipelineSchedule.DUAL_PIPE_V, PipelineSchedule.ZB_V, PipelineSchedule.INTERLEAVED} <= tried(8)
    request = SearchRequest(Workload(DENSE, 4096, 64), MACHINE, 4)
    chunks = dict(schedules_of(request, layout))
    assert (chunks[PipelineSchedule.DUAL_PIPE], chunks[PipelineSchedule.ZB_V]) == (1, 2)


def test_among_equals_the_simplest_wins() -> None:
    result = search(SearchRequest(Workload(DENSE, 8192, 64), MACHINE, 16))
    assert all(result.best.complexity <= other.complexity for other in result.ranked)
    assert all(other.seconds <= min(o.seconds for o in result.ranked) * TIE_TOLERANCE for other in result.ranked)


def test_no_alternative_beats_another() -> None:
    front = search(SearchRequest(Workload(DENSE, 8192, 64), MACHINE, 16, objective=Objective.COST)).alternatives
    for one, other in product(front, front):
        better = one.seconds < other.seconds and one.estimate.gpus < other.estimate.gpus
        assert not (better and one.seconds_after_node_loss < other.seconds_after_node_loss)


@given(
    tensor=st.sampled_from([None, 1, 2, 4, 8]),
    pipeline=st.sampled_from([None, 1, 2, 4]),
    data=st.sampled_from([None, 1, 2]),
    zero=st.sampled_from([None, 0, 1, 3]),
    micro=st.sampled_from([None, 1, 2]),
)
@settings(deadline=None, max_examples=40)
def test_what_is_given_stays(
    tensor: int | None, pipeline: int | None, data: int | None, zero: int | None, micro: int | None
) -> None:
    pins = Pins(tensor=tensor, pipeline=pipeline, data=data, zero_stage=zero, micro_batch_size=micro)
    request = SearchRequest(Workload(DENSE, 4096, 32), MACHINE, 16, pins=pins)
    try:
        chosen = search(request).best.strategy
    except NothingFitsError:
        return
    for name in ("tensor", "pipeline", "data", "zero_stage", "micro_batch_size"):
        wanted = getattr(pins, name)
        assert wanted is None or getattr(chosen, name) == wanted
    assert chosen.world_size <= 16
    assert chosen.micro_batch_size * chosen.micro_batches * chosen.data == 32
    assert memory_of(request.work, chosen, MACHINE).total <= request.usable * MACHINE.gpu.memory


def test_only_what_the_runtime_can_do_is_proposed() -> None:
    result = search(SearchRequest(Workload(DENSE, 4096, 32), MACHINE, 16, techniques=MESHWRIGHT_TECHNIQUES))
    for one in (*result.ranked, *result.alternatives):
        used = one.strategy
        assert used.schedule is PipelineSchedule.ONE_F_ONE_B
        assert used.context == 1 or used.context_method in MESHWRIGHT_TECHNIQUES.context
        assert used.expert == used.virtual_stages == 1
        assert used.checkpointing is ActivationCheckpointing.NONE
        assert used.zero_stage in MESHWRIGHT_TECHNIQUES.zero_stages
        assert used.layer_split is None


@pytest.mark.long
def test_the_fewest_gpus_are_the_fewest() -> None:
    request = SearchRequest(
        Workload(DENSE, 4096, 32),
        MACHINE,
        16,
        objective=Objective.GPUS,
        techniques=replace(SMALL, offload=(OptimizerOffload.NONE,)),
    )
    assert search(request).best.estimate.gpus == min(one.estimate.gpus for one in everything(request))


def test_a_model_that_no_layout_holds_says_what_is_missing() -> None:
    big = DENSE.model_copy(update={"layers": 96, "hidden_size": 16384, "heads": 128, "intermediate_size": 53248})
    with pytest.raises(NothingFitsError, match=r"needs is [\d.]+ GiB of [\d.]+ GiB .*add GPUs") as raised:
        search(SearchRequest(Workload(big, 8192, 16), MACHINE, 8, techniques=MESHWRIGHT_TECHNIQUES))
    assert raised.value.memory is not None


def test_contradicting_degrees_are_named() -> None:
    with pytest.raises(NothingFitsError, match=r"tensor 4, data 3 given"):
        search(SearchRequest(Workload(DENSE, 8192, 16), MACHINE, 12, pins=Pins(tensor=4, data=3)))


@pytest.mark.parametrize(("field", "value"), [("gpus", 0), ("usable", 0.0), ("usable", 1.5), ("gpus_per_worker", 0)])
def test_impossible_requests_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        replace(SearchRequest(Workload(DENSE, 8192, 16), MACHINE, 8), **{field: value})  # type: ignore[arg-type]


def test_reasons_name_every_dimension_and_neighbors_their_cost() -> None:
    result = search(SearchRequest(Workload(MIXTURE, 4096, 64), MACHINE, 16))
    told = " ".join(reasons(result))
    for word in ("TP ", "PP ", "DP ", "EP ", "a step spends", "is fullest"):
        assert word in told
    neighbors = alternatives_of(result.request, result.best)
    assert neighbors
    for one in neighbors:
        assert one.slower is None or one.slower >= 1 / TIE_TOLERANCE - 1e-9, one.sentence


def test_twice_the_gpus_are_no_more_than_a_job_may_have() -> None:
    """With one GPU in each worker, they are as many as workers."""
    request = SearchRequest(Workload(SHALLOW, 1024, 2 * MAX_WORKERS), MACHINE, 768, techniques=MESHWRIGHT_TECHNIQUES)
    assert what_ifs(search(request))[0].change == "1024 GPUs instead of 768"
    full = what_ifs(search(replace(request, gpus=MAX_WORKERS)))
    assert not any("instead of 1024" in what.change for what in full)
    free = replace(request, techniques=replace(MESHWRIGHT_TECHNIQUES, runs=None))
    assert what_ifs(search(free))[0].change == "1536 GPUs instead of 768"


def test_more_gpus_never_give_less() -> None:
    answers = {what.change: what for what in what_ifs(search(SearchRequest(Workload(DENSE, 8192, 64), MACHINE, 16)))}
    assert answers["32 GPUs instead of 16"].speedup > 1.5
    assert all(what.speedup > 0.97 for what in answers.values())
