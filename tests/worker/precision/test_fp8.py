"""Products in fp8, on one rank."""

from __future__ import annotations

import pytest
import torch

from meshwright.api.precision import Fp8Scaling, Fp8Spec, Fp8Update
from meshwright.models.architecture import Architecture
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.grouped_mm import grouped_linear
from meshwright_worker.models.layers import Linear
from meshwright_worker.precision.fp8 import linear
from meshwright_worker.precision.fp8.gathered_weight import GatheredWeight
from meshwright_worker.precision.fp8.grouped_linear import Fp8GroupedProduct, Sharing, scaled_grouped_mm
from meshwright_worker.precision.fp8.linear import Fp8Product
from meshwright_worker.precision.fp8.quantize import (
    BACKWARD,
    FORWARD,
    QuantizedTensor,
    absolute_max,
    product,
    quantize,
    scaled_mm,
)
from tests.distributed.configs import NUMBERS

SPECS = {
    "tensorwise": Fp8Spec(),
    "rowwise": Fp8Spec(scaling=Fp8Scaling.ROWWISE),
    "delayed": Fp8Spec(update=Fp8Update.DELAYED),
    "static": Fp8Spec(update=Fp8Update.STATIC, input_amax=5.0, weight_amax=1.0, gradient_amax=5.0),
}


@pytest.mark.parametrize("form", [FORWARD, BACKWARD])
def test_quantising_keeps_the_largest_number_and_some_digits_of_the_others(form: torch.dtype) -> None:
    x = torch.randn(32, 64) * 1e-6
    for rowwise in (False, True):
        values, scale = quantize(x, absolute_max(x, rowwise=rowwise), form)
        back = values.float() * scale
        assert float((back - x).abs().max() / x.abs().max()) < torch.finfo(form).eps
        assert float(back.abs().max()) == pytest.approx(float(x.abs().max()), rel=1e-5)
    clamped, scale = quantize(torch.tensor([[3.0, 1.0]]), torch.tensor(1.5), form)
    assert (clamped.float() * scale).tolist() == [[1.5, pytest.approx(1.0, rel=0.1)]]


@pytest.mark.parametrize("rowwise", [False, True])
def test_the_emulated_product_is_the_kernels(rowwise: bool) -> None:
    a, b = (quantize(x, absolute_max(x, rowwise=rowwise), FORWARD) for x in (torch.randn(16, 32), torch.randn(48, 32)))
    try:
        kernel, emulated = scaled_mm(a, b, torch.bfloat16), product(a, b, torch.bfloat16)
    except RuntimeError as error:
        if "only supports per-tensor scaling" not in str(error):
            raise
        pytest.skip("this torch's kernel takes one scale a tensor")  # 2.11, on CPUs
    assert float((kernel - emulated).abs().max() / emulated.abs().max()) < 1e-2


@pytest.mark.parametrize("name", SPECS)
def test_a_layer_stays_near_the_exact_one(name: str) -> None:
    torch.manual_seed(0)
    linear = Linear(64, 48)
    x = torch.randn(4, 8, 64, requires_grad=True)
    upstream = torch.randn(4, 8, 48)
    linear(x).backward(upstream)
    assert x.grad is not None
    assert linear.weight.grad is not None
    exact = [linear(x).detach(), x.grad.clone(), linear.weight.grad.clone()]
    x.grad = linear.weight.grad = None
    eight = Fp8Product(SPECS[name], None, inputs=False)
    result = eight(x, linear.weight)
    result.backward(upstream)
    for got, want in zip([result.detach(), x.grad, linear.weight.grad], exact, strict=True):
        assert got is not None
        error = float((got - want).norm() / want.norm())
        assert 1e-3 < error < 0.1, "not rounded, or too much"


@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_gathered_in_fp8_gives_the_same_bits(compiled: bool) -> None:
    """Output and gradients; the gradient is plain, in the format of the weight that it stands for."""
    torch.manual_seed(0)
    eight = Fp8Product(Fp8Spec(), None, inputs=False)
    multiply = torch.compile(eight, backend="aot_eager", fullgraph=True) if compiled else eight
    plain = torch.randn(48, 64, dtype=torch.bfloat16).requires_grad_()
    values, scale = quantize(plain.detach(), absolute_max(plain.detach(), rowwise=False), FORWARD)
    gathered = torch.nn.Parameter(GatheredWeight(values, scale, torch.bfloat16))
    results = []
    for weight, run in ((plain, eight), (gathered, multiply)):
        x = torch.linspace(-1, 2, 32 * 64).view(32, 64).to(torch.bfloat16).requires_grad_()
        result = run(x, weight)
        result.backward(result.detach().roll(1, 0))
        assert type(weight.grad) is torch.Tensor
        results.append((result.detach(), x.grad, weight.grad))
    assert all(torch.equal(want, got) for want, got in zip(*results, strict=True))
    torch.compiler.reset()


def test_only_fp8_products_read_a_gathered_weight() -> None:
    weight = GatheredWeight(torch.ones(4, 8).to(FORWARD), torch.ones(()), torch.bfloat16)
    assert torch.zeros_like(weight).dtype is torch.bfloat16
    assert weight.as_strided((2, 8), (8, 1)).fp8_values.shape == (2, 8)
    with pytest.raises(NotImplementedError, match=r"remove `training\.fp8\.allGather`"):
        weight + 1


