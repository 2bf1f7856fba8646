"""Products in fp8, on one rank."""

from __future__ import annotations

import pytest
import torch

from meshwright.api.precision import Fp8Scaling, Fp8Spec, Fp8Update
from meshwright_worker.fp8.formats import BACKWARD, FORWARD, largest, product, quantised, scaled
from meshwright_worker.fp8.linear import Fp8Product
from meshwright_worker.models.layers import Linear

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
        values, scale = quantised(x, largest(x, rowwise=rowwise), form)
        back = values.float() * scale
        assert float((back - x).abs().max() / x.abs().max()) < torch.finfo(form).eps
        assert float(back.abs().max()) == pytest.approx(float(x.abs().max()), rel=1e-5)
    clamped, scale = quantised(torch.tensor([[3.0, 1.0]]), torch.tensor(1.5), form)
    assert (clamped.float() * scale).tolist() == [[1.5, pytest.approx(1.0, rel=0.1)]]


@pytest.mark.parametrize("rowwise", [False, True])
def test_the_emulated_product_is_the_kernels(rowwise: bool) -> None:
    a, b = (quantised(x, largest(x, rowwise=rowwise), FORWARD) for x in (torch.randn(16, 32), torch.randn(48, 32)))
    kernel, emulated = scaled(a, b, torch.bfloat16), product(a, b, torch.bfloat16)
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


def test_delayed_scales_see_the_largest_of_their_step() -> None:
    linear = Linear(16, 16)
    eight = Fp8Product(SPECS["delayed"], None, inputs=False)
    for factor in (1.0, 3.0, 2.0):
        x = torch.full((2, 16), factor, requires_grad=True)
        eight(x, linear.weight).backward(torch.full((2, 16), factor / 10))
    assert eight.seen is not None
    assert eight.seen.tolist() == pytest.approx([3.0, float(linear.weight.detach().abs().max()), 0.3])
    eight.expected = torch.tensor([1.5, 1.0, 1.0])
    clamped = eight(torch.full((2, 16), 3.0), linear.weight)
    assert torch.equal(clamped, eight(torch.full((2, 16), 1.5), linear.weight))
