"""Updates that are launched before the host has read the results of their step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from meshwright.api.training import OptimizerSpec
from meshwright_worker.optimizers import master_adamw
from meshwright_worker.optimizers.master_adamw import MasterAdamW
from meshwright_worker.parallel.grad_norm import clipped_factor
from meshwright_worker.parallel.shards import ParameterShard
from meshwright_worker.trainer.early_update import factor_of

SHAPES = {"matrix": (64, 48), "rows": (4, 2048), "norm": (64,)}
SPEC = OptimizerSpec(weight_decay=0.1)
TOKENS = 4096


def as_double(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64)


class Updates:
    """An optimizer that updates the shards of `SHAPES`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # The rule of the kernel itself: its compiled form is tested in tests/worker/parallel/test_compiled.py.
        monkeypatch.setattr(master_adamw, "compiled", lambda update: update)
        monkeypatch.setattr(master_adamw, "_WORTH", 1024)
        made = {name: torch.linspace(-1, 1, math.prod(shape)).view(shape) for name, shape in SHAPES.items()}
        parameters = {name: nn.Parameter(tensor) for name, tensor in made.items()}
        self.shards = [ParameterShard(name, p, p.detach(), None, True, False, False) for name, p in parameters.items()]
        self.optimizer = MasterAdamW(self.shards, SPEC, compiles=True)

    def step(self, number: int, factor: float) -> None:
        self.optimizer.factor = factor
        self.optimizer.step(gradients(number), 1e-2 / number)

    def step_if_finite(self, number: int, factor: float) -> None:
        self.optimizer.step_if_finite(gradients(number), 1e-2 / number, as_double(factor))

    def numbers(self) -> list[torch.Tensor]:
        moments = [moment for shard in self.shards for moment in self.optimizer.moments(shard).values()]
        return [tensor.clone() for tensor in [*(shard.local for shard in self.shards), *moments]]


def gradients(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES.values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(first, second) for first, second in zip(one, other, strict=True))


def test_an_early_update_has_the_bits_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    early, other = Updates(monkeypatch), Updates(monkeypatch)
    for number in range(1, 5):
        early.step_if_finite(number, 0.3 / number)
        other.step(number, 0.3 / number)
        assert same(early.numbers(), other.numbers())


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_withdrawn_update_has_never_been(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Neither in numbers nor in the count of updates, from which bias correction follows."""
    early, other = Updates(monkeypatch), Updates(monkeypatch)
    early.step_if_finite(1, 0.5)
    other.step(1, 0.5)
    for _ in range(2):
        early.step_if_finite(2, factor)
        early.optimizer.withdraw()
        assert same(early.numbers(), other.numbers())
    early.step_if_finite(3, 0.5)
    other.step(3, 0.5)
    assert same(early.numbers(), other.numbers())


def on_the_host(loss: float, squares: float, targets: float, clip: float) -> float:
    """As `Trainer.update` computes it."""
    correction = TOKENS / max(1.0, targets)
    norm = math.sqrt(squares) * correction
    return clipped_factor(correction, norm, clip) if math.isfinite(loss * correction + norm) else math.nan


@pytest.mark.parametrize("clip", [0.0, 1.0, 0.37])
def test_the_device_finds_the_factor_of_the_host(clip: float) -> None:
    """But for the last bit of a square root, which torch rounds otherwise on a CPU."""
    generator = torch.Generator().manual_seed(7)
    draws = torch.rand(200, 3, generator=generator, dtype=torch.float64).tolist()
    cases = [(8 * loss, 9 * squares, round(TOKENS * targets)) for loss, squares, targets in draws]
    cases += [(math.nan, 1, 5), (math.inf, 1, 5), (1, math.nan, 5), (1, math.inf, 5), (1, 0, 0)]
    for loss, squares, targets in cases:
        sums = torch.tensor([loss, squares, targets, 0, 0, 17], dtype=torch.float64)
        got, want = float(factor_of(sums, TOKENS, clip)), on_the_host(loss, squares, targets, clip)
        assert got == pytest.approx(want, rel=2**-51, nan_ok=True), (loss, squares, targets)
