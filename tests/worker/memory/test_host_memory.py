"""What lies in main memory while the mesh is of GPUs: a mesh that says so needs none, on a back end that sends nothing.

torch moves a tensor to the mesh's device where it can, and here raises that there is none. Where tensors are meant to
move, they are pretended ones: they have a device and no numbers, and an operation on two devices raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Rows
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.api.training import OptimizerSpec, OuterSpec
from meshwright.models.architecture import Architecture
from meshwright.models.presets import PRESETS
from meshwright_worker.checkpoint.state_dict import allocate_copy, as_distributed, copy_tensors
from meshwright_worker.local_sgd.diloco import DiLoCo
from meshwright_worker.local_sgd.parameter_averaging import average_over_islands
from meshwright_worker.memory import host_memory
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.init_weights import materialize
from meshwright_worker.optimizers import muon
from meshwright_worker.parallel.grad_norm import all_reduce_partial
from meshwright_worker.parallel.shards import ParameterShard
from tests.distributed.configs import NUMBERS
from tests.distributed.moe_models import MIXTURES

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpus() -> Iterator[DeviceMesh]:
    """Two GPUs, of which this process has the first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield DeviceMesh("cuda", torch.arange(2), mesh_dim_names=("replica",))
    dist.destroy_process_group()


@pytest.fixture
def pretended() -> FakeTensorMode:
    return FakeTensorMode()


