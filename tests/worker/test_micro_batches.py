"""Which micro-batches are cut, and to which lengths."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.api.data import DataFormat
from meshwright.api.parallelism import ContextMethod
from meshwright.api.precision import Fp8Spec, Precision
from meshwright.protocol.run_config import NativeRun
from meshwright.sequence_sharding import SequenceSharding
from meshwright_worker.trainer.micro_batches import COMPILED_LENGTHS, TrimLengths, is_padded, trim_lengths
from tests.distributed.configs import small_run


def padded(**options: Any) -> NativeRun:
    run = small_run(**options)
    return run.model_copy(update={"data": run.data.model_copy(update={"format": DataFormat.PROMPT_COMPLETION})})


def test_only_rows_that_are_padded_are_cut() -> None:
    assert trim_lengths(small_run()) is None
    assert not is_padded(small_run())
    assert trim_lengths(padded()) == TrimLengths(unit=1, min_length=1, whole=16)


def test_what_counts_padding_is_not_cut() -> None:
    for run in (
        padded(mixture="Mixtral"),
        padded(precision=Precision.BF16, training={"fp8": Fp8Spec()}),
    ):
        assert is_padded(run)
        assert trim_lengths(run) is None


LAYOUTS: list[dict[str, Any]] = [
    {"tensor": 2},
    {"tensor": 4},
    {"tensor": 2, "sequence": False},
    {"pipeline": 2},
    *({"context": 2, "method": method} for method in ContextMethod if method is not ContextMethod.RING_ULYSSES),
    {"context": 4, "method": ContextMethod.RING_ULYSSES, "ulysses": 2},
    {"context": 4, "tensor": 2},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_every_length_can_be_shared(layout: dict[str, Any], compiled: bool) -> None:
    run = padded(**layout, length=64, training={"compile": compiled})
    cut, deal = trim_lengths(run), SequenceSharding.of(run)
    assert cut is not None
    lengths = [cut.length(needed) for needed in range(65)]
    for needed, length in enumerate(lengths):
        assert needed <= length <= 64
        assert sum(len(part) for whole in deal.slices(length) for part in whole) == length
    assert lengths == sorted(lengths)
    assert len(set(lengths)) <= (COMPILED_LENGTHS if compiled else 64 // deal.unit)
    if not compiled:
        assert all(length - needed < deal.unit or length == cut.min_length for needed, length in enumerate(lengths))
