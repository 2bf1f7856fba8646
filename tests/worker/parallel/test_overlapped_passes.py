"""Two passes that take turns where they wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright_worker.models.split_backward import WeightGradStore, deferring_weight_grads, linear
from meshwright_worker.parallel.overlapped_passes import run_overlapped, wait_overlapped


class Collective:
    """Notes when it is started and when its end is waited for."""

    def __init__(self, trace: list[str], name: str) -> None:
        self._trace, self._name = trace, name
        trace.append(f"{name} starts")

    def wait(self) -> None:
        self._trace.append(f"{self._name} ends")


def layers(trace: list[str], name: str, count: int) -> Callable[[], str]:
    def run() -> str:
        for layer in range(count):
            trace.append(f"{name}{layer} computes")
            wait_overlapped(Collective(trace, f"{name}{layer}"))
        return name

    return run


def test_one_computes_while_the_other_waits() -> None:
    trace: list[str] = []
    assert run_overlapped(layers(trace, "F", 2), layers(trace, "B", 2)) == ("F", "B")
    assert trace == [
        *("F0 computes", "F0 starts", "B0 computes", "B0 starts"),
        *("F0 ends", "F1 computes", "F1 starts", "B0 ends", "B1 computes", "B1 starts"),
        *("F1 ends", "B1 ends"),
    ]


def test_the_longer_one_continues_alone() -> None:
    trace: list[str] = []
    run_overlapped(layers(trace, "F", 0), layers(trace, "B", 2))
    assert trace == ["B0 computes", "B0 starts", "B0 ends", "B1 computes", "B1 starts", "B1 ends"]


def test_without_a_pair_nothing_changes() -> None:
    trace: list[str] = []
    layers(trace, "F", 1)()
    assert trace == ["F0 computes", "F0 starts", "F0 ends"]


def failing(trace: list[str], name: str) -> Callable[[], None]:
    def run() -> None:
        wait_overlapped(Collective(trace, name))
        raise ArithmeticError(name)

    return run


def test_an_error_of_either_is_raised_and_the_other_stops() -> None:
    trace: list[str] = []
    with pytest.raises(ArithmeticError, match="F"):
        run_overlapped(failing(trace, "F"), layers(trace, "B", 3))
    with pytest.raises(ArithmeticError, match="B"):
        run_overlapped(layers(trace, "F", 3), failing(trace, "B"))
    assert "F2 computes" not in trace
    assert run_overlapped(layers(trace, "F", 1), layers(trace, "B", 1)) == ("F", "B")


class Exchange(torch.autograd.Function):
    """An all-to-all as a mixture of experts has it, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, trace: list[str], name: str) -> torch.Tensor:
        ctx.trace, ctx.name = trace, name
        wait_overlapped(Collective(trace, f"{name} forward"))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        wait_overlapped(Collective(ctx.trace, f"{ctx.name} backward"))
        return gradients[0].clone(), None, None


def test_a_forward_and_a_backward_pass_take_turns_and_keep_their_stores() -> None:
    trace: list[str] = []
    weight = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    stores = [WeightGradStore(), WeightGradStore()]

    def forward(name: str, store: WeightGradStore) -> torch.Tensor:
        with deferring_weight_grads(store):
            y = linear(x, weight)
            y = Exchange.apply(y, trace, name)
            return linear(y, weight)

    out = forward("second", stores[1])
    trace.clear()
    backward = out.sum().backward
    made, _ = run_overlapped(lambda: forward("first", stores[0]), backward)
    assert trace == [*("first forward starts", "second backward starts", "first forward ends", "second backward ends")]
    stores[1].run()
    want = weight.grad
    weight.grad = None
    made.sum().backward()
    assert weight.grad is None, "the forward pass was interrupted, and its products still leave their weights"
    stores[0].run()
    assert torch.equal(weight.grad, want)
