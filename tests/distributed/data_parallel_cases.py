"""What ranks run to have their memory and overlap measured, and torch's FSDP1 beside."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from meshwright_worker.data.batch import Batch
from meshwright_worker.distributed.mesh import REPLICA, join_mesh
from meshwright_worker.dtypes import compute_dtype, parameter_dtype
from meshwright_worker.models.decoder import Block, DecoderStage
from meshwright_worker.models.init_weights import init_weights
from meshwright_worker.optimizers.learning_rate import learning_rate
from meshwright_worker.rank.task import RankTask
from meshwright_worker.trainer.trainer import Trainer
from tests.distributed.cases import samples_of, whole_of
from tests.distributed.comm_counter import Counting
from tests.distributed.gloo_threads import wait_for_gloo


@dataclass
class Held:
    """Bytes of live tensors on this rank."""

    at_update: int
    """When the optimizer begins."""
    between: int
    """After the first micro-batch's backward pass."""


def reductions_under_way(task: RankTask) -> tuple[int, int]:
    """When the last backward pass of a step returns: all-reduces that were started, and how many a step has."""
    with join_mesh(task) as mesh:
        trainer, batch = _prepared(task, mesh)
        with Counting() as counting:
            trainer._executor.run(batch.chunk(task.run.micro_batches))
            early = counting.traffic.calls["all-reduce", 2]
            gradients = trainer.data_parallel.reduce()
        assert len(gradients) == len(trainer.shards)
        return early, counting.traffic.calls["all-reduce", 2]


def measure_memory(task: RankTask) -> Held:
    """Live bytes of the second step."""
    with join_mesh(task) as mesh:
        gc.collect()
        before = _live()
        trainer, batch = _prepared(task, mesh)
        trainer.step(1, batch)
        held = Held(0, 0)
        update, module = trainer.optimizer.step, trainer.stages[0].module
        passes = 0

        def entered(*_: object) -> None:
            nonlocal passes
            passes += 1
            if passes == 2:
                held.between = _live() - before

        def watched(gradients: list[torch.Tensor], rate: float) -> None:
            held.at_update = _live() - before
            update(gradients, rate)

        trainer.optimizer.step = watched  # type: ignore[method-assign]
        # Before those of FSDP, which gather.
        module.register_forward_pre_hook(entered, prepend=True)
        trainer.step(2, batch)
        return held


def train_by_fsdp1(task: RankTask, strategy: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Parameters after two steps: of our strategy, and of torch's FSDP1 with its own clipping."""
    with join_mesh(task) as mesh:
        trainer, batch = _prepared(task, mesh)
        for number in (1, 2):
            trainer.step(number, batch)
        ours = {shard.name: whole_of(shard, shard.local) for shard in trainer.shards}
        return ours, _by_fsdp1(task, strategy, batch, mesh.group(REPLICA))


def _by_fsdp1(task: RankTask, strategy: str, batch: Batch, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    model, training = task.run.architecture, task.run.training
    with torch.device("meta"):
        stage = DecoderStage(model, compute_dtype(training.precision)).to(parameter_dtype(training.precision))
    init_weights(stage, model, training.seed, torch.device("cpu"))
    matrices = {name for name, parameter in stage.named_parameters() if parameter.ndim > 1}
    wrapped = FullyShardedDataParallel(
        stage,
        process_group=group,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    spec = training.optimizer

    def named() -> Sequence[tuple[str, torch.nn.Parameter]]:
        return [(name.replace("_fsdp_wrapped_module.", ""), value) for name, value in wrapped.named_parameters()]

    groups = [
        {"params": [value for name, value in named() if (name in matrices) == decayed], "weight_decay": decay}
        for decayed, decay in ((True, spec.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, betas=(spec.beta1, spec.beta2))
    for number in (1, 2):
        optimizer.zero_grad()
        loss = wrapped(batch.tokens, targets=batch.targets) / batch.targets.numel()
        loss.backward()
        if spec.gradient_clip:
            wrapped.clip_grad_norm_(spec.gradient_clip)
        for one in optimizer.param_groups:
            one["lr"] = learning_rate(number, training.steps, spec)
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(wrapped):
        return {name: value.detach().clone() for name, value in named()}


def _prepared(task: RankTask, mesh: Any) -> tuple[Trainer, Batch]:
    model, training = task.run.architecture, task.run.training
    trainer = Trainer(task.run, mesh)
    share = training.global_batch_size // mesh.layout.data
    samples = samples_of(1, training.global_batch_size, training.sequence_length, model.vocab_size)
    first = mesh.coordinates.data * share
    return trainer, Batch.of(samples[first : first + share])


def _live() -> int:
    """Bytes of all storages that a tensor of this process refers to, each once."""
    wait_for_gloo()
    storages = {}
    for one in gc.get_objects():
        # Some proxies raise when asked what they are.
        try:
            is_tensor = isinstance(one, torch.Tensor)
        except Exception:
            continue
        # What the compiler traced with has no memory.
        if is_tensor and one.device.type == "cpu" and not isinstance(one, FakeTensor):
            local = one.to_local() if hasattr(one, "to_local") else one
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            gradient = local.grad if local.is_leaf else None
            if gradient is not None:
                inner = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                storages[inner.untyped_storage().data_ptr()] = inner.untyped_storage().nbytes()
    return sum(storages.values())