@pytest.fixture
def summed_on(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The device of every tensor that ranks sum, in order."""
    devices: list[str] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: devices.append(tensor.device.type))
    return devices


def offloaded(mesh: DeviceMesh, local: torch.Tensor) -> ParameterShard:
    """Half of the rows of a parameter, in main memory, as FSDP's offloading leaves it."""
    shape = torch.Size((2 * local.shape[0], *local.shape[1:]))
    spec = DTensorSpec(mesh, (Rows(0),), tensor_meta=TensorMeta(shape, local.stride(), local.dtype))
    whole = DTensor(local, spec, requires_grad=False)
    return ParameterShard("weight", nn.Parameter(whole), local, whole, True, False, False)


def test_a_part_in_main_memory_is_saved_and_loaded_there(gpus: DeviceMesh) -> None:
    shard = offloaded(gpus, torch.arange(6.0).view(2, 3))
    moment = torch.full((2, 3), 2.0)
    whole = as_distributed(shard, moment)
    assert isinstance(whole, DTensor)
    assert whole.shape == (4, 3)
    assert whole.to_local().data_ptr() == moment.data_ptr()
    assert [tuple(chunk.offsets) for chunk in whole.__create_chunk_list__()] == [(0, 0)]  # type: ignore[no-untyped-call]
    whole.to_local().fill_(7.0)
    assert float(moment.sum()) == 42.0


def test_a_copy_to_write_is_in_main_memory_and_used_again(gpus: DeviceMesh) -> None:
    shard = offloaded(gpus, torch.arange(6.0).view(2, 3))
    tensors = {"weight": as_distributed(shard, shard.local), "buffer": torch.ones(2)}
    staged: dict[str, torch.Tensor] = {}
    copies = allocate_copy(tensors, staged, None)
    copy_tensors(tensors, copies)
    copied = copies["weight"]
    assert isinstance(copied, DTensor)
    memory = copied.to_local().data_ptr()
    assert memory != shard.local.data_ptr()
    shard.local.zero_()
    assert copied.to_local().flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    copy_tensors(tensors, allocate_copy(tensors, staged, None))
    again = staged["weight"]
    assert isinstance(again, DTensor)
    assert again.to_local().data_ptr() == memory
    assert float(again.to_local().sum()) == 0.0


def test_a_part_of_another_format_is_an_error(gpus: DeviceMesh) -> None:
    whole = as_distributed(offloaded(gpus, torch.zeros(2, 3)), torch.zeros(2, 3, dtype=torch.bfloat16))
    assert whole.dtype == torch.bfloat16


def test_what_is_summed_of_offloaded_gradients_is_summed_on_the_gpu(
    gpus: DeviceMesh, summed_on: list[str], pretended: FakeTensorMode
) -> None:
    with pretended:
        shards = [replace(offloaded(gpus, torch.ones(2, 3)), partial=True)]
        gradient = torch.ones(2, 3)
        all_reduce_partial(shards, [gradient], gpus.get_group(), GPU)
        average_over_islands([gradient], 0.5, gpus.get_group(), GPU)
        assert gradient.device.type == "cpu"
    assert summed_on == ["cuda", "cuda"]


def test_islands_synchronize_on_the_gpu(gpus: DeviceMesh, summed_on: list[str], pretended: FakeTensorMode) -> None:
    mesh = SimpleNamespace(group=lambda _: gpus.get_group(), device=GPU)
    with pretended:
        outer = DiLoCo([offloaded(gpus, torch.ones(2, 3))], None, mesh, OuterSpec(method="DiLoCo"))  # type: ignore[arg-type]
        # A pretended flag has no value to look at: the sum before it is what counts here.
        with pytest.raises(DataDependentOutputException):
            outer.synchronize(stop=False)
    assert summed_on == ["cuda", "cuda"]


def test_muon_orthogonalizes_offloaded_matrices_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[str] = []

    def observed(matrix: torch.Tensor) -> torch.Tensor:
        where.append(matrix.device.type)
        return torch.ones_like(matrix, device="cpu")

    monkeypatch.setattr(muon, "newton_schulz", observed)
    shard = ParameterShard("weight", nn.Parameter(torch.zeros(2, 3)), torch.zeros(2, 3), None, True, False, False)
    optimizer = muon.Muon([shard], OptimizerSpec(), torch.bfloat16, torch.device("meta"))
    optimizer.step([torch.ones(2, 3)], 1.0)
    assert where == ["meta"]
    assert shard.local.flatten().tolist() == pytest.approx([-0.2 * 3**0.5] * 6, rel=1e-2)


def test_buffers_are_on_the_device_wherever_parameters_are() -> None:
    with torch.device("meta"):
        stage = DecoderStage(Architecture(**{**NUMBERS, "mixture": MIXTURES["DeepSeek-V3"]}), torch.float32)
    materialize(stage, torch.device("cpu"), torch.device("meta"))
    assert {buffer.device.type for buffer in stage.buffers()} == {"cpu"}
    assert {parameter.device.type for parameter in stage.parameters()} == {"meta"}


def test_tensors_share_page_locked_blocks_and_not_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def noted(size: object, **options: object) -> torch.Tensor:
        if options.pop("pin_memory", False):
            assert isinstance(size, int)
            sizes.append(size)
        return empty(size, **options)

    empty: Any = torch.empty
    monkeypatch.setattr(host_memory.torch, "empty", noted)
    likes = [torch.zeros(shape) for shape in ((300, 40), (5,), (), (0, 3), (300, 40), (7, 100))]
    likes[1] = likes[1].to(torch.bfloat16)
    memory = host_memory.allocate_host_tensors(likes, pinned_memory=True)
    for number, (own, like) in enumerate(zip(memory, likes, strict=True)):
        assert (own.shape, own.dtype) == (like.shape, like.dtype)
        own.fill_(number)
    assert all((own == number).all() for number, own in enumerate(memory))
    # 48,000 bytes each: one needs 65,536, which all that is smaller finds room in.
    assert sizes == [65536, 65536]


@pytest.mark.parametrize(("name", "most"), [("llama-3-8b", 1.01), ("llama-3.2-3b", 1.01)])
def test_moments_of_a_model_waste_little_page_locked_memory(name: str, most: float) -> None:
    with torch.device("meta"):
        stage = DecoderStage(PRESETS[name], torch.bfloat16)
    wanted = [4 * parameter.numel() for parameter in stage.parameters()] * 2
    blocks = host_memory.pack_into_blocks(wanted)
    assert sum(block.size for block in blocks) < most * sum(wanted)
    assert sorted(number for block in blocks for number, _ in block.places) == list(range(len(wanted)))
    assert all(block.used <= block.size and block.size.bit_count() == 1 for block in blocks)
