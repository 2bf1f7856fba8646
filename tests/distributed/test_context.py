"""Attention over ranks by itself: full attention, values of another width, and what each method sends."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.api.data import Packing
from meshwright.api.parallelism import ContextMethod
from meshwright.sequence_sharding import SequenceSharding
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.manifest import read_manifest
from meshwright_worker.data.batch import TokenMetadata
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.models.attention import AttentionCore
from meshwright_worker.parallel.context import online_softmax
from meshwright_worker.parallel.context.attention_blocks import Shape
from meshwright_worker.parallel.context.context_parallel import build_context_groups, install_context_attention
from meshwright_worker.rank.task import Outcome, RankTask
from tests.distributed.cases import train_fully
from tests.distributed.comm_counter import Counting, Traffic
from tests.distributed.configs import small_run
from tests.distributed.rank_pool import RankPool
from tests.tiers import mostly_long

BATCH, HEADS, KV_HEADS, SIZE, VALUE_SIZE = 2, 4, 2, 8, 4
METHODS = [
    (ContextMethod.RING, 2, None),
    (ContextMethod.RING_ZIG_ZAG, 4, None),
    (ContextMethod.ULYSSES, 4, None),
    (ContextMethod.ALL_GATHER, 2, None),
    (ContextMethod.RING_ULYSSES, 4, 2),
]


class _Model(torch.nn.Module):
    def __init__(self, core: AttentionCore) -> None:
        super().__init__()
        self.core = core


def _numbers(
    length: int, batch: int = BATCH, value_size: int = VALUE_SIZE
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    sizes = ((HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, value_size), (HEADS, value_size))
    drawn = [torch.randn(batch, length, *size, generator=generator, dtype=torch.float64) for size in sizes]
    documents = (torch.rand(batch, length, generator=generator) < 0.15).cumsum(1)
    return drawn[:3], drawn[3], documents


def attention_errors(task: RankTask, length: int) -> list[float]:
    """Errors of output and gradients against one rank, for causal and full attention, with and without documents."""
    errors = []
    with join_mesh(task) as mesh:
        deal, rank = SequenceSharding.of(task.run), mesh.coordinates.context
        held = torch.cat([torch.arange(part.start, part.stop) for part in deal.slices(length)[rank]])
        inputs, weights, documents = _numbers(length)
        groups = build_context_groups(deal, mesh)
        for causal in (True, False):
            plain = AttentionCore(causal=causal, scale=0.4)
            shared = _Model(AttentionCore(causal=causal, scale=0.4))
            install_context_attention(shared, deal, groups)
            for packed in (None, documents):
                own_documents = None if packed is None else packed[:, held]
                places = TokenMetadata(None, own_documents, length, packed)
                want = _outputs(plain, inputs, weights, TokenMetadata(documents=packed))
                own = [x[:, held] for x in (*inputs, weights)]
                got = _outputs(shared.core, own[:3], own[3], places)
                errors += [float((a - b[:, held]).abs().max()) for a, b in zip(got, want, strict=True)]
    return errors


def varlen_errors(task: RankTask, documents: list[list[int]], value_size: int) -> tuple[list[float], list[int]]:
    """Errors of output and gradients with a varlen kernel against a mask in one process, relative to the largest
    element: in fp64, then in fp32. And the number of scores that this rank computes, causal and full.
    """
    errors, scores = [], []
    whole = torch.tensor(documents)
    with join_mesh(task) as mesh:
        deal, rank = SequenceSharding.of(task.run), mesh.coordinates.context
        held = torch.cat([torch.arange(part.start, part.stop) for part in deal.slices(whole.shape[1])[rank]])
        groups = build_context_groups(deal, mesh)
        for dtype in (torch.float64, torch.float32):
            inputs, weights, _ = _numbers(whole.shape[1], len(whole), value_size)
            tensors = [x.to(dtype) for x in (*inputs, weights)]
            for causal in (True, False):
                want = _outputs(AttentionCore(causal=causal), tensors[:3], tensors[3], TokenMetadata(documents=whole))
                shared = _Model(AttentionCore(causal=causal))
                install_context_attention(shared, deal, groups, varlen=True)
                places = TokenMetadata(None, whole[:, held], whole.shape[1], whole)
                own = [x[:, held] for x in tensors]
                with CountedScores() as counted:
                    got = _outputs(shared.core, own[:3], own[3], places)
                errors += [float((a - b[:, held]).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True)]
                scores.append(counted.scores)
    return errors, scores[:2]


class CountedScores:
    """Counts the scores that kernels compute in the forward pass."""

    def __enter__(self) -> CountedScores:
        self.scores = 0
        self._attend = online_softmax.attend
        online_softmax.attend = self._count  # type: ignore[assignment]
        return self

    def __exit__(self, *error: object) -> None:
        online_softmax.attend = self._attend

    def _count(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        queries, keys = query.shape[2], key.shape[2]
        scores = queries * keys if options["shape"] is Shape.FULL else queries * (queries + 1) // 2
        self.scores += query.shape[0] * query.shape[1] * scores
        return self._attend(query, key, value, **options)


def _outputs(
    core: AttentionCore, inputs: list[torch.Tensor], weights: torch.Tensor, places: TokenMetadata
) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    mixed = core(*leaves, places)
    return [mixed.detach(), *torch.autograd.grad((mixed * weights).sum(), leaves)]


def sent(task: RankTask, length: int) -> tuple[Traffic, Traffic]:
    """What this rank communicates in one layer's forward and backward pass."""
    with join_mesh(task) as mesh:
        deal = SequenceSharding.of(task.run)
        model = _Model(AttentionCore())
        install_context_attention(model, deal, build_context_groups(deal, mesh))
        held = torch.cat([torch.arange(part.start, part.stop) for part in deal.slices(length)[mesh.rank]])
        inputs, weights, _ = _numbers(length)
        own = [x[:, held].float() for x in (*inputs, weights)]
        with Counting() as forward:
            leaves = [x.clone().requires_grad_() for x in own[:3]]
            mixed = model.core(*leaves, TokenMetadata(row_length=length))
        with Counting() as backward:
            (mixed * own[3]).sum().backward()
    return forward.traffic, backward.traffic


