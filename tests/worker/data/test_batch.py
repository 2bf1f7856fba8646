"""Documents in a row, and rows dealt by what their documents cost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.api.data import DataSpec, Packing
from meshwright.data.tokenizers import BYTE_SEPARATOR
from meshwright.models.architecture import Architecture
from meshwright_worker.data.batch import IGNORED, Batch, make_batch, separate_documents
from meshwright_worker.data.length_balance import RowCost, assign_rows
from meshwright_worker.data.open_corpus import open_corpus
from meshwright_worker.data.sample_order import SampleStream
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.init_weights import init_weights

MODEL = Architecture(layers=2, hidden_size=16, intermediate_size=24, heads=2, kv_heads=1, vocab_size=260)


def test_positions_documents_and_targets_of_a_packed_row() -> None:
    row = torch.tensor([[7, 8, BYTE_SEPARATOR, BYTE_SEPARATOR, 9, 10, BYTE_SEPARATOR, 11]])
    batch = make_batch(row, DataSpec(claim_name="text", packing=Packing.DOCUMENTS), BYTE_SEPARATOR)
    assert batch.documents is not None
    assert batch.positions is not None
    assert batch.documents.tolist() == [[0, 0, 0, 1, 2, 2, 2]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 0, 1, 2]]
    assert batch.targets.tolist() == [[8, BYTE_SEPARATOR, IGNORED, IGNORED, 10, BYTE_SEPARATOR, IGNORED]]
    assert make_batch(row, DataSpec(claim_name="text"), BYTE_SEPARATOR).documents is None


def test_a_packed_row_trains_as_its_documents_do_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    lengths = (5, 1, 9, 3)
    pieces = [torch.randint(0, 250, (1, length), generator=generator) for length in lengths]
    ended = [torch.cat([piece, torch.tensor([[BYTE_SEPARATOR]])], dim=1) for piece in pieces]
    stage = DecoderStage(MODEL, torch.float64).double()
    init_weights(stage, MODEL, 0, torch.device("cpu"))
    packed = separate_documents(
        Batch.of(torch.cat([*ended, torch.zeros(1, 1, dtype=torch.int64)], dim=1)), BYTE_SEPARATOR
    )
    loss = stage(packed.tokens, packed.targets, packed.token_metadata)
    loss.backward()
    together = {name: parameter.grad.clone() for name, parameter in stage.named_parameters()}  # type: ignore[union-attr]
    stage.zero_grad()
    alone = torch.stack([stage(b.tokens, b.targets) for b in (Batch.of(piece) for piece in ended)]).sum()
    alone.backward()
    torch.testing.assert_close(loss, alone, rtol=1e-12, atol=0)
    for name, parameter in stage.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(together[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_a_stream_knows_its_documents_without_reading_them(tmp_path: Path) -> None:
    for number, length in enumerate((30, 3, 1, 70, 12, 44)):
        (tmp_path / f"{number}.txt").write_text("x" * length)
    stream = SampleStream(open_corpus(DataSpec(claim_name="text"), str(tmp_path)), 16, seed=1)
    for sample in range(2 * stream.samples_per_epoch):
        documents = separate_documents(Batch.of(stream.batch(sample, 1)), BYTE_SEPARATOR).documents
        assert documents is not None
        assert stream.documents(sample) == documents[0].unique_consecutive(return_counts=True)[1].tolist()


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.data())
@settings(max_examples=150, deadline=None)
def test_dealt_rows_are_all_there_and_the_sums_differ_by_one_round(
    replicas: int, micro_batches: int, each: int, data: st.DataObject
) -> None:
    count = replicas * micro_batches * each
    costs = data.draw(st.lists(st.integers(0, 10**15), min_size=count, max_size=count))
    dealt = assign_rows(costs, replicas, micro_batches)
    assert sorted(row for rows in dealt for row in rows) == list(range(count))
    assert {len(rows) for rows in dealt} == {micro_batches * each}
    sums = [sum(costs[row] for row in rows) for rows in dealt]
    ordered = sorted(costs, reverse=True)
    widest = max(ordered[i] - ordered[i + replicas - 1] for i in range(0, count, replicas))
    assert max(sums) - min(sums) <= widest
    assert assign_rows(list(costs), replicas, micro_batches) == dealt


def test_rows_of_long_and_short_documents_even_out() -> None:
    cost = RowCost.of(MODEL)
    rows = [[512]] * 3 + [[256, 256]] * 3 + [[8] * 64] * 10
    costs = [cost.row(row) for row in rows]
    in_order = [sum(costs[first : first + 4]) for first in range(0, 16, 4)]
    dealt = [sum(costs[row] for row in own) for own in assign_rows(costs, 4, 2)]
    assert max(in_order) / (sum(costs) / 4) > 1.5
    assert max(dealt) / (sum(costs) / 4) < 1.2


def test_rows_that_do_not_divide_are_rejected() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        assign_rows([1, 2, 3], 2, 1)
