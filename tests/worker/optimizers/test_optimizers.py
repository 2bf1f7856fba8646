"""Optimizers on one rank: against torch's own, in parts, and what rounding does."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.api.training import OptimizerSpec
from meshwright.models.presets import PRESETS
from meshwright_worker.counter_rng import random_bits, stream_key, uniform
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.optimizers.adamw import AdamW
from meshwright_worker.optimizers.bf16_adamw import BF16AdamW, _matrix, element_numbers, matrices, round_to_bf16
from meshwright_worker.optimizers.muon import Muon, newton_schulz, uses_muon
from meshwright_worker.optimizers.offload_adamw import OffloadAdamW
from meshwright_worker.optimizers.offloaded_state import FileMomentState, HostMomentState
from meshwright_worker.optimizers.optimizer import Optimizer
from meshwright_worker.parallel.shards import ParameterShard

CPU = torch.device("cpu")
SPEC = OptimizerSpec(learning_rate=1e-2, weight_decay=0.1)
SHAPES = {"layers.0.attention.query.weight": (6, 4), "layers.0.norm.weight": (4,), "embedding.weight": (9, 4)}


def shards(dtype: torch.dtype = torch.float32) -> list[ParameterShard]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for name, shape in SHAPES.items():
        parameter = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        found.append(ParameterShard(name, parameter, parameter.detach(), None, True, False, False))
    return found


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES.values()]


def run(optimizer: Optimizer, steps: range, dtype: torch.dtype = torch.float32) -> None:
    for step in steps:
        optimizer.step(gradients(step, dtype), 1e-2)


def test_bits_are_uniform_and_a_function_of_key_and_counter() -> None:
    numbers = torch.arange(100_000)
    drawn = uniform(random_bits(numbers, stream_key(1, "a")))
    assert 0 <= float(drawn.min()) < 1e-3
    assert 1 - 1e-3 < float(drawn.max()) < 1
    assert float(drawn.mean()) == pytest.approx(0.5, abs=3e-3)
    assert float(drawn.var()) == pytest.approx(1 / 12, rel=1e-2)
    neighbors = torch.corrcoef(
        torch.stack([drawn[:-1], drawn[1:], uniform(random_bits(numbers[1:], stream_key(1, "b")))])
    )
    assert float((neighbors - torch.eye(3)).abs().max()) < 1e-2
    assert torch.equal(uniform(random_bits(numbers[500:600], stream_key(1, "a"))), drawn[500:600])


def test_stochastic_rounding_is_right_on_average_and_exact_where_it_can_be() -> None:
    x = torch.full((40_000,), 1.0 + 2**-9)
    rounded = round_to_bf16(x, random_bits(torch.arange(40_000), stream_key("x"))).double()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert float(rounded.mean()) == pytest.approx(1 + 2**-9, abs=2e-4)
    exact = torch.tensor([0.0, -1.5, 3e38, float("inf"), float("nan"), float("-inf")]).to(torch.bfloat16)
    kept = round_to_bf16(exact.float(), random_bits(torch.arange(6), stream_key("x")))
    assert torch.equal(kept.nan_to_num(7.0), exact.nan_to_num(7.0))


def test_a_part_of_a_tensor_is_rounded_as_in_the_full_tensor() -> None:
    whole = torch.randn(8, 6)
    numbers = element_numbers(8, 6, 6, 0, CPU)
    assert torch.equal(numbers.flatten(), torch.arange(48))
    box = (slice(2, 5), slice(3, 6))
    (part,) = matrices(box, (8, 6))
    bits = random_bits(element_numbers(3, 3, part.stride, part.offset, CPU), 5)
    assert torch.equal(round_to_bf16(whole[box], bits), round_to_bf16(whole, random_bits(numbers, 5))[box])


@pytest.mark.parametrize(
    ("box", "shape", "count"),
    [
        ((slice(3, 7),), (9,), 1),
        ((slice(2, 4), slice(0, 5), slice(0, 6)), (8, 5, 6), 1),
        ((slice(2, 4), slice(1, 3), slice(0, 6)), (8, 5, 6), 1),
        ((slice(2, 4), slice(0, 5), slice(2, 6)), (8, 5, 6), 2),
        ((slice(1, 3), slice(0, 3), slice(0, 2), slice(0, 2)), (4, 3, 2, 2), 1),
    ],
)
def test_every_part_knows_its_place_in_the_full_tensor(
    box: tuple[slice, ...], shape: tuple[int, ...], count: int
) -> None:
    want = torch.arange(math.prod(shape)).view(shape)[box].contiguous()
    found = matrices(box, shape)
    assert len(found) == count
    for matrix in found:
        part = _matrix(want, matrix)
        assert torch.equal(element_numbers(*part.shape, matrix.stride, matrix.offset, CPU), part)
    assert sum(_matrix(want, matrix).numel() for matrix in found) == want.numel()


def test_updates_too_small_for_bf16_add_up_when_rounded_stochastically() -> None:
    parameter = nn.Parameter(torch.ones(4096, 1, dtype=torch.bfloat16))
    shard = ParameterShard("w", parameter, parameter.detach(), None, True, False, False)
    optimizer = BF16AdamW([shard], OptimizerSpec(weight_decay=0.0), seed=0)
    for _ in range(64):
        optimizer.step([torch.ones(4096, 1, dtype=torch.bfloat16)], 1e-4)
    assert float(shard.local.float().mean()) == pytest.approx(1 - 64e-4, abs=4e-4)


def test_adamw_without_masters_stays_near_adamw_with_them() -> None:
    ours, theirs = shards(torch.bfloat16), shards()
    for rounded, exact in zip(ours, theirs, strict=True):
        exact.local.copy_(rounded.local)
    run(BF16AdamW(ours, SPEC, seed=0), range(20), torch.bfloat16)
    run(AdamW(theirs, SPEC), range(20))
    for rounded, exact in zip(ours, theirs, strict=True):
        assert float((rounded.local.float() - exact.local).abs().mean()) < 2e-2


@pytest.mark.parametrize("tier", ["CPU", "File"])
def test_offloaded_adamw_is_adamw(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Several buckets, so that they come, are updated and go beside each other.
    monkeypatch.setattr("meshwright_worker.optimizers.offloaded_state._BUCKET_ELEMENTS", 24)
    ours, theirs = shards(), shards()
    local = [shard.local for shard in ours]
    state = HostMomentState(local, pinned=False) if tier == "CPU" else FileMomentState(local, str(tmp_path))
    assert len(state.buckets) == 3
    offloaded, plain = OffloadAdamW(ours, SPEC, state, CPU), AdamW(theirs, SPEC)
    for optimizer in (offloaded, plain):
        run(optimizer, range(4))
        optimizer.set_step_count(4)
        run(optimizer, range(4, 8))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.local, other.local)
        moments, want = offloaded.moments(mine), plain.moments(other)
        assert all(torch.equal(moments[name], want[name]) for name in want)
    assert list(tmp_path.iterdir()) == []


def test_newton_schulz_brings_singular_values_near_one() -> None:
    for shape in ((8, 20), (20, 8), (3, 8, 20)):
        values = torch.linalg.svdvals(newton_schulz(torch.randn(shape, dtype=torch.float64)))
        assert float(values.min()) > 0.5
        assert float(values.max()) < 1.3


def test_muon_takes_the_layers_matrices_and_no_table() -> None:
    with torch.device("meta"):
        stage = DecoderStage(PRESETS["tiny-gpt"], torch.float32)
    found = [ParameterShard(name, p, p.detach(), None, True, False, False) for name, p in stage.named_parameters()]
    adamws = {shard.name for shard in found if shard.local.ndim > 1 and not uses_muon(shard)}
    assert adamws | {"output.weight"} == {"embedding.weight", "positions.weight", "output.weight"}
    muons = {shard.name.split(".", 2)[2] for shard in found if uses_muon(shard)}
    assert muons == {
        *(f"attention.{name}.weight" for name in ("query", "key", "value", "output")),
        *(f"feed_forward.{name}.weight" for name in ("up", "down")),
    }


def test_a_full_disk_is_reported_with_its_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        assert size == 4 * (6 * 4 + 4 + 9 * 4)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=f"`training.optimizer.offloadPath: {tmp_path}`.*No space left") as caught:
        FileMomentState([shard.local for shard in shards()], str(tmp_path))
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_muon_updates_as_torchs() -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    ours, (theirs, *_) = shards(), shards()
    matrix = theirs.parameter
    torch_muon = torch.optim.Muon([matrix], lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    optimizer = Muon(ours, SPEC, torch.bfloat16, CPU)
    for step in range(3):
        matrix.grad = gradients(step)[0]
        torch_muon.step()
        optimizer.step(gradients(step), 1e-2)
    assert torch.allclose(ours[0].local, matrix.detach(), atol=2e-3)
    assert set(optimizer.moments(ours[0])) == {"momentum"}
    assert set(optimizer.moments(ours[2])) == {"exp_avg", "exp_avg_sq"}