def measured(pool: RankPool, length: int, **layout: Any) -> tuple[Counter[str], Counter[str], tuple[float, float]]:
    """Calls forward and backward, and the numbers that a rank sends in each, the same on every rank."""
    ranks = pool.run(sent, small_run(**layout), length, timeout=240)
    both = [
        (
            *(Counter({kind: n for (kind, _), n in one.calls.items()}) for one in two),
            tuple(one.sent() / 4 for one in two),
        )
        for two in ranks
    ]
    assert all(one == both[0] for one in both)
    forward, backward, numbers = both[0]
    return forward, backward, numbers


@pytest.mark.parametrize(("method", "ranks", "inner"), METHODS, ids=[str(method) for method, _, _ in METHODS])
def test_attention_over_ranks_equals_one_rank(
    pool: RankPool, method: ContextMethod, ranks: int, inner: int | None
) -> None:
    run = small_run(context=ranks, method=method, ulysses=inner)
    for errors in pool.run(attention_errors, run, 27, timeout=240):
        assert max(errors) < 1e-13


@pytest.mark.parametrize("inner", [1, 2])
def test_the_mix_may_have_rings_or_exchanges_of_one_rank(pool: RankPool, inner: int) -> None:
    run = small_run(context=2, method=ContextMethod.RING_ULYSSES, ulysses=inner)
    for errors in pool.run(attention_errors, run, 27, timeout=240):
        assert max(errors) < 1e-13


DOCUMENTS = {
    "across ranks": [[0] * 5 + [1] * 13 + [2] * 9, [0] * 1 + [4] * 20 + [9] * 6],
    "one": [[0] * 27, [0] * 27],
    "of one token": [list(range(27)), [0] * 26 + [1]],
}
"""Of rows of 27 tokens; numbers that no token has are empty documents."""


