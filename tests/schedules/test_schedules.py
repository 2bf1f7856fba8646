"""Every schedule is complete and runs, and the closed forms are what its simulation gives."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.api.parallelism import ParallelismSpec, PipelineSchedule, StageBalance
from meshwright.models.counts import forward_flops
from meshwright.models.presets import PRESETS
from meshwright.schedules.actions import Action, ActionKind, Schedule
from meshwright.schedules.automatic import _search, automatic
from meshwright.schedules.flop_costs import stage_costs
from meshwright.schedules.peak_memory import SavedPerStage, peak_memory
from meshwright.schedules.pipeline_layout import pipeline_layout, schedule_of
from meshwright.schedules.registry import NAMES, generate, named
from meshwright.schedules.schedule import PipelineShape, StageTimes
from meshwright.schedules.simulator import ActionCosts, simulate
from meshwright.schedules.validate import schedule_problems

CHUNKED = ("interleaved", "looped-bfs")
EXACT = ("naive", "gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1")
"""Schedules whose closed form holds for any F, B and W with W the shortest."""


def made(name: str, ranks: int, rounds: int) -> tuple[Schedule, int]:
    """A schedule with enough micro-batches for every kind, and its chunks."""
    chunks = 2 if name in CHUNKED else 1
    return generate(name, ranks, rounds * ranks, chunks), chunks


def held_chunks(name: str) -> int:
    """Stages of a rank that together are its layers: DualPipe's two directions hold the same layers twice."""
    return 2 if name in (*CHUNKED, "zb-v", "dualpipe-v") else 1


shapes = st.tuples(st.sampled_from(NAMES), st.sampled_from([2, 4, 6]), st.integers(2, 5))


@given(shapes)
def test_every_schedule_is_complete_and_runs(shape: tuple[str, int, int]) -> None:
    assert schedule_problems(made(*shape)[0]) == []


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "interleaved", "looped-bfs"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_steps_of_few_micro_batches_run_too(name: str, ranks: int) -> None:
    for micro_batches in range(1, 2 * ranks + 2):
        if name == "interleaved" and micro_batches % ranks:
            continue
        schedule = generate(name, ranks, micro_batches, 3)
        assert schedule_problems(schedule) == []
        peak_memory = simulate(schedule).in_flight
        chunks = {"zb-v": 2, "interleaved": 3, "looped-bfs": 3}.get(name, 1)
        for rank, peak in enumerate(peak_memory):
            assert peak / chunks <= named(name).in_flight(PipelineShape(ranks, micro_batches, chunks), rank) + 1e-9


@given(shapes)
def test_ranks_hold_what_the_closed_form_says(shape: tuple[str, int, int]) -> None:
    name, ranks, rounds = shape
    schedule, chunks = made(*shape)
    peak_memory = simulate(schedule).in_flight
    numbers = PipelineShape(ranks, schedule.micro_batches, chunks)
    expected = [named(name).in_flight(numbers, rank) for rank in range(ranks)]
    # ZB-V's and DualPipe's closed forms are those of the worst rank.
    held = [peak / held_chunks(name) for peak in peak_memory]
    if name in ("zb-v", "dualpipe", "dualpipe-v"):
        assert max(held) == max(expected)
    else:
        assert held == expected


@given(st.sampled_from(["zb-h1", "zb-h2"]), st.integers(2, 6), st.integers(1, 30), st.floats(0.0, 2.0))
def test_what_is_left_between_halves_has_a_closed_form(name: str, ranks: int, micro_batches: int, left: float) -> None:
    held = peak_memory(generate(name, ranks, micro_batches), SavedPerStage(1.0, left))
    for rank, most in enumerate(held):
        numbers = PipelineShape(ranks, micro_batches)
        half = named(name).pending_weight_gradients(numbers, rank)
        whole = named(name).in_flight(numbers, rank) - half
        # Where the first half of a backward pass leaves more than was kept, the peak is behind one.
        if left <= 1.0 or micro_batches >= 2 * ranks:
            assert most == pytest.approx(whole + half * left + max(0.0, left - 1.0))


def test_halves_hold_what_the_zero_bubble_paper_says() -> None:
    forward, left, ranks = 10.0, 3.0, 4
    one, two = (peak_memory(generate(name, ranks, 12), SavedPerStage(forward, left)) for name in ("zb-h1", "zb-h2"))
    assert one == tuple((ranks - rank) * forward + rank * left for rank in range(ranks))
    assert two == tuple((2 * (ranks - rank) - 1) * forward + 2 * rank * left for rank in range(ranks))