def test_delayed_scales_see_the_largest_of_their_step() -> None:
    linear = Linear(16, 16)
    eight = Fp8Product(SPECS["delayed"], None, inputs=False)
    for factor in (1.0, 3.0, 2.0):
        x = torch.full((2, 16), factor, requires_grad=True)
        eight(x, linear.weight).backward(torch.full((2, 16), factor / 10))
    assert eight.observed_amax is not None
    assert eight.observed_amax.tolist() == pytest.approx([3.0, float(linear.weight.detach().abs().max()), 0.3])
    eight.scaling_amax = torch.tensor([1.5, 1.0, 1.0])
    clamped = eight(torch.full((2, 16), 3.0), linear.weight)
    assert torch.equal(clamped, eight(torch.full((2, 16), 1.5), linear.weight))


COUNTS = torch.tensor([5, 0, 11])
ORIGIN = torch.tensor([0, 0, 1, 1, 1, *([0] * 6), *([1] * 5)])
"""Of each expert's rows the first ones came from rank 0."""


def grouped(name: str, rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of one micro-batch's grouped product."""
    rows, weight = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    multiply = Fp8GroupedProduct(SPECS[name], None, None, inputs=False) if name in SPECS else None
    product = grouped_linear(rows, weight, counts) if multiply is None else multiply(rows, weight, counts, None)
    product.backward(product.detach().roll(1, 0))
    assert rows.grad is not None
    assert weight.grad is not None
    return [product.detach(), rows.grad, weight.grad]


@pytest.mark.parametrize("name", SPECS)
def test_experts_stay_near_the_exact_ones(name: str) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(16, 32), torch.randn(3, 48, 32) / 6
    results = grouped(name, rows, weight, COUNTS)
    for got, want in zip(results, grouped("exact", rows, weight, COUNTS), strict=True):
        error = float((got - want).norm() / want.norm())
        assert 1e-3 < error < 0.1, "not rounded, or too much"
    assert not results[2][1].any(), "an expert without rows has a gradient"


@pytest.mark.parametrize("name", SPECS)
def test_rows_of_two_micro_batches_are_scaled_apart(name: str) -> None:
    """Experts that see both at once give what they give one after the other, with scales that differ by far."""
    torch.manual_seed(0)
    rows, weight = torch.randn(16, 32), torch.randn(3, 48, 32) / 6
    rows[ORIGIN == 1] *= 1.7e-2
    apart = [
        grouped(name, rows[rank == ORIGIN], weight, torch.tensor(counts))
        for rank, counts in enumerate(([2, 0, 6], [3, 0, 5]))
    ]
    inputs, matrices = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    product = Fp8GroupedProduct(SPECS[name], None, None, inputs=False, sharing=Sharing(1, 2))(
        inputs, matrices, COUNTS, ORIGIN
    )
    upstream = torch.empty_like(product)
    for rank, (results, *_) in enumerate(apart):
        torch.testing.assert_close(product[rank == ORIGIN], results, rtol=1e-5, atol=1e-6)
        upstream[rank == ORIGIN] = results.roll(1, 0)
    product.backward(upstream)
    assert inputs.grad is not None
    assert matrices.grad is not None
    for rank, (_, of_rows, _) in enumerate(apart):
        torch.testing.assert_close(inputs.grad[rank == ORIGIN], of_rows, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(matrices.grad, apart[0][2] + apart[1][2])


def test_delayed_scales_of_experts_see_the_largest_of_all() -> None:
    eight = Fp8GroupedProduct(SPECS["delayed"], None, None, inputs=False)
    weight = torch.arange(1.0, 4.0).view(3, 1, 1).expand(3, 8, 16).clone().requires_grad_()
    eight(torch.full((16, 16), 0.5), weight, COUNTS, None).backward(torch.full((16, 8), 0.1))
    assert eight.observed_amax is not None
    assert eight.observed_amax.tolist() == pytest.approx([0.5, 3.0, 0.1])
    eight.scaling_amax = torch.tensor([0.25, 3.0, 1.0])
    clamped = eight(torch.full((16, 16), 0.5), weight, COUNTS, None)
    assert torch.equal(clamped, eight(torch.full((16, 16), 0.25), weight, COUNTS, None))


def test_the_grouped_kernel_takes_what_it_is_given() -> None:
    """Its checks of formats, strides and scales run without a GPU, on tensors without memory."""
    a = QuantizedTensor(torch.empty(64, 32, dtype=FORWARD, device="meta"), torch.empty(64, 1, device="meta"))
    b = QuantizedTensor(torch.empty(3, 48, 32, dtype=FORWARD, device="meta"), torch.empty(3, 1, 1, device="meta"))
    assert scaled_grouped_mm(a, b, torch.empty(3, dtype=torch.int64, device="meta")).shape == (64, 48)
    with pytest.raises(RuntimeError, match="scale"):
        scaled_grouped_mm(a._replace(scale=torch.empty(63, 1, device="meta")), b, torch.empty(3, dtype=torch.int64))


@pytest.mark.parametrize(("width", "told"), [(48, ""), (50, "50x32"), (24, "24x32 and 32x24")])
def test_sizes_that_a_gpu_would_emulate_are_reported(
    width: int, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linear, "has_fp8_matmul", lambda: True)
    with torch.device("meta"):
        stage = DecoderStage(Architecture(**{**NUMBERS, "intermediate_size": width}), torch.bfloat16)
    linear.convert_to_fp8(stage, Fp8Spec(), None)
    assert ("multiples of 16" in caplog.text) == bool(told)
    assert told in caplog.text
