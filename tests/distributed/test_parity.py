"""Every layout against one process: the same seed and samples give the same loss, gradients and parameters."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.api.precision import Precision
from tests.distributed.cases import Trained, train_on_random_tokens
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.tiers import mostly_long

STEPS = 3

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"data": 2},
    "dp4": {"data": 4},
    "zero2": {"data": 2, "zero": 2},
    "zero3": {"data": 2, "zero": 3},
    "tp": {"tensor": 2, "sequence": False},
    "tp-sp": {"tensor": 2},
    "pp": {"pipeline": 2},
    "pp3": {"pipeline": 3, "micro_batches": 4},
    "tp-pp": {"tensor": 2, "pipeline": 2, "sequence": False},
    "tp-sp-pp": {"tensor": 2, "pipeline": 2, "micro_batches": 4},
    "tp-sp-dp": {"tensor": 2, "data": 2},
    "tp-zero2": {"tensor": 2, "data": 2, "zero": 2, "sequence": False},
    "tp-sp-zero3": {"tensor": 2, "data": 2, "zero": 3},
    "pp-dp": {"pipeline": 2, "data": 2},
    "pp-zero2": {"pipeline": 2, "data": 2, "zero": 2},
    "pp-zero3": {"pipeline": 2, "data": 2, "zero": 3},
    "tp-sp-pp-dp": {"tensor": 2, "pipeline": 2, "data": 2},
    "tp-sp-pp-zero3": {"tensor": 2, "pipeline": 2, "data": 2, "zero": 3},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "tied-zero3": {"data": 2, "zero": 3, "tie_embeddings": True},
    "tied-tp": {"tensor": 2, "tie_embeddings": True},
    "uneven-shards-zero2": {"data": 2, "zero": 2, "intermediate_size": 45, "vocab_size": 259},
    "no-clipping": {"tensor": 2, "data": 2, "clip": 0.0},
    "one-kv-head-each": {"tensor": 2, "kv_heads": 4, "heads": 4},
}


@pytest.fixture(scope="module")
def reference(pool: RankPool) -> Trained:
    return one_process(pool)


def one_process(pool: RankPool, **model: Any) -> Trained:
    (trained,) = pool.run(train_on_random_tokens, small_run(**model), STEPS)
    return trained


def largest_error(got: dict[str, Any], want: dict[str, Any]) -> float:
    return max(float((got[name] - want[name]).abs().max() / want[name].abs().max()) for name in got)


def check_parity(ranks: list[Trained], want: Trained) -> None:
    assert set().union(*(rank.gradients for rank in ranks)) == set(want.gradients)
    for rank in ranks:
        assert largest_error(rank.gradients, want.gradients) <= 1e-5
        # Adam divides by the gradient's own size, which blows up rounding where a gradient is almost 0.
        assert largest_error(rank.parameters, want.parameters) <= 1e-3
        for got, expected in zip(rank.results, want.results, strict=True):
            assert got.loss == pytest.approx(expected.loss, rel=1e-6)
            assert got.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-5)
            assert got.learning_rate == expected.learning_rate


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_matches_one_process(pool: RankPool, reference: Trained, name: str) -> None:
    layout = LAYOUTS[name]
    # How a batch is cut into micro-batches does not change what is computed, so one reference serves all.
    check_parity(pool.run(train_on_random_tokens, small_run(**layout), STEPS), reference)


# The parity matrix has tied embeddings in both layouts.
@pytest.mark.parametrize(
    "name", mostly_long(VARIANTS, lambda name: name in ("uneven-shards-zero2", "one-kv-head-each"))
)
def test_variant_matches_one_process(pool: RankPool, name: str) -> None:
    variant = dict(VARIANTS[name])
    split = {key: variant.pop(key) for key in ("tensor", "data", "zero") if key in variant}
    ranks = pool.run(train_on_random_tokens, small_run(**split, **variant), STEPS)
    check_parity(ranks, one_process(pool, **variant))


@pytest.mark.long  # the others compare the numbers of every rank with one process
def test_every_rank_sees_the_same_numbers(pool: RankPool) -> None:
    ranks = pool.run(train_on_random_tokens, small_run(2, 2, 2), STEPS)
    assert all(rank.results == ranks[0].results for rank in ranks)


@pytest.mark.long
def test_zero_and_tensor_parallelism_really_split_the_model(pool: RankPool, reference: Trained) -> None:
    (full,) = {reference.local_elements}
    for layout, parts in (({"data": 2, "zero": 3}, 2), ({"tensor": 2, "data": 2, "zero": 3}, 4)):
        ranks = pool.run(train_on_random_tokens, small_run(**layout), 1)
        assert max(rank.local_elements for rank in ranks) < full / parts * 1.05


@pytest.mark.parametrize("name", mostly_long(["zero2", "tp-sp", "tp-sp-pp-dp"], lambda name: name == "tp-sp-pp-dp"))
def test_bf16_stays_close_to_one_process(pool: RankPool, name: str) -> None:
    want = one_process(pool, precision=Precision.BF16)
    ranks = pool.run(train_on_random_tokens, small_run(**LAYOUTS[name], precision=Precision.BF16), STEPS)
    for rank in ranks:
        assert largest_error(rank.gradients, want.gradients) <= 5e-2
        for got, expected in zip(rank.results, want.results, strict=True):
            assert got.loss == pytest.approx(expected.loss, rel=2e-3)


def test_bf16_differs_from_fp32_but_little(pool: RankPool, reference: Trained) -> None:
    trained = one_process(pool, precision=Precision.BF16)
    losses = [(got.loss, want.loss) for got, want in zip(trained.results, reference.results, strict=True)]
    assert all(got != want and got == pytest.approx(want, rel=1e-2) for got, want in losses)
