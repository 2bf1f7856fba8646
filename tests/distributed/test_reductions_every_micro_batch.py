"""`dataParallel.reduceEveryMicroBatch`: what FSDP stores and sends if it reduces gradients in each micro-batch."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.planner.cost.memory import worst_stage
from meshwright.planner.workload import TrainingJob
from meshwright.protocol.run_config import NativeRun
from tests.distributed.activation_cases import most_in_a_step
from tests.distributed.cases import count_a_step
from tests.distributed.comm_counter import Traffic
from tests.distributed.configs import small_run
from tests.distributed.data_parallel_cases import Held, measure_memory
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_memory import planned
from tests.tiers import mostly_long

EACH = {"reduce_every_micro_batch": True}
MICRO_BATCHES = 4
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "kv_heads": 4}


def run_of(*, each: bool, replicas: dict[str, Any] | None = None, **options: Any) -> NativeRun:
    chosen = {**(replicas or {}), **(EACH if each else {})}
    return small_run(**{"micro_batches": MICRO_BATCHES, "batch": 16, **options}, replicas=chosen)


@pytest.mark.parametrize("ranks", mostly_long([2, 4], lambda ranks: ranks == 2))
@pytest.mark.parametrize("zero", mostly_long([2, 3], lambda zero: zero == 3))
def test_between_micro_batches_ranks_have_shards_of_gradients(pool: RankPool, zero: int, ranks: int) -> None:
    """Live bytes after the first micro-batch, against the planner's account, and full gradients without the field.

    Stage 2 also has the full parameters that it gathered, for the next micro-batch.
    """
    for each, form in ((True, 16 / ranks), (False, 12 / ranks + 4)):
        run = run_of(each=each, data=ranks, zero=zero, layers=4, **WIDE)
        job = TrainingJob.from_parts(run.architecture, run.training, run.parallelism, run.data_parallel)
        account = worst_stage(job.work, job.strategy(run.layout, run.micro_batches), job.runtime)
        assert account.states == pytest.approx(form * run.architecture.parameters, rel=0.05)
        gathered = 4 * run.architecture.parameters if zero == 2 else 0
        held: list[Held] = pool.run(measure_memory, run, timeout=240)
        for one in held:
            assert one.between == pytest.approx(account.states + gathered, rel=0.05)


@pytest.mark.long
def test_a_step_needs_a_shard_of_gradients_and_one_unit(pool: RankPool) -> None:
    """The most bytes that are alive in a step are those that the planner counts."""
    sizes = []
    for each in (True, False):
        run = run_of(each=each, data=2, zero=3, layers=8, length=8, batch=8, **WIDE)
        sizes.append(planned(run).counted)
        assert pool.run(most_in_a_step, run, timeout=240) == pytest.approx([sizes[-1]] * 2, rel=0.05)
    assert sizes[0] < 0.9 * sizes[1]


@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2, "zero": 2},
        pytest.param({"data": 2, "zero": 3}, marks=pytest.mark.long),
        {"data": 4, "zero": 3, "replicas": {"shard_size": 2}},
        pytest.param({"data": 4, "expert": 2, "zero": 3, "mixture": "Mixtral"}, marks=pytest.mark.long),
        pytest.param({"data": 2, "pipeline": 2, "zero": 3}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_only_reduce_scatters_are_as_many_as_micro_batches(pool: RankPool, layout: dict[str, Any]) -> None:
    """Copies of a set of shards (HSDP) add their sums once in a step."""
    once, each = (traffic_of(pool, run_of(each=each, **layout)) for each in (False, True))
    for before, after in zip(once, each, strict=True):
        for kind, (calls, size) in before.as_dict().items():
            times = MICRO_BATCHES if kind.startswith("reduce-scatter") else 1
            assert after.as_dict()[kind] == (times * calls, times * size), kind
        assert set(after.as_dict()) == set(before.as_dict())
        assert any(kind.startswith("reduce-scatter") for kind in after.as_dict())


@pytest.mark.parametrize(
    ("schedule", "replicas"),
    mostly_long(
        [("ZBH1", {}), ("ZBH1", {"shard_size": 2}), ("ZBV", {}), ("ZBV", {"shard_size": 2})],
        lambda case: case == ("ZBH1", {}),
    ),
    ids=str,
)
def test_a_split_backward_pass_reduces_after_its_second_half(
    pool: RankPool, schedule: str, replicas: dict[str, Any]
) -> None:
    """Gradients of look-ups and vectors are computed in the first half, and some micro-batches' are reduced together.

    With copies of a set of shards each reduction has all parameters.
    """
    options = {"data": 4, "pipeline": 2, "zero": 2, "layers": 4, "parallelism": {"schedule": schedule}}
    once, each = (traffic_of(pool, run_of(each=each, replicas=replicas, **options)) for each in (False, True))
    for before, after in zip(once, each, strict=True):
        assert set(after.as_dict()) == set(before.as_dict())
        for kind, (calls, size) in before.as_dict().items():
            if not kind.startswith("reduce-scatter"):
                assert after.as_dict()[kind] == (calls, size), kind
                continue
            assert after.as_dict()[kind][0] == MICRO_BATCHES * calls
            assert size < after.as_dict()[kind][1] <= MICRO_BATCHES * size
            assert not replicas or after.as_dict()[kind][1] == MICRO_BATCHES * size


def traffic_of(pool: RankPool, run: NativeRun) -> list[Traffic]:
    ranks: list[Traffic] = pool.run(count_a_step, run, timeout=240)
    return ranks