def test_stages_may_keep_different_amounts() -> None:
    schedule = generate("zb-v", 2, 4)
    kept = [SavedPerStage(float(stage + 1), 0.5) for stage in range(4)]
    # F0.0 F0.1 F0.2 F3.0 there, F1.0 F2.0 F1.1 F2.1 here.
    assert peak_memory(schedule, kept) == (3 * 1.0 + 4.0, 2 * 2.0 + 2 * 3.0)
    with pytest.raises(ValueError, match="must have 4 stages, got 1"):
        peak_memory(schedule, kept[:1])


def test_the_forward_pass_of_a_pair_may_end_first() -> None:
    pair = (Action(ActionKind.BACKWARD, 0, 0), Action(ActionKind.FORWARD, 0, 1))
    schedule = Schedule(
        "pair", 1, 2, (((Action(ActionKind.FORWARD, 0, 0),), pair, (Action(ActionKind.BACKWARD, 0, 1),)),)
    )
    assert peak_memory(schedule) == (2.0,)


@given(shapes)
def test_ranks_wait_as_long_as_the_closed_form_says(shape: tuple[str, int, int]) -> None:
    name, ranks, _ = shape
    schedule, chunks = made(*shape)
    parts = held_chunks(name)
    run = simulate(schedule, ActionCosts(1 / parts, 1 / parts, 1 / parts))
    expected = named(name).bubble(PipelineShape(ranks, schedule.micro_batches, chunks), StageTimes(1.0, 1.0, 1.0))
    assert run.longest - 3 * schedule.micro_batches == pytest.approx(expected, abs=1e-9)


@given(
    st.sampled_from(EXACT),
    st.sampled_from([2, 4, 6]),
    st.integers(2, 4),
    st.floats(0.5, 2),
    st.floats(0.5, 2),
    st.floats(0.05, 0.5),
)
def test_closed_forms_hold_for_unequal_halves(
    name: str, ranks: int, rounds: int, forward: float, backward: float, weight: float
) -> None:
    schedule, chunks = made(name, ranks, rounds)
    parts = held_chunks(name)
    run = simulate(schedule, ActionCosts(forward / parts, backward / parts, weight / parts))
    times = StageTimes(forward, backward, weight)
    waited = run.longest - schedule.micro_batches * times.total
    expected = named(name).bubble(PipelineShape(ranks, schedule.micro_batches, chunks), times)
    assert waited == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 8), (4, 8), (8, 64), (16, 32)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_textbook_bubble(name: str, ranks: int, micro_batches: int) -> None:
    run = simulate(generate(name, ranks, micro_batches))
    assert run.bubble == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))


@pytest.mark.parametrize("name", ["zb-v", "dualpipe", "dualpipe-v"])
@pytest.mark.parametrize("costs", [(1.0, 1.2, 0.7), (1.2, 1.0, 0.7), (1.0, 1.0, 0.5)])
def test_other_closed_forms_are_close(name: str, costs: tuple[float, float, float]) -> None:
    ranks, parts = 8, held_chunks(name)
    schedule, chunks = made(name, ranks, 4)
    run = simulate(schedule, ActionCosts(*(seconds / parts for seconds in costs)))
    work = schedule.micro_batches * sum(costs)
    expected = work + named(name).bubble(PipelineShape(ranks, schedule.micro_batches, chunks), StageTimes(*costs))
    assert run.longest == pytest.approx(expected, rel=0.03)


# Published bubble rates of 1F1B from profiled times with communication (arXiv 2401.10241, table 5).
PROFILED = [(8, 64, 0.124), (8, 24, 0.2347), (16, 48, 0.2552), (16, 128, 0.1251), (32, 128, 0.2168), (32, 256, 0.1352)]


@pytest.mark.parametrize(("ranks", "micro_batches", "published"), PROFILED)
def test_sends_explain_the_published_bubble(ranks: int, micro_batches: int, published: float) -> None:
    run = simulate(generate("1f1b", ranks, micro_batches), hop=0.05)
    assert run.bubble == pytest.approx(published, abs=0.03)
    assert run.bubble > simulate(generate("1f1b", ranks, micro_batches)).bubble


