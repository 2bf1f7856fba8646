"""The sizes that an elastic job may have, and how each divides the batch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.rules.edits import Effect, effect_of, with_live_fields
from meshwright.rules.elastic import MAX_SIZES, fixed_size, resized, sizes, smallest_size, wanted_replicas
from meshwright.rules.revision import revision_of_fields
from meshwright.rules.validation import check_spec
from tests.rules.specs import COMMAND, GOOD, changed


def spec(base: dict[str, Any] = GOOD, **changes: Any) -> ParallelTrainingJobSpec:
    """A valid elastic job with these changes; `__` stands for a dot."""
    paths = {path.replace("__", "."): value for path, value in changes.items()}
    body = changed(base, {"elastic": {}, "checkpoint": {"claimName": "c"}, **paths})
    found = ParallelTrainingJobSpec.model_validate(body)
    assert check_spec(found) == []
    return found


def batch(size: ParallelTrainingJobSpec | None) -> tuple[int, int | None] | None:
    """Replicas and micro-batches of a size."""
    return (size.replicas, size.parallelism.micro_batches) if size is not None else None


def test_without_elastic_the_size_is_fixed() -> None:
    fixed = ParallelTrainingJobSpec.model_validate(GOOD)
    assert (wanted_replicas(fixed), smallest_size(fixed)) == (2, 2)


def test_the_wanted_size_is_replicas_or_with_fill_the_largest() -> None:
    assert wanted_replicas(spec(elastic={"maxReplicas": 8})) == 2
    assert wanted_replicas(spec(elastic={"maxReplicas": 8, "fill": True})) == 8
    assert smallest_size(spec(elastic={"minReplicas": 2})) == 2


@pytest.mark.parametrize(
    ("replicas", "micro_batches"),
    # A batch of 16 sequences. The full size has 4 micro-batches of one sequence in each of 4 replicas.
    [(4, 4), (2, 8), (1, 16), (3, None), (8, 2), (16, 1), (32, None)],
)
def test_fewer_replicas_have_more_micro_batches_of_the_same_size(replicas: int, micro_batches: int | None) -> None:
    found = batch(resized(spec(elastic={"maxReplicas": 4}, training__globalBatchSize=16), replicas))
    assert found == ((replicas, micro_batches) if micro_batches else None)


def test_if_the_micro_batches_do_not_divide_they_are_smaller() -> None:
    job = spec(
        replicas=4, parallelism__pipeline=1, parallelism__microBatches=1, training__globalBatchSize=12, elastic={}
    )
    # Four micro-batches of three sequences; at three replicas two each, of two sequences.
    assert [batch(resized(job, count)) for count in (4, 3, 2, 1)] == [(4, 1), (3, 2), (2, 2), (1, 4)]


def test_an_edit_of_replicas_makes_no_micro_batch_larger_than_at_the_start() -> None:
    started = spec(replicas=4, training__globalBatchSize=16)
    edited = spec(replicas=1, training__globalBatchSize=16)
    assert batch(resized(started, 4)) == (4, 4)
    assert batch(resized(edited, 1, total_micro_batches=16)) == (1, 16)


def test_chosen_micro_batches_are_those_of_the_start() -> None:
    job = spec(parallelism__microBatches=None)
    assert batch(resized(job, 2)) == (2, None), "the planner chooses them before the start"
    assert batch(resized(job, 1, total_micro_batches=8)) == (1, 8)


def test_a_command_has_any_size() -> None:
    job = spec(COMMAND, checkpoint=None)
    assert [batch(resized(job, count)) for count in (7, 1)] == [(7, None), (1, None)]
    assert sizes(job, 5) == [5, 4, 3, 2, 1]


def test_a_size_is_fixed() -> None:
    assert fixed_size(spec(), 1).elastic is None
    assert batch(fixed_size(spec(), 1)) == (1, 4)
    assert batch(fixed_size(spec(), 1, 8)) == (1, 8)


def test_sizes_divide_the_batch() -> None:
    job = spec(training__globalBatchSize=24, elastic={"maxReplicas": 12}, parallelism__microBatches=2)
    assert sizes(job, 12) == [12, 8, 6, 4, 3, 2, 1]
    assert sizes(job, 5) == [4, 3, 2, 1]
    assert sizes(job, 12, smallest=6) == [12, 8, 6]
    assert sizes(job, 1, smallest=2) == []


@example(17, 1)
@given(st.integers(1, 5000), st.integers(1, 64))
def test_many_sizes_are_thinned_out_downward(largest: int, smallest: int) -> None:
    found = sizes(spec(COMMAND, checkpoint=None), largest, smallest)
    assert len(found) <= MAX_SIZES
    assert found == sorted(set(found), reverse=True)
    assert all(smallest <= count <= largest for count in found)
    if smallest <= largest:
        assert (found[0], found[-1]) == (largest, smallest)
        assert found[: MAX_SIZES // 2] == list(range(largest, max(largest - MAX_SIZES // 2, smallest - 1), -1))


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 4), st.integers(1, 4))
def test_every_size_keeps_the_batch_and_enlarges_no_micro_batch(full: int, count: int, micro: int, each: int) -> None:
    total = full * micro * each
    job = spec(
        **{"replicas": full, "elastic": {}, "parallelism__pipeline": 1, "parallelism__microBatches": micro},
        training__globalBatchSize=total,
    )
    found = resized(job, count)
    if found is None:
        assert total % count or count * -(-full * micro // count) > total
        return
    assert found.parallelism.micro_batches is not None
    assert total % (found.parallelism.micro_batches * count) == 0
    assert total // (found.parallelism.micro_batches * count) <= each
    assert check_spec(found) == []


def scaled(rule: str, **changes: Any) -> ParallelTrainingJobSpec:
    """A job with 16 sequences and a learning rate of 0.01 at two replicas."""
    rates = {"learningRate": 0.01, "minLearningRate": 0.001, "warmupSteps": 3, "decay": "Linear", "decaySteps": 5}
    return spec(
        elastic={"maxReplicas": 9, "scaledBatch": {"replicas": 2, "learningRate": rule}},
        training__globalBatchSize=16,
        training__optimizer=rates,
        **changes,
    )


@pytest.mark.parametrize(
    ("rule", "factor"), [("Constant", 1.0), ("Linear", 1.5), ("SquareRoot", 1.5**0.5)], ids=lambda value: str(value)
)
def test_a_scaled_batch_follows_the_replicas_and_the_rates_the_rule(rule: str, factor: float) -> None:
    found = resized(scaled(rule), 3)
    assert found is not None
    assert found.training is not None
    assert (found.replicas, found.training.global_batch_size, found.parallelism.micro_batches) == (3, 24, 4)
    assert found.training.optimizer.learning_rate == pytest.approx(0.01 * factor)
    assert found.training.optimizer.min_learning_rate == pytest.approx(0.001 * factor)
    schedule = ("warmup_steps", "decay", "decay_steps")
    assert [getattr(found.training.optimizer, name) for name in schedule] == [3, "Linear", 5]
    assert check_spec(found) == []
    same = resized(scaled(rule), 2)
    assert same is not None
    assert same.training == scaled(rule).training


def test_with_a_scaled_batch_any_number_of_replicas_is_a_size() -> None:
    assert sizes(scaled("Linear", replicas=7), 7) == [7, 6, 5, 4, 3, 2, 1]


def test_an_edit_of_the_scaled_batch_restarts_the_gang_and_one_of_other_members_does_not() -> None:
    running = scaled("Linear")
    other = scaled("SquareRoot")
    plain = spec(elastic={"maxReplicas": 9}, training__globalBatchSize=16, training__optimizer={"learningRate": 0.01})
    revisions = {revision_of_fields(one.wire()) for one in (running, other, plain)}
    assert len(revisions) == 3
    assert running.elastic is not None
    assert other.elastic is not None
    smaller = running.model_copy(update={"elastic": running.elastic.model_copy(update={"max_replicas": 4})})
    assert revision_of_fields(smaller.wire()) == revision_of_fields(running.wire())
    assert effect_of("elastic.scaledBatch.learningRate") is Effect.RESTART
    assert effect_of("elastic.maxReplicas") is Effect.LIVE
    # Until the restart, what runs keeps the rule with which it started.
    live = with_live_fields(
        running, other.model_copy(update={"elastic": other.elastic.model_copy(update={"fill": True})})
    )
    assert live.elastic is not None
    assert live.elastic.fill
    assert live.elastic.scaled_batch == running.elastic.scaled_batch