@pytest.mark.parametrize("value_size", [SIZE, VALUE_SIZE])
@pytest.mark.parametrize("name", mostly_long(DOCUMENTS, lambda name: name == "across ranks"))
@pytest.mark.parametrize(("method", "ranks", "inner"), METHODS, ids=[str(method) for method, _, _ in METHODS])
def test_varlen_attention_over_ranks_equals_a_mask(
    pool: RankPool, method: ContextMethod, ranks: int, inner: int | None, name: str, value_size: int
) -> None:
    """And computes no score of two documents: with all ranks together, those of each document by itself."""
    run = small_run(context=ranks, method=method, ulysses=inner)
    results = pool.run(varlen_errors, run, DOCUMENTS[name], value_size, timeout=240)
    for errors, _ in results:
        assert max(errors[:8]) < 1e-12
        assert max(errors[8:]) < 1e-5
    lengths = [n for row in DOCUMENTS[name] for n in Counter(row).values()]
    want = [HEADS * sum(n * (n + 1) // 2 for n in lengths), HEADS * sum(n * n for n in lengths)]
    assert [sum(of_rank) for of_rank in zip(*(scores for _, scores in results), strict=True)] == want


def test_what_each_method_sends(pool: RankPool) -> None:
    """The papers' volumes, in numbers of one layer that one of n ranks sends."""
    n, length = 4, 32
    tokens = BATCH * length // n
    pair = tokens * KV_HEADS * (SIZE + VALUE_SIZE)
    forward, backward, numbers = measured(pool, length, context=n)
    # A turn hands over two tensors; keys and values, then those again and, home again, their gradients (2310.01889).
    assert forward == {"send": 2 * (n - 1), "recv": 2 * (n - 1)}
    assert backward == {"send": 2 * (2 * n - 1), "recv": 2 * (2 * n - 1)}
    assert numbers == ((n - 1) * pair, (n - 1) * pair + n * pair)

    forward, backward, numbers = measured(pool, length, context=n, method=ContextMethod.ALL_GATHER)
    assert (forward, backward) == ({"all-gather": 1}, {"all-gather": 1, "reduce-scatter": 1})
    assert numbers == ((n - 1) * pair, 2 * (n - 1) * pair)

    # Four tensors of heads, each (n - 1) / n of its own (arXiv 2309.14509); 2 key and value heads are held twice.
    forward, backward, numbers = measured(pool, length, context=n, method=ContextMethod.ULYSSES)
    assert forward == backward == {"all-to-all": 2}
    four = tokens * (HEADS + n) * (SIZE + VALUE_SIZE)
    assert numbers == (four * (n - 1) / n, four * (n - 1) / n)


def test_the_mix_has_shorter_rings_than_a_ring_and_smaller_exchanges_than_ulysses(pool: RankPool) -> None:
    layout = {"context": 4, "method": ContextMethod.RING_ULYSSES, "ulysses": 2}
    forward, backward, numbers = measured(pool, 32, **layout)
    assert forward == {"all-to-all": 2, "send": 2, "recv": 2}
    assert backward == {"all-to-all": 2, "send": 6, "recv": 6}
    pair = BATCH * 8 * KV_HEADS * (SIZE + VALUE_SIZE)
    four = BATCH * 8 * (HEADS + KV_HEADS) * (SIZE + VALUE_SIZE)
    assert numbers == (four / 2 + pair, four / 2 + pair + 2 * pair)


def test_a_run_resumes_when_its_ranks_share_sequences(pool: RankPool, tmp_path: Path, text: Path) -> None:
    """Samples and digest are those of any other layout, and so, but for rounding, is the loss."""
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    ((_, recorder), *_) = pool.run(train_fully, small_run(data=2), checkpoint_dir=straight, data_dir=text)
    pool.run(train_fully, small_run(data=2), -1, None, 7, checkpoint_dir=moved, data_dir=text)
    run = small_run(context=2, packing=Packing.TEXT)
    ((outcome, resumed), *_) = pool.run(train_fully, run, checkpoint_dir=moved, data_dir=text)
    assert outcome is Outcome.COMPLETE
    assert resumed.began_at in (3, 6)  # the save of step 6 was perhaps not durable yet
    want, got = (read_manifest(CheckpointDirectory(root).path(8)) for root in (straight, moved))
    assert (got.state.samples, got.state.digest) == (want.state.samples, want.state.digest)
    assert resumed.reports[-1].loss == pytest.approx(recorder.reports[-1].loss, rel=1e-5)


def test_balanced_rows_are_the_same_samples_and_the_same_loss(pool: RankPool, tmp_path: Path, text: Path) -> None:
    records, manifests = [], []
    for balance in (False, True):
        run = small_run(data=2, steps=3, packing=Packing.DOCUMENTS, balance=balance, length=96)
        root = tmp_path / str(balance)
        ((_, recorder), *_) = pool.run(train_fully, run, checkpoint_dir=root, data_dir=text)
        records.append([report.loss for report in recorder.reports])
        manifests.append(read_manifest(CheckpointDirectory(root).path(3)))
    assert records[0] == pytest.approx(records[1], rel=1e-6)
    (plain, balanced) = manifests
    assert (plain.state.samples, plain.state.digest) == (balanced.state.samples, balanced.state.digest)
