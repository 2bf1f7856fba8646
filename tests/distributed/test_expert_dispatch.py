"""Other ways of tokens to their experts: rows for full capacity, and one copy for each node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.api.parallelism import ExpertDispatch
from meshwright.api.precision import Precision
from meshwright.planner.cost.comm_time import nodes_per_token
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.models.moe import MixtureOfExperts, iter_moe_layers
from meshwright_worker.models.token_rows import order_by_expert, order_in_slots
from meshwright_worker.rank.task import RankTask
from meshwright_worker.trainer.trainer import Trainer
from tests.distributed.cases import Trained, trained
from tests.distributed.configs import small_run
from tests.distributed.moe_models import MIXTURES
from tests.distributed.rank_pool import RankFailedError, RankPool
from tests.tiers import mostly_long

RANKS, HIDDEN, LENGTH, ROWS = 8, 512, 128, 4
FP32 = 4


def dispatched(how: ExpertDispatch, **layout: Any) -> NativeRun:
    parallelism = {**layout.pop("parallelism", {}), "expert_dispatch": how}
    return small_run(parallelism=parallelism, **layout)


def on_nodes(task: RankTask, ranks_per_node: int) -> RankTask:
    """The rank among nodes of so many ranks."""
    return replace(
        task,
        local_rank=task.rank % ranks_per_node,
        local_world_size=ranks_per_node,
        worker=task.rank // ranks_per_node,
    )


def train_on_nodes(task: RankTask, ranks_per_node: int, steps: int) -> Trained:
    with join_mesh(on_nodes(task, ranks_per_node)) as mesh:
        return trained(task.run, mesh, steps)


def assert_equal_results(got: list[Trained], want: list[Trained], tolerance: float) -> None:
    for mine, expected in zip(got, want, strict=True):
        for result, other in zip(mine.results, expected.results, strict=True):
            assert result.loss == pytest.approx(other.loss, rel=tolerance)
            for load, wanted in zip(result.experts, other.experts, strict=True):
                assert (load.imbalance, load.dropped) == (wanted.imbalance, wanted.dropped)
        for name, gradient in expected.gradients.items():
            error = (mine.gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
            assert float(error) <= tolerance, name


LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "one rank, one expert per token": {"mixture": "Switch"},
    "experts on 2": {"data": 2, "expert": 2},
    "experts on 2, tensor 2": {"data": 2, "expert": 2, "tensor": 2},
    "experts on 2, whole": {"data": 2, "expert": 2, "tensor": 2, "parallelism": {"expert_tensor": False}},
    "experts on 2, context 2": {"expert": 2, "context": 2},
    "experts on 2, separate weight gradients": {
        "data": 2, "expert": 2, "pipeline": 2, "parallelism": {"schedule": "ZBH1"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", mostly_long(LAYOUTS, {"one rank", "experts on 2"}.__contains__))
def test_rows_for_full_capacity_give_the_same_results(pool: RankPool, name: str) -> None:
    layout = {"mixture": "ST-MoE", "precision": Precision.FP64, **LAYOUTS[name]}
    ranks = small_run(**layout).layout.world_size
    want, got = (
        pool.run(train_on_nodes, dispatched(how, **layout), ranks, 2)
        for how in (ExpertDispatch.PER_EXPERT, ExpertDispatch.PADDED)
    )
    assert any(load.dropped for load in want[0].results[0].experts)
    assert_equal_results(got, want, 1e-12)


NODES: list[tuple[int, dict[str, Any]]] = [
    (2, {"mixture": "DeepSeek-V3", "data": 4, "expert": 4}),
    (1, {"mixture": "DeepSeek-V2", "data": 4, "expert": 4}),
    (2, {"mixture": "Mixtral", "data": 4, "expert": 4, "zero": 3}),
    (4, {"mixture": "DeepSeek-V2", "data": 4, "expert": 4, "tensor": 2}),
    (2, {"mixture": "ST-MoE", "data": 4, "expert": 4}),
    (4, {"mixture": "Mixtral", "data": 4, "expert": 4}),
]


@pytest.mark.parametrize(("ranks_per_node", "layout"), mostly_long(NODES, lambda case: case is NODES[0]), ids=str)
def test_one_copy_for_each_node_gives_the_same_results(
    pool: RankPool, ranks_per_node: int, layout: dict[str, Any]
) -> None:
    run = {"batch": 8, "micro_batches": 1, **layout}
    want, got = (
        pool.run(train_on_nodes, dispatched(how, **run), ranks_per_node, 2)
        for how in (ExpertDispatch.PER_EXPERT, ExpertDispatch.ONCE_PER_NODE)
    )
    assert_equal_results(got, want, 2e-6)


def test_nodes_with_different_numbers_of_an_expert_group_are_rejected(pool: RankPool) -> None:
    run = dispatched(ExpertDispatch.ONCE_PER_NODE, mixture="Mixtral", data=4, expert=4)
    with pytest.raises(RankFailedError, match="needs the same number of an expert group's 4 ranks on each node"):
        pool.run(train_on_nodes, run, 3, 1)


@dataclass
class Crossing:
    """What one rank's mixture sends to other nodes, forward and backward."""

    rows: int
    """Bytes of hidden states and their gradients."""
    other: int
    """Bytes of everything else: sizes, experts, weights and their gradients."""
    wanted: int
    """Pairs of this rank's tokens and other nodes that have an expert of the token, by the router."""


