"""Compiled updates of optimizers on the device, against torch's and against the same rule on a CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from meshwright.api.training import OptimizerSpec
from meshwright_worker.optimizers.adamw import AdamW
from meshwright_worker.optimizers.bf16_adamw import BF16AdamW
from meshwright_worker.optimizers.master_adamw import MasterAdamW
from meshwright_worker.parallel.shards import ParameterShard

SHAPES = {"matrix": (192, 512), "experts": (3, 64, 512), "vocabulary": (1001, 77), "norm": (512,)}
CPU = torch.device("cpu")
SPEC = OptimizerSpec(weight_decay=0.1)


def shards(device: torch.device, dtype: torch.dtype) -> list[ParameterShard]:
    made = {name: torch.linspace(-1, 1, math.prod(shape)).view(shape) for name, shape in SHAPES.items()}
    parameters = {name: nn.Parameter(tensor.to(device, dtype)) for name, tensor in made.items()}
    return [ParameterShard(name, p, p.detach(), None, True, False, False) for name, p in parameters.items()]


def gradients(device: torch.device, dtype: torch.dtype, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_master_weights_are_updated_as_torch_does(device: torch.device, dtype: torch.dtype) -> None:
    ours, theirs = (shards(device, torch.float32) for _ in range(2))
    compiled, plain = MasterAdamW(ours, SPEC, compiles=True), AdamW(theirs, SPEC)
    for step in range(1, 6):
        compiled.factor = 0.3
        compiled.step(gradients(device, dtype, step), 1e-2 / step)
        plain.step([gradient.float() * 0.3 for gradient in gradients(device, dtype, step)], 1e-2 / step)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.local, other.local, rtol=1e-5, atol=1e-6, msg=mine.name)
        for name, moment in compiled.moments(mine).items():
            torch.testing.assert_close(moment, plain.moments(other)[name], rtol=1e-5, atol=1e-7)


def test_early_updates_are_dropped_if_their_factor_is_not_finite(device: torch.device) -> None:
    """The numbers of the others are those of updates with a factor that the host knows."""
    ours, theirs = (shards(device, torch.float32) for _ in range(2))
    early, other = (MasterAdamW(found, SPEC, compiles=True) for found in (ours, theirs))
    for step in range(1, 6):
        factor = torch.tensor(math.nan if step == 3 else 0.3, dtype=torch.float64, device=device)
        early.step_if_finite(gradients(device, torch.bfloat16, step), 1e-2 / step, factor)
        if step == 3:
            early.withdraw()
            continue
        other.factor = 0.3
        other.step(gradients(device, torch.bfloat16, step), 1e-2 / step)
    for mine, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.local, their.local, rtol=1e-6, atol=1e-7, msg=mine.name)
        for name, moment in early.moments(mine).items():
            torch.testing.assert_close(moment, other.moments(their)[name], rtol=1e-6, atol=1e-8)


def test_compiled_bf16_updates_are_the_cpus(device: torch.device) -> None:
    """Random numbers are the same, so only a last digit in fp32 may round another way."""
    ours, theirs = shards(device, torch.bfloat16), shards(CPU, torch.bfloat16)
    compiled, plain = BF16AdamW(ours, SPEC, seed=3, compiles=True), BF16AdamW(theirs, SPEC, seed=3)
    for step in range(1, 4):
        compiled.step(gradients(device, torch.bfloat16, step), 1e-2)
        plain.step(gradients(CPU, torch.bfloat16, step), 1e-2)
    for mine, other in zip(ours, theirs, strict=True):
        differ = (mine.local.cpu() != other.local).double().mean()
        assert float(differ) < 1e-2, mine.name
        torch.testing.assert_close(mine.local.cpu().float(), other.local.float(), rtol=2e-2, atol=1e-3)
