"""Initial weights: the same in every layout, and drawn part by part."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.models.architecture import Architecture
from meshwright_worker.models import init_weights
from meshwright_worker.models.init_weights import draw_into, initial_parameter

MODEL = Architecture(layers=3, hidden_size=16, intermediate_size=24, heads=4, kv_heads=2, vocab_size=257)
NAME = "layers.0.feed_forward.up.weight"


def part(shape: torch.Size, box: tuple[slice, ...]) -> torch.Tensor:
    local = torch.full([cut.stop - cut.start for cut in box], torch.nan)
    draw_into(local, NAME, shape, box, MODEL, 5)
    return local


def test_a_small_matrix_is_drawn_as_a_whole() -> None:
    """The values of 0.1.0, which the goldens contain."""
    key = int.from_bytes(hashlib.blake2b(f"5/{NAME}".encode(), digest_size=8).digest(), "little") >> 1
    deviation = (0.4 / MODEL.hidden_size) ** 0.5
    expected = torch.empty(24, 16).normal_(0.0, deviation, generator=torch.Generator().manual_seed(key))
    assert torch.equal(initial_parameter(NAME, torch.Size((24, 16)), MODEL, 5), expected)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_parts_of_a_tiled_matrix_are_those_of_the_whole(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init_weights, "_UNTILED_ELEMENTS", 64)
        patch.setattr(init_weights, "_TILE_COLUMNS", 16)
        experts = data.draw(st.sampled_from([None, 3]))
        sizes = [*([experts] if experts else []), data.draw(st.integers(9, 40)), data.draw(st.integers(9, 70))]
        shape, box = torch.Size(sizes), []
        for size in sizes:
            first, last = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
            box.append(slice(first, last))
        whole = initial_parameter(NAME, shape, MODEL, 5)
        assert torch.isfinite(whole).all()
        assert torch.equal(part(shape, tuple(box)), whole[tuple(box)])


def test_a_large_matrix_is_normal_and_no_tile_repeats() -> None:
    whole = initial_parameter(NAME, torch.Size((2100, 2100)), MODEL, 0)
    deviation = (0.4 / MODEL.hidden_size) ** 0.5
    assert float(whole.mean()) == pytest.approx(0.0, abs=5 * deviation / 2100)
    assert float(whole.std()) == pytest.approx(deviation, rel=2e-3)
    tiles = {float(whole[row, column]) for row in range(0, 2100, 8) for column in (0, 1024, 2048)}
    assert len(tiles) == 263 * 3
    assert not torch.equal(whole, initial_parameter(NAME, torch.Size((2100, 2100)), MODEL, 1))


def test_only_the_tiles_of_a_part_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    normal = torch.Tensor.normal_

    def counted(tensor: torch.Tensor, *arguments: float, generator: torch.Generator) -> torch.Tensor:
        drawn.append(tensor.numel())
        return normal(tensor, *arguments, generator=generator)

    monkeypatch.setattr(torch.Tensor, "normal_", counted)
    shape = torch.Size((16384, 53248 // 8))
    part(shape, (slice(128, 144), slice(1024, 3072)))
    assert sum(drawn) == 16 * 2048
