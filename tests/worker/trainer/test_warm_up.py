"""What runs before the first step on GPUs, on a CPU."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from meshwright.api.data import Packing
from meshwright.api.parallelism import ContextMethod
from meshwright.models.presets import PRESETS
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.distributed import mesh as meshes
from meshwright_worker.distributed.mesh import (
    EXPERT,
    EXPERT_REPLICA,
    PIPELINE,
    REPLICA,
    TENSOR,
    Mesh,
    own_groups,
)
from meshwright_worker.models.attention import AttentionCore
from meshwright_worker.parallel.context import varlen_attention
from meshwright_worker.parallel.context.context_parallel import RingAttentionCore, UlyssesAttentionCore
from meshwright_worker.trainer import train
from meshwright_worker.trainer.train import OpenedRun, build_trainer, train_on_mesh
from meshwright_worker.trainer.trainer import Trainer
from meshwright_worker.trainer.warm_up import groups_of_steps, narrow, warm_up_groups, warm_up_kernels
from tests.distributed.configs import small_run
from tests.worker.simulated import simulated_mesh, task_of

RINGS = small_run(tensor=2, pipeline=2, context=4, method=ContextMethod.RING_ULYSSES, ulysses=2)
EXPERTS = small_run(tensor=2, data=4, expert=2, mixture="Mixtral")


@pytest.mark.parametrize("preset", ["llama-3-8b", "deepseek-v3", "gpt2", "qwen3-8b", "mixtral-8x7b", "tiny-gpt"])
def test_a_narrow_layer_has_the_attention_of_the_model(preset: str) -> None:
    model = PRESETS[preset]
    small = narrow(model)
    assert small.parameters < 20e6
    assert small.heads / small.kv_heads == model.heads / model.kv_heads
    assert (small.key_size, small.value_size, small.latent) == (model.key_size, model.value_size, model.latent)
    run = small_run().model_copy(update={"architecture": model})
    before = torch.get_rng_state()
    warm_up_kernels(run, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("preset", ["llama-3-8b", "deepseek-v3", "gpt2"])
@pytest.mark.parametrize("varlen", [False, True])
def test_packed_documents_warm_up_the_attention_of_documents(
    preset: str, varlen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, segments = varlen_attention.attend_varlen, list[int]()

    def counting(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        segments.append(len(args[3].blocks.segments))
        return attend(*args)

    def masked(*_: Any) -> torch.Tensor:
        raise AssertionError("attention with a mask")

    monkeypatch.setattr(varlen_attention, "attend_varlen", counting)
    monkeypatch.setattr(AttentionCore, "forward", masked)
    run = small_run(packing=Packing.DOCUMENTS, training={"varlen_attention": varlen})
    warm_up_kernels(run.model_copy(update={"architecture": PRESETS[preset]}), torch.device("cpu"))
    assert segments == ([4] if varlen else [])


@pytest.mark.parametrize("rank", [0, 7])
@pytest.mark.parametrize("run", [pytest.param(RINGS, id="rings"), pytest.param(EXPERTS, id="experts")])
def test_warm_up_connects_what_steps_use_and_nothing_twice(
    run: NativeRun, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected: list[Any] = []
    with simulated_mesh(run, rank) as mesh:
        trainer = build_trainer(run, mesh)
        assert isinstance(trainer, Trainer)
        monkeypatch.setattr(dist, "all_reduce", lambda x, group: connected.append(group))
        warm_up_groups(mesh.device)
        assert connected == groups_of_steps()
        used = [mesh.group(name) for name in (TENSOR, REPLICA, *([EXPERT, EXPERT_REPLICA] if run is EXPERTS else []))]
        if run is RINGS:
            used.append(mesh.group(PIPELINE))
            cores = [part for stage in trainer.stages for part in stage.module.modules()]
            used += [core._group for core in cores if isinstance(core, RingAttentionCore | UlyssesAttentionCore)]
        assert set(used) <= set(connected)
        known = [(group.group_desc, tuple(dist.get_process_group_ranks(group))) for group in connected]
        assert all(len(ranks) > 1 for _, ranks in known), "one rank alone needs no communicator"
        of_meshes = [entry for entry in known if entry[0].startswith("mesh_")]
        assert len(set(of_meshes)) == len(of_meshes)
        assert len(connected) < len(own_groups())


class ReachedError(Exception):
    """The groups are about to be used."""


def test_groups_that_a_model_creates_have_the_limit_of_a_start_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of some ranks compiles for longer than torch lets others wait in these groups."""
    limits: dict[Any, timedelta] = {}
    monkeypatch.setattr(distributed_c10d, "_set_pg_timeout", lambda limit, group: limits.update({group: limit}))

    def set_limit(limit: timedelta) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(dist, "get_backend", lambda group=None: "nccl")
            original(limit)

    def reached(run: NativeRun, mesh: Mesh) -> None:
        raise ReachedError

    original = meshes.set_collective_timeout
    monkeypatch.setattr(meshes, "set_collective_timeout", set_limit)
    monkeypatch.setattr(train, "set_collective_timeout", set_limit, raising=False)
    monkeypatch.setattr(train, "warm_up", reached)
    events: Any = SimpleNamespace(phase=lambda name, seconds: None)
    stream = SimpleNamespace(identity="text", samples_per_epoch=1, tokens=1)
    inputs: Any = SimpleNamespace(stream=stream, samples=1, evaluation=None)
    with simulated_mesh(RINGS, 0) as mesh:
        with pytest.raises(ReachedError):
            train_on_mesh(task_of(RINGS, 0), events, OpenedRun(inputs, None), mesh)
        groups = own_groups()
    assert len(groups) > 10
    assert {limits.get(group) for group in groups} == {timedelta(minutes=30)}
