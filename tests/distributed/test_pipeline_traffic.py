"""What the ranks of every pipeline send each other: as many messages and bytes as the schedules' papers say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cases import count_a_step
from tests.distributed.comm_counter import Traffic
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_traffic import without_agreement
from tests.parity.cases.pipeline import SCHEDULES

RANKS, MICRO_BATCHES, LAYERS = 4, 8, 8
HIDDEN, VOCABULARY, LENGTH, BATCH = 32, 260, 16, 8
FP32 = 4
HIDDEN_STATES = FP32 * BATCH // MICRO_BATCHES * LENGTH * HIDDEN
TABLE = FP32 * VOCABULARY * HIDDEN


def counted(pool: RankPool, name: str, **more: Any) -> list[dict[str, tuple[int, int]]]:
    """What each rank sends and receives, beside the step's one reduction."""
    fields, _ = SCHEDULES[name]
    layout = {"pipeline": RANKS, "micro_batches": MICRO_BATCHES, "layers": LAYERS}
    ranks: list[Traffic] = pool.run(count_a_step, small_run(**{**layout, **more}, parallelism=fields))
    return [without_agreement(traffic, len(ranks)) for traffic in ranks]


def both_ways(messages: int, size: int, ranks: int = RANKS) -> dict[str, tuple[int, int]]:
    return {f"send/{ranks}": (messages, size), f"recv/{ranks}": (messages, size)}


@pytest.mark.parametrize(
    ("name", "outer", "inner"),
    [
        # Messages for each micro-batch of an outer rank, and of one between two others.
        ("1F1B", 1, 2),
        # arXiv 2104.04473, section 2.2: as many times as many as a rank has stages, but for the model's two ends.
        pytest.param("interleaved 1F1B", 3, 4, marks=pytest.mark.long),
        ("looped BFS", 3, 4),
        # arXiv 2405.15362: twice as many; where the V turns both stages lie on one rank.
        ("ZB-V", 2, 4),
        pytest.param("DualPipeV", 2, 4, marks=pytest.mark.long),
    ],
)
def test_a_message_goes_each_way_for_every_stage_and_micro_batch(
    pool: RankPool, name: str, outer: int, inner: int
) -> None:
    first, *between, last = counted(pool, name)
    assert first == last == both_ways(outer * MICRO_BATCHES, outer * MICRO_BATCHES * HIDDEN_STATES)
    for rank in between:
        assert rank == both_ways(inner * MICRO_BATCHES, inner * MICRO_BATCHES * HIDDEN_STATES)


def test_the_two_directions_of_dual_pipe_send_as_much_as_one_and_sum_their_copies(pool: RankPool) -> None:
    """arXiv 2412.19437, section 3.2.1: half of the micro-batches each way, every parameter on two ranks."""
    architecture = small_run(layers=LAYERS).architecture
    assert architecture is not None
    two_stages = FP32 * LAYERS // 2 * architecture.layer_parameters
    first, *between, last = counted(pool, "DualPipe")
    ends = two_stages + 2 * TABLE + FP32 * HIDDEN
    assert first == last == both_ways(MICRO_BATCHES + 1, MICRO_BATCHES * HIDDEN_STATES + ends)
    for rank in between:
        assert rank == both_ways(2 * MICRO_BATCHES + 1, 2 * MICRO_BATCHES * HIDDEN_STATES + two_stages)


def test_first_and_last_stage_exchange_the_gradient_of_tied_embeddings_once(pool: RankPool) -> None:
    """arXiv 1909.08053: the two copies of the table take the same step."""
    first, between, last = counted(pool, "1F1B", pipeline=3, layers=3, tie_embeddings=True)
    assert first == last == both_ways(MICRO_BATCHES + 1, MICRO_BATCHES * HIDDEN_STATES + TABLE, 3)
    assert between == both_ways(2 * MICRO_BATCHES, 2 * MICRO_BATCHES * HIDDEN_STATES, 3)


def test_where_one_rank_has_both_ends_of_the_model_a_tied_table_costs_no_message(pool: RankPool) -> None:
    layout = {"pipeline": 2, "layers": 4}
    assert counted(pool, "ZB-V", **layout, tie_embeddings=True) == counted(pool, "ZB-V", **layout)