def test_published_order_of_schedules() -> None:
    # The order of table 5 of arXiv 2401.10241.
    longest = [simulate(generate(name, 8, 24)).longest for name in ("zb-h2", "zb-h1", "1f1b")]
    assert longest == sorted(longest)
    assert longest[0] < longest[1] < longest[2]


def test_a_slow_stage_sets_the_pace() -> None:
    even, slow = ActionCosts(), ActionCosts(2.0, 2.0, 2.0)
    schedule = generate("1f1b", 4, 32)
    run = simulate(schedule, [even, even, slow, even])
    assert run.busy(2) == 32 * 6
    filled, drained = 2 * 1, 2 * 2  # the two ranks before it: forward, then both halves of backward
    assert 32 * 6 + filled + drained <= run.makespan <= 32 * 6 + 3 * 3


def test_overlapped_pairs_take_less_time() -> None:
    schedule = generate("dualpipe", 8, 32)
    serialized, over = simulate(schedule), simulate(schedule, overlap=0.8)
    assert over.makespan < 0.85 * serialized.makespan
    assert over.in_flight == serialized.in_flight


def test_the_first_rank_of_gpipe_waits_for_the_gradients_of_the_second() -> None:
    timeline = simulate(generate("gpipe", 2, 2)).timeline[0]
    waits = [(one.end, next_one.start, next_one.slot[0]) for one, next_one in pairwise(timeline)]
    assert [wait for wait in waits if wait[0] < wait[1]] == [(2.0, 5.0, Action(ActionKind.BACKWARD, 0, 0))]


def test_interleaving_takes_complete_rounds() -> None:
    with pytest.raises(ValueError, match="multiple of 4 micro-batches"):
        generate("interleaved", 4, 6, 2)


@pytest.mark.parametrize(
    ("name", "ranks", "micro_batches", "text"),
    [
        ("dualpipe", 3, 12, "even"),
        ("dualpipe", 4, 6, "at least 8"),
        ("dualpipe-v", 4, 6, "at least 8"),
        ("1f1b", 0, 4, "at least one rank"),
        ("gpipe", 2, 0, "at least one"),
        ("zero-bubble", 2, 2, "use one of"),
    ],
)
def test_impossible_schedules_are_rejected(name: str, ranks: int, micro_batches: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        generate(name, ranks, micro_batches)


def test_a_repeated_action_is_found() -> None:
    good = generate("1f1b", 2, 2)
    broken = replace(good, ranks=(good.ranks[0] + good.ranks[0][:1], good.ranks[1]))
    assert schedule_problems(broken) == ["F0.0 occurs 2 times"]


def test_a_missing_action_is_found() -> None:
    good = generate("zb-h1", 2, 2)
    broken = replace(good, ranks=(good.ranks[0][:-1], good.ranks[1]))
    assert schedule_problems(broken) == ["backward of stage 0, micro-batch 1 is neither whole nor in its two halves"]


def test_a_deadlock_is_found() -> None:
    good = generate("1f1b", 2, 2)
    broken = replace(good, ranks=(good.ranks[0][::-1], good.ranks[1]))
    assert schedule_problems(broken) == ["rank 0 waits for ever at B0.1", "rank 1 waits for ever at F1.0"]
    with pytest.raises(ValueError, match="wait for each other"):
        simulate(broken)


def test_activations_may_not_wander() -> None:
    good = generate("gpipe", 2, 1)
    forward, backward = good.ranks[0]
    broken = replace(good, ranks=((forward,), good.ranks[1] + (backward,)))
    assert schedule_problems(broken) == ["B0.0 is on rank 1, its forward pass on rank 0"]


def test_costs_must_be_of_every_stage() -> None:
    with pytest.raises(ValueError, match="1 costs for 2 stages"):
        simulate(generate("gpipe", 2, 1), [ActionCosts()])


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 14))
def test_the_automatic_schedule_keeps_its_limit(ranks: int, rounds: int, limit: int) -> None:
    schedule = automatic(ranks, rounds * ranks, limit)
    assert schedule_problems(schedule) == []
    assert max(simulate(schedule).in_flight) <= limit


