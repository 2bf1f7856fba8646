"""Weights' gradients that are left to the second half of a backward pass: all of them, priced right, the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.api.mixture import MixtureSpec
from meshwright.api.precision import Fp8Scaling, Fp8Spec, Fp8Update
from meshwright.models.architecture import Architecture
from meshwright.models.counts import layer_counts
from meshwright.schedules.flop_costs import stage_costs
from meshwright_worker.data.batch import Batch
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.init_weights import init_weights
from meshwright_worker.models.moe import iter_moe_layers
from meshwright_worker.models.split_backward import WeightGradStore, deferring_weight_grads, grouped, linear
from meshwright_worker.parallel.parallelize import LocalStage
from meshwright_worker.parallel.pipeline.stage import PipelineStage
from meshwright_worker.precision.fp8.grouped_linear import Fp8GroupedProduct, convert_experts_to_fp8
from meshwright_worker.precision.fp8.linear import Fp8Product, convert_to_fp8


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """On a busy machine the threads of tiny products wait for each other for seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


Product = Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
COUNTS = torch.tensor([5, 0, 11])
SPECS = {
    "tensorwise": Fp8Spec(),
    "rowwise": Fp8Spec(scaling=Fp8Scaling.ROWWISE),
    "delayed": Fp8Spec(update=Fp8Update.DELAYED),
    "static": Fp8Spec(update=Fp8Update.STATIC, input_amax=5.0, weight_amax=1.0, gradient_amax=5.0),
}


def experts(x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    return grouped(x, weight, COUNTS)


def fp8_experts(spec: Fp8Spec) -> Product:
    product = Fp8GroupedProduct(spec, None, None, inputs=False)
    return lambda x, weight: product(x, weight, COUNTS, None)


PRODUCTS: dict[str, Callable[[], Product]] = {
    "linear": lambda: linear,
    "experts": lambda: experts,
    **{f"fp8 linear, {name}": lambda spec=spec: Fp8Product(spec, None, inputs=False) for name, spec in SPECS.items()},
    **{f"fp8 experts, {name}": lambda spec=spec: fp8_experts(spec) for name, spec in SPECS.items()},
}


def two_micro_batches(make: Callable[[], Product], form: torch.dtype, *, whole: bool, of_experts: bool) -> list[Any]:
    """Outputs, inputs' gradients, the weight's."""
    torch.manual_seed(0)
    product = make()
    weight = nn.Parameter(torch.randn(*((3,) if of_experts else ()), 48, 32) / 6)
    found: list[Any] = []
    stores = [None if whole else WeightGradStore() for _ in range(2)]
    for store in stores:
        x = torch.randn(16, 32).to(form).requires_grad_()
        with deferring_weight_grads(store):
            y = product(x, weight)
            y.backward(y.detach().roll(1, 0))
        assert x.grad is not None
        found += [y.detach(), x.grad]
    for store in stores:
        if store is not None:
            assert len(store) == 1
            assert weight.grad is None or store is stores[1], "a part of it was computed in the first half"
            store.run()
            assert not len(store)
    assert weight.grad is not None
    assert not weight.grad.requires_grad
    return [*found, weight.grad]


@pytest.mark.parametrize("form", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_leaves_its_weight_and_no_bit_changes(name: str, form: torch.dtype) -> None:
    of_experts = "experts" in name
    whole, halves = (
        two_micro_batches(PRODUCTS[name], form, whole=whole, of_experts=of_experts) for whole in (True, False)
    )
    for want, got in zip(whole, halves, strict=True):
        assert torch.equal(want, got)


def test_a_weight_that_is_not_trained_leaves_nothing() -> None:
    store = WeightGradStore()
    for product in (linear, Fp8Product(Fp8Spec(), None, inputs=False)):
        weight = nn.Parameter(torch.randn(48, 32), requires_grad=False)
        with deferring_weight_grads(store):
            product(torch.randn(4, 32, requires_grad=True), weight).sum().backward()
        assert weight.grad is None
    assert not len(store)


MIXTURE = MixtureSpec(experts=4, per_token=2, intermediate_size=32, shared_intermediate_size=16, dense_layers=1)
MODEL = Architecture(
    layers=4, hidden_size=32, intermediate_size=48, heads=4, kv_heads=2, vocab_size=97, mixture=MIXTURE
)
ROWS, LENGTH = 2, 16
AT_ONCE = ("norm", "router", "embedding")


def chunk_of(fp8: Fp8Spec | None) -> PipelineStage:
    """The last three layers: one dense, two mixtures, the output projection."""
    with torch.device("meta"):
        stage = DecoderStage(MODEL, torch.float64, 1, 2, range(0, 3)).double()
    init_weights(stage, MODEL, 0, torch.device("cpu"))
    if fp8 is not None:
        convert_to_fp8(stage, fp8, None)
        for _, mixture in iter_moe_layers(stage):
            convert_experts_to_fp8(mixture.experts, fp8, None, None)
    return PipelineStage(LocalStage(0, stage, {}), ROWS * LENGTH, rematerialize=False)


def passes(chunk: PipelineStage, *, split: bool) -> tuple[list[str], torch.Tensor | None, int]:
    """Two micro-batches' passes: which parameters had a gradient after the first halves, what the stage before gets
    of the second, and the operations of the second half of the first.
    """
    generator = torch.Generator().manual_seed(1)
    received = None
    for micro_batch in range(2):
        x = torch.randn(ROWS, LENGTH, MODEL.hidden_size, dtype=torch.float64, generator=generator)
        tokens = torch.randint(0, MODEL.vocab_size, (ROWS, LENGTH), generator=generator)
        chunk.forward(micro_batch, Batch(tokens, tokens.roll(-1, 1)), x, split=split)
        received = chunk.backward(micro_batch, None)
    early = [name for name, p in chunk.stage.module.named_parameters() if p.grad is not None]
    counter = FlopCounterMode(display=False)
    if split:
        with counter:
            chunk.weight(0)
        chunk.weight(1)
    return early, received, counter.get_total_flops()


@pytest.mark.parametrize("fp8", [None, *SPECS.values()], ids=["fp64", *SPECS])
def test_a_mixtures_weights_are_all_left_to_the_second_half(fp8: Fp8Spec | None) -> None:
    whole, halves = chunk_of(fp8), chunk_of(fp8)
    _, want, _ = passes(whole, split=False)
    early, got, operations = passes(halves, split=True)
    assert got is not None
    assert want is not None
    assert torch.equal(want, got)
    names = [name for name, _ in halves.stage.module.named_parameters()]
    assert early == [name for name in names if any(part in name for part in AT_ONCE)]
    for (name, mine), expected in zip(
        halves.stage.module.named_parameters(), whole.stage.module.parameters(), strict=True
    ):
        assert mine.grad is not None, name
        assert expected.grad is not None, name
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-12, atol=1e-15, msg=name)
    routers = 2 * 2.0 * layer_counts(MODEL, True).router
    (costs,) = stage_costs(MODEL, LENGTH, [range(0, 3)])
    assert operations == ROWS * LENGTH * (costs.backward_weight - routers), "the search prices another second half"
