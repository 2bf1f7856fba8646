"""Live bytes of a rank's tensors against the planner's account of memory, which is asked before a job is admitted."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.planner.cost.memory import Memory, memory_by_stage
from meshwright.planner.workload import TrainingJob
from meshwright.protocol.run_config import NativeRun
from tests.distributed.activation_cases import most_in_a_step, most_versions
from tests.distributed.configs import small_run
from tests.distributed.data_parallel_cases import measure_memory
from tests.distributed.rank_pool import RankPool
from tests.tiers import mostly_long

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512, "kv_heads": 4}


FP32 = 4


def plans(run: NativeRun) -> list[Memory]:
    """Of the ranks of each stage."""
    job = TrainingJob.from_parts(run.architecture, run.training, run.parallelism, run.data_parallel)
    return memory_by_stage(job.work, job.strategy(run.layout, run.micro_batches), job.runtime)


def planned(run: NativeRun) -> Memory:
    (memory,) = plans(run)
    return memory


@pytest.mark.parametrize(
    ("layout", "bytes_a_parameter"),
    [
        # In fp32: parameters 4, gradients 4, moments 8.
        ({"tensor": 2, "sequence": False}, 16 / 2),
        ({"tensor": 2}, 16 / 2),
        pytest.param({"tensor": 4, "sequence": False}, 16 / 4, marks=pytest.mark.long),
        ({"tensor": 4}, 16 / 4),
        ({"tensor": 2, "data": 2, "zero": 3}, 16 / 2 / 2),
    ],
    ids=str,
)
def test_a_tensor_group_divides_states(pool: RankPool, layout: dict[str, Any], bytes_a_parameter: float) -> None:
    """As the optimizer begins. Matrices are split (arXiv 1909.08053, section 3); norms are whole on every rank."""
    run = small_run(**layout, micro_batches=1, layers=2, **WIDE)
    want = planned(run).states
    assert want == pytest.approx(bytes_a_parameter * run.architecture.parameters, rel=0.05)
    for held in pool.run(measure_memory, run):
        assert held.at_update == pytest.approx(want, rel=0.05)


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "kept"), [("PipeDream", 1, [3, 2, 1]), ("PipeDream2BW", 4, [2] * 3)]
)
def test_a_stage_keeps_as_many_versions_of_its_weights_as_are_in_use(
    pool: RankPool, schedule: str, micro_batches: int, kept: list[int]
) -> None:
    """Of stage s at most P - s (arXiv 1806.03377, section 3.3), or two (arXiv 2006.09503, section 3.1)."""
    run = small_run(
        pipeline=3, micro_batches=micro_batches, layers=3, clip=0.0, parallelism={"schedule": schedule}, **WIDE
    )
    layer = FP32 * run.architecture.layer_parameters
    table = FP32 * run.architecture.vocab_size * run.architecture.hidden_size
    stages = [table + layer, layer, layer + table + FP32 * run.architecture.hidden_size]
    answers = pool.run(most_versions, run)
    assert [versions for versions, _ in answers] == [n * size for n, size in zip(kept, stages, strict=True)]
    for (versions, weights), memory in zip(answers, plans(run), strict=True):
        assert versions + weights == pytest.approx(memory.parameters, rel=0.05)


def test_inside_a_step_zero_3_has_few_layers_gathered_however_many_there_are(pool: RankPool) -> None:
    """arXiv 1910.02054, section 5.3: a layer's parameters are gathered where it computes, and freed."""
    wide = {"hidden_size": 128, "intermediate_size": 256, "kv_heads": 4}
    runs = [small_run(data=2, zero=3, micro_batches=1, layers=n, length=8, batch=2, **wide) for n in (4, 6)]
    few, many = (pool.run(most_in_a_step, run) for run in runs)
    plans = [planned(run) for run in runs]
    for measured, plan in zip((few, many), plans, strict=True):
        assert measured == pytest.approx([plan.counted] * 2, rel=0.05)
    # Were more layers gathered at the peak, they would take half as much again as what is kept of them.
    states = plans[1].states - plans[0].states
    assert [most - least for least, most in zip(few, many, strict=True)] == pytest.approx([states] * 2, rel=0.05)


@pytest.mark.parametrize("length", mostly_long([8, 64], lambda length: length == 8))
def test_gradients_of_a_lone_rank_take_memory_that_activations_leave(pool: RankPool, length: int) -> None:
    """One micro-batch begins without gradients, and makes them while it frees activations: fewer than them, or more."""
    wide = {"hidden_size": 128, "intermediate_size": 256, "kv_heads": 4, "layers": 4}
    one, two = (small_run(micro_batches=count, length=length, batch=2, **wide) for count in (1, 2))
    assert planned(one).reused > 0.0 == planned(two).reused
    for run in (one, two):
        (measured,) = pool.run(most_in_a_step, run)
        assert measured == pytest.approx(planned(run).counted, rel=0.05)
