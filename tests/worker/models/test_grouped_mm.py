"""On which GPUs one kernel computes all experts."""

from __future__ import annotations

import pytest

from meshwright_worker.models.grouped_mm import kernel_serves

BF16 = 2


@pytest.mark.parametrize(
    ("capability", "serves"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)]
)
def test_the_kernel_is_only_used_where_its_gradients_are_right(capability: tuple[int, int], serves: bool) -> None:
    assert kernel_serves(capability, BF16, (64, 128)) is serves


def test_rows_must_be_aligned() -> None:
    assert kernel_serves((9, 0), BF16, (8, 1408))
    assert not kernel_serves((9, 0), BF16, (64, 12))
