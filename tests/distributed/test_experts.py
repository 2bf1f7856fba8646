"""Spread experts: what they send, how their checkpoints change layout, and the seam for schedules that overlap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.data import Packing
from meshwright.api.precision import Precision
from meshwright_worker.checkpoint.full_tensors import find_checkpoint
from meshwright_worker.data.batch import IGNORED, Batch
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.inference.model import load_full_model
from meshwright_worker.inference.sampling import sample
from meshwright_worker.rank.task import Outcome, RankTask
from meshwright_worker.trainer.train import build_trainer
from tests.distributed.cases import count_a_step, load_only, samples_of, train_fully, train_on_random_tokens
from tests.distributed.comm_counter import Traffic
from tests.distributed.configs import small_run
from tests.distributed.expert_cases import biased_batch, mixture_by_halves, routed_rows
from tests.distributed.rank_pool import RankPool
from tests.tiers import mostly_long

LAYERS, HIDDEN, LENGTH, BATCH, EXPERTS, PER_TOKEN = 3, 32, 16, 8, 4, 2
FP32, INT64, FP64 = 4, 8, 8
TALLIES = LAYERS * (EXPERTS + 3) * FP64
AGREEMENT = 5 * FP64


def measured(pool: RankPool, **layout: Any) -> list[Traffic]:
    ranks: list[Traffic] = pool.run(count_a_step, small_run(mixture="Mixtral", **layout))
    return ranks


def router_gradient(task: RankTask, predicted: int) -> torch.Tensor:
    """What the balancing losses alone give to a router, when so many tokens of each row have a target."""
    with join_mesh(task) as mesh:
        gradients = []
        for weight in (1.0, 0.0):
            model = task.run.architecture
            assert model is not None
            assert model.mixture is not None
            mixture = model.mixture.model_copy(update={"auxiliary_weight": weight, "z_loss_weight": weight / 10})
            run = task.run.model_copy(update={"architecture": model.model_copy(update={"mixture": mixture})})
            trainer = build_trainer(run, mesh)
            seen: dict[str, torch.Tensor] = {}

            def keep(found: list[torch.Tensor], rate: float, trainer: Any = trainer, seen: Any = seen) -> None:
                seen.update((shard.name, one.clone()) for shard, one in zip(trainer.shards, found, strict=True))
                trainer.optimizer.clear_gradients()

            trainer.optimizer.step = keep
            batch = Batch.of(samples_of(1, BATCH // run.data_parallel, LENGTH, model.vocab_size))
            targets = batch.targets.clone()
            targets[:, predicted:] = IGNORED
            trainer.step(1, replace(batch, targets=targets))
            gradients.append(seen["layers.0.feed_forward.router.weight"])
        return gradients[0] - gradients[1]


@pytest.mark.parametrize("layout", mostly_long([{}, {"data": 2}], bool), ids=str)
def test_balancing_counts_every_token_with_any_targets(pool: RankPool, layout: dict[str, int]) -> None:
    run = small_run(mixture="Mixtral", precision=Precision.FP64, clip=0.0, packing=Packing.DOCUMENTS, **layout)
    whole, *others = [pool.run(router_gradient, run, predicted)[0] for predicted in (LENGTH, 4, 0)]
    assert float(whole.abs().max()) > 0
    for other in others:
        torch.testing.assert_close(other, whole, rtol=1e-9, atol=1e-15)


def parameters() -> tuple[int, int]:
    """Of the small mixture: those of experts, and all others."""
    architecture = small_run(mixture="Mixtral").architecture
    assert architecture is not None
    experts = LAYERS * EXPERTS * 3 * HIDDEN * 24
    return experts, architecture.parameters - experts


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_rows_go_to_their_experts_and_back_and_gradients_the_same_way(pool: RankPool, micro_batches: int) -> None:
    """GShard, arXiv 2006.16668, section 3.2: two all-to-alls forward and two backward, of a row for each choice."""
    ranks = measured(pool, data=2, expert=2, micro_batches=micro_batches)
    rows = sum(traffic.payload["all-to-all", 2] for traffic in ranks)
    told = 2 * LAYERS * micro_batches * EXPERTS * INT64
    sent = 4 * LAYERS * BATCH * LENGTH * PER_TOKEN * HIDDEN * FP32
    assert rows == sent + told
    for traffic in ranks:
        assert traffic.calls["all-to-all", 2] == 5 * LAYERS * micro_batches


def test_only_the_gradients_of_other_parameters_are_summed_over_replicas(pool: RankPool) -> None:
    _, others = parameters()
    for traffic in measured(pool, data=2, expert=2):
        assert traffic.payload["all-reduce", 2] == FP32 * others + AGREEMENT + TALLIES


def test_experts_on_several_ranks_are_summed_over_only_those(pool: RankPool) -> None:
    experts, others = parameters()
    for traffic in measured(pool, data=4, expert=2):
        assert traffic.payload["all-reduce", 4] == FP32 * others + AGREEMENT + TALLIES
        assert traffic.payload["all-reduce", 2] == FP32 * experts // 2


def test_no_row_is_lost_and_sequence_parallel_ranks_send_only_their_own(pool: RankPool) -> None:
    """DeepSpeed-TED, arXiv 2303.06318, section 5.1: without its split every rank of a tensor group sends every row."""
    choices = 2 * LENGTH * PER_TOKEN
    whole = pool.run(routed_rows, small_run(data=2, expert=2, tensor=2, sequence=False, mixture="Mixtral"))
    slices = pool.run(routed_rows, small_run(data=2, expert=2, tensor=2, mixture="Mixtral"))
    for layer in range(LAYERS):
        assert [rank[layer][0] for rank in whole] == [choices] * 4
        assert [rank[layer][0] for rank in slices] == [choices // 2] * 4
        for ranks in (whole, slices):
            # Both expert ranks of a tensor coordinate together compute each row of both replicas once.
            assert ranks[0][layer][2] + ranks[2][layer][2] == 2 * choices


def test_the_steps_of_a_mixture_give_what_forward_does(pool: RankPool) -> None:
    run = small_run(data=2, expert=2, mixture="DeepSeek-V2", precision=Precision.FP64)
    for differences in pool.run(mixture_by_halves, run):
        assert len(differences) > 4
        assert max(differences.values()) <= 1e-14


def test_a_bias_evens_loads_out(pool: RankPool) -> None:
    """arXiv 2408.15664: balanced by the bias alone, without a gradient for it."""
    run = small_run(data=2, expert=2, mixture="DeepSeek-V3", steps=20)
    one, other = pool.run(biased_batch, run, 16)
    assert one == other
    first, last = one[0], one[-1]
    assert min(first) > 1.7
    assert max(last) < 1.6


@pytest.mark.long
def test_bf16_stays_close_to_one_process(pool: RankPool) -> None:
    run = {"mixture": "DeepSeek-V3", "precision": Precision.BF16}
    (want,) = pool.run(train_on_random_tokens, small_run(**run), 2)
    for rank in pool.run(train_on_random_tokens, small_run(data=2, expert=2, zero=3, **run), 2):
        for got, expected in zip(rank.results, want.results, strict=True):
            assert got.loss == pytest.approx(expected.loss, rel=2e-3)
            assert got.gradient_norm == pytest.approx(expected.gradient_norm, rel=5e-2)


def test_text_is_generated_from_a_mixtures_checkpoint(pool: RankPool, tmp_path: Path, text: Path) -> None:
    run = small_run(mixture="Switch", steps=2, every=2, data=2, expert=2)
    pool.run(train_fully, run, checkpoint_dir=tmp_path, data_dir=text)
    checkpoint, manifest = find_checkpoint(tmp_path)
    assert manifest.architecture == run.architecture
    assert len(sample(load_full_model(checkpoint, manifest, Precision.FP32, 16), [1, 2, 3], 4, 0.0, seed=0)) == 4


def whole_tensors(pool: RankPool, root: Path, text: Path, **layout: Any) -> dict[str, torch.Tensor]:
    run = small_run(mixture="DeepSeek-V3", **layout)
    answers = pool.run(load_only, run, checkpoint_dir=root, data_dir=text)
    assert {step for step, _ in answers} == {2}
    found: dict[str, torch.Tensor] = {}
    for _, tensors in answers:
        for name, tensor in tensors.items():
            assert torch.equal(found.setdefault(name, tensor), tensor), name
    return found


@pytest.mark.long
def test_a_checkpoint_of_spread_experts_loads_in_any_layout(pool: RankPool, tmp_path: Path, text: Path) -> None:
    writer = {"data": 2, "expert": 2}
    run = small_run(mixture="DeepSeek-V3", steps=2, every=2, **writer)
    assert {outcome for outcome, _ in pool.run(train_fully, run, checkpoint_dir=tmp_path, data_dir=text)} == {
        Outcome.COMPLETE
    }
    want = whole_tensors(pool, tmp_path, text, **writer)
    assert want["model.layers.1.feed_forward.experts.gate"].shape == (16, 12, HIDDEN)
    assert want["model.layers.1.feed_forward.router.bias"].abs().sum() > 0
    assert want["optimizer.layers.2.feed_forward.experts.down.exp_avg"].abs().sum() > 0
    readers = [
        {},
        {"data": 4, "expert": 4, "tensor": 2},
        {"data": 2, "expert": 2, "pipeline": 2, "tensor": 2, "zero": 3},
        {"data": 4, "expert": 2, "zero": 2},
    ]
    for reader in readers:
        got = whole_tensors(pool, tmp_path, text, **reader)
        assert set(got) == set(want), reader
        assert all(torch.equal(got[name], want[name]) for name in want), reader


@pytest.mark.parametrize(
    "layout",
    mostly_long([{"data": 4, "expert": 4}, {"data": 4, "expert": 4, "tensor": 2}], lambda layout: len(layout) == 2),
    ids=str,
)
def test_training_resumes_in_another_layout_with_the_same_results(
    pool: RankPool, tmp_path: Path, text: Path, layout: dict[str, int]
) -> None:
    first = small_run(mixture="DeepSeek-V3", steps=2, every=2, data=2, expert=2)
    straight = small_run(mixture="DeepSeek-V3", steps=4, every=4)
    ((_, want),) = pool.run(train_fully, straight, checkpoint_dir=tmp_path / "straight", data_dir=text)
    pool.run(train_fully, first, checkpoint_dir=tmp_path / "moved", data_dir=text)
    second = small_run(mixture="DeepSeek-V3", steps=4, every=4, **layout)
    ((_, got), *_) = pool.run(train_fully, second, checkpoint_dir=tmp_path / "moved", data_dir=text)
    assert got.began_at == 2
    assert [report.step for report in got.reports] == [3, 4]
    for report, expected in zip(got.reports, want.reports[2:], strict=True):
        assert report.loss == pytest.approx(expected.loss, rel=1e-5)
        assert [load.layer for load in report.experts] == [1, 2]