def crossing(task: RankTask, ranks_per_node: int) -> Crossing:
    with join_mesh(on_nodes(task, ranks_per_node)) as mesh:
        trainer = Trainer(task.run, mesh)
        _, mixture = next(iter_moe_layers(trainer.stages[0].module))
        generator = torch.Generator().manual_seed(mesh.rank)
        x = torch.randn(ROWS, LENGTH, HIDDEN, generator=generator).requires_grad_()
        experts = mixture.router(x).experts.flatten(0, 1)
        sent = _watched(mixture, x, mesh.rank // ranks_per_node, ranks_per_node)
        each = mixture.mixture.experts // RANKS * ranks_per_node
        nodes = torch.zeros(len(experts), RANKS // ranks_per_node).scatter_(1, experts // each, 1.0)
        nodes[:, mesh.rank // ranks_per_node] = 0
        return Crossing(*sent, int(nodes.sum()))


def _watched(mixture: MixtureOfExperts, x: torch.Tensor, node: int, ranks_per_node: int) -> tuple[int, int]:
    """Bytes that all-to-alls send to ranks of other nodes: of hidden states, and of all others."""
    totals = [0, 0]
    exchange = dist.all_to_all_single

    def watch(output: torch.Tensor, sent: torch.Tensor, *sizes: Any, group: dist.ProcessGroup, **options: Any) -> Any:
        ranks = dist.get_process_group_ranks(group)
        to_each = sizes[1] if sizes else [len(sent) // len(ranks)] * len(ranks)
        ends = list(accumulate(to_each))
        for rank, rows, end in zip(ranks, to_each, ends, strict=True):
            if rank // ranks_per_node != node:
                part = sent[end - rows : end]
                totals[sent.shape[-1] != HIDDEN or sent.ndim != 2] += part.numel() * part.element_size()
        return exchange(output, sent, *sizes, group=group, **options)

    dist.all_to_all_single = watch
    try:
        mixture(x).sum().backward()
    finally:
        dist.all_to_all_single = exchange
    return totals[0], totals[1]


CROSSINGS = [(2, "32 experts"), (4, "32 experts"), (4, "32 experts in groups")]


@pytest.mark.parametrize(("nodes", "mixture"), mostly_long(CROSSINGS, lambda case: case is CROSSINGS[1]))
def test_a_token_crosses_the_network_once_for_each_node(pool: RankPool, nodes: int, mixture: str) -> None:
    """DeepSeek-V3, arXiv 2412.19437, section 3.2.2: out and back, forward and backward."""
    layout = {"data": RANKS, "expert": RANKS, "mixture": mixture, "layers": 1, "hidden_size": HIDDEN, "batch": RANKS}
    once, copies = (
        pool.run(crossing, dispatched(how, micro_batches=1, **layout), RANKS // nodes)
        for how in (ExpertDispatch.ONCE_PER_NODE, ExpertDispatch.PER_EXPERT)
    )
    assert sum(rank.rows for rank in once) == 4 * sum(rank.wanted for rank in once) * HIDDEN * FP32
    tokens = RANKS * ROWS * LENGTH
    expected = nodes_per_token(MIXTURES[mixture], nodes) * (nodes - 1) / nodes
    assert sum(rank.wanted for rank in once) / tokens == pytest.approx(expected, rel=0.02)
    assert sum(rank.rows + rank.other for rank in once) == pytest.approx(
        4 * tokens * expected * HIDDEN * FP32, rel=0.02
    )
    per_token = MIXTURES[mixture].per_token * (nodes - 1) / nodes
    assert sum(rank.rows for rank in copies) / (4 * tokens * HIDDEN * FP32) == pytest.approx(per_token, rel=0.02)


def test_rows_are_gathered_without_a_copy_for_each_expert() -> None:
    """Of 64 tokens and 8 experts each: the result is the only tensor of its size, forward and backward."""
    experts = torch.rand(64, 16).topk(8).indices
    tokens = torch.randn(64, 32, requires_grad=True)
    order = order_by_expert(experts)
    rows = order.take(tokens)
    with torch.autograd.profiler.profile(use_cpu=True) as profile:
        order.take(tokens.detach())
        order.by_token(rows.detach())
    names = [event.name for event in profile.function_events]
    assert names.count("aten::index_select") == 2
    assert not {"aten::copy_", "aten::zeros", "aten::index_copy", "aten::clone"}.intersection(names)
    assert torch.equal(rows, tokens.unsqueeze(1).expand(-1, 8, -1).reshape(-1, 32)[order.choices])
    assert torch.equal(order.by_token(rows), tokens.unsqueeze(1).expand(-1, 8, -1))


def test_slots_without_a_choice_are_empty_and_dropped_choices_have_none() -> None:
    tokens = torch.arange(1.0, 4.0).unsqueeze(1).requires_grad_()
    order = order_in_slots(torch.tensor([[4, 0], [6, 2], [1, 6]]), 6)
    rows = order.take(tokens)
    assert rows.flatten().tolist() == [1, 3, 2, 0, 1, 0]
    assert order.by_token(rows).flatten().tolist() == [1, 1, 0, 2, 3, 0]
    order.by_token(rows).sum().backward()
    assert tokens.grad is not None
    assert tokens.grad.flatten().tolist() == [2, 1, 1]