@pytest.mark.parametrize("costs", [ActionCosts(), ActionCosts(1.0, 1.1, 0.8), ActionCosts(1.0, 0.9, 0.6)])
def test_the_automatic_schedule_is_no_worse_than_the_handcrafted(costs: ActionCosts) -> None:
    for name, limit in (("zb-h1", 8), ("zb-h2", 15)):
        known = simulate(generate(name, 8, 32), costs, hop=0.1).makespan
        assert simulate(automatic(8, 32, limit, costs, hop=0.1), costs, hop=0.1).makespan <= known + 1e-9


def test_more_memory_never_costs_time() -> None:
    times = [simulate(automatic(6, 24, limit)).makespan for limit in (2, 4, 6, 8, 11)]
    assert times == sorted(times, reverse=True)


MEASURED = [
    ("llama-3-8b", 8, 32, 131072, 11, 0.92),
    ("llama-3-8b", 4, 16, 32768, 5, 0.95),
    ("deepseek-v2-lite", 4, 8, 32768, 6, 0.97),
]
"""A preset, ranks, micro-batches, length and limit; the part of the time that is left of what even costs come to."""


@pytest.mark.parametrize(("name", "ranks", "micro_batches", "length", "limit", "part"), MEASURED)
def test_the_automatic_schedule_of_a_model_is_searched_with_its_own_costs(
    name: str, ranks: int, micro_batches: int, length: int, limit: int, part: float
) -> None:
    asked = ParallelismSpec(
        schedule=PipelineSchedule.AUTOMATIC, activation_limit=limit, stage_balance=StageBalance.FLOPS
    )
    model = PRESETS[name]
    pipeline = pipeline_layout(asked, ranks, micro_batches, model, length)
    assert schedule_problems(pipeline.schedule) == []
    costs = stage_costs(model, length, pipeline.layers)
    found = simulate(pipeline.schedule, costs)
    assert max(found.in_flight) <= limit
    blind = simulate(schedule_of(asked, ranks, micro_batches), costs)
    assert found.makespan < part * blind.makespan
    # What every rank makes by itself, without what it remembers.
    _search.cache_clear()
    assert pipeline_layout(asked, ranks, micro_batches, model, length) == pipeline


def test_a_stages_costs_are_the_operations_of_its_layers() -> None:
    model = PRESETS["deepseek-v2-lite"]
    layers = [range(1), range(1, 14), range(14, 27)]
    first, middle, last = stage_costs(model, 4096, layers)
    forward = sum(stage.forward for stage in (first, middle, last))
    assert forward == pytest.approx(forward_flops(model, 4096, causal=True), rel=1e-12)
    # Attention has no weights: its backward pass is no part of a weights' gradient.
    assert first.backward_weight < first.forward < first.backward_input
    assert last.forward - middle.forward == pytest.approx(2.0 * model.vocab_size * model.hidden_size)
    again = stage_costs(model, 4096, layers, recomputes=True)[1]
    assert again.backward_input == middle.backward_input + middle.forward


@pytest.mark.parametrize(
    "costs", [ActionCosts(), ActionCosts(1.0, 1.375, 0.8125), ActionCosts(1.0, 1.6, 0.5), ActionCosts(1.0, 1.25, 1.25)]
)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 8), (4, 8), (4, 16)])
def test_the_automatic_schedule_waits_as_its_closed_form_says(
    costs: ActionCosts, ranks: int, micro_batches: int
) -> None:
    times = StageTimes(costs.forward, costs.backward_input, costs.backward_weight)
    for limit in range(1, 2 * ranks + 1):
        found = simulate(automatic(ranks, micro_batches, limit, costs), costs).makespan
        numbers = PipelineShape(ranks, micro_batches, activation_limit=limit)
        expected = micro_batches * costs.total + named("automatic").bubble(numbers, times)
        assert expected == pytest.approx(found, rel=0.05 if limit >= ranks else 0.15)


def test_costs_of_the_automatic_schedule_must_be_of_every_stage() -> None:
    with pytest.raises(ValueError, match="1 costs for 2 stages"):
        automatic(2, 4, 2, [ActionCosts()])


def test_a_limit_of_zero_is_rejected() -> None:
    with pytest.raises(ValueError, match="`limit`"):
        automatic(2, 2, 0)


def test_a_schedule_reads_as_text() -> None:
    assert generate("1f1b", 2, 2).render(0) == "F0.0 F0.1 B0.0 B0.1"
    assert generate("zb-h1", 2, 1).render(1) == "F1.0 I1.0 W1.0"
    assert "+" in generate("dualpipe", 2, 4).render(0)
