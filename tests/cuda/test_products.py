"""Grouped and fp8 products on the device, and rounding, against the CPU."""

from __future__ import annotations

import pytest
import torch

from meshwright_worker.counter_rng import random_bits
from meshwright_worker.models.grouped_mm import grouped_linear, grouped_mm_loop
from meshwright_worker.optimizers.bf16_adamw import element_numbers, round_to_bf16
from meshwright_worker.precision.fp8.quantize import FORWARD, absolute_max, has_fp8_matmul, product, quantize

GROUPS = {
    "even groups": [32, 32, 32, 32],
    "empty groups": [0, 64, 0, 64],
    "odd groups": [1, 37, 90, 0],
    "no rows but in the last": [0, 0, 0, 128],
}


@pytest.mark.parametrize("groups", GROUPS)
def test_grouped_products_and_their_gradients_equal_the_loop(device: torch.device, groups: str) -> None:
    generator = torch.Generator().manual_seed(3)
    counts = torch.tensor(GROUPS[groups])
    rows = torch.randn(int(counts.sum()), 64, generator=generator).to(torch.bfloat16)
    weight = torch.randn(len(counts), 48, 64, generator=generator).to(torch.bfloat16)
    gradient = torch.randn(len(rows), 48, generator=generator).to(torch.bfloat16)

    def run(where: torch.device, loop: bool) -> list[torch.Tensor]:
        leaves = [tensor.to(where, copy=True).requires_grad_() for tensor in (rows, weight)]
        multiply = grouped_mm_loop if loop else grouped_linear
        result = multiply(*leaves, counts.to(where))
        result.backward(gradient.to(where))
        return [tensor.detach().float().cpu() for tensor in (result, leaves[0].grad, leaves[1].grad)]  # type: ignore[union-attr]

    for name, got, want in zip(
        ("product", "rows", "weight"), run(device, False), run(torch.device("cpu"), True), strict=True
    ):
        assert torch.isfinite(got).all(), name
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-1, msg=name)
        if name == "weight":
            empty = counts == 0
            assert not got[empty].any(), "an expert without rows has no gradient"


@pytest.mark.parametrize("rowwise", [False, True])
def test_fp8_products_equal_their_emulation(device: torch.device, rowwise: bool) -> None:
    if not has_fp8_matmul():
        pytest.skip("the GPU has no fp8 products")
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(size, 256, generator=generator).to(device) for size in (128, 64))
    quantized = [quantize(x, absolute_max(x, rowwise=rowwise), FORWARD) for x in (a, b)]
    native = product(quantized[0], quantized[1], torch.bfloat16, native=True)
    emulated = product(quantized[0], quantized[1], torch.bfloat16)
    torch.testing.assert_close(native.float(), emulated.float(), rtol=2e-2, atol=2e-1)


def test_quantization_gives_the_numbers_of_the_cpu(device: torch.device) -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(7)) * 30
    there = quantize(x.to(device), absolute_max(x.to(device), rowwise=True), FORWARD)
    here = quantize(x, absolute_max(x, rowwise=True), FORWARD)
    assert torch.equal(there.values.cpu().view(torch.uint8), here.values.view(torch.uint8))


def test_stochastic_rounding_gives_the_bits_of_the_cpu(device: torch.device) -> None:
    x = torch.randn(130, 70, generator=torch.Generator().manual_seed(9)) * 1e3
    x[0, :3] = torch.tensor([float("inf"), float("-inf"), float("nan")])

    def rounded(where: torch.device) -> torch.Tensor:
        bits = random_bits(element_numbers(130, 70, 70, 11, where), 12345)
        return round_to_bf16(x.to(where), bits).cpu()

    there, here = rounded(device), rounded(torch.device("cpu"))
    # The bits of "not a number" differ.
    assert torch.equal(there.isnan(), here.isnan())
    assert torch.equal(there.nan_to_num(nan=0.0).view(torch.int16), here.nan_to_num(nan=0.0).view(torch.int16))
