"""Tensor parallelism after Megatron-LM (arXiv 1909.08053), optionally with its sequence parallelism (2205.05198).

Attention heads, the feed-forward width and the vocabulary are split over the ranks of a tensor group. With sequence
parallelism the residual stream between the blocks is split along the positions.

Parameters become DTensors, which is how FSDP and checkpoints know what a shard is part of; computation runs on the
local tensors with explicit collectives at the borders of each block. DTensor's own styles give the same numbers, but
every operator then goes through its dispatcher, which costs the host more than a small layer does.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshwright_worker.models.experts import MixtureOfExperts
from meshwright_worker.models.llama import DecoderStage
from meshwright_worker.parallel.collectives import enter, leave
from meshwright_worker.parallel.expert import routers_of, routes_slices
from meshwright_worker.parallel.vocabulary import SplitTokenLoss

_ROWS, _COLUMNS = Shard(0), Shard(1)


def split_over_tensor_group(stage: DecoderStage, tensor: DeviceMesh, *, sequence: bool) -> None:
    """Split a stage in place. On the meta device it communicates nothing.

    `nn.Linear` stores [outputs, inputs]: splitting rows splits the outputs, splitting columns the inputs.
    """
    group = tensor.get_group()
    for block in stage.layers.values():
        attention = block.get_submodule("attention")
        for name in ("query", "key", "value"):
            _split(attention.get_submodule(name), tensor, _ROWS)
        _split(attention.get_submodule("output"), tensor, _COLUMNS)
        for module in (attention, _split_feed_forward(block.get_submodule("feed_forward"), tensor)):
            if module is not None:
                _enter_before(module, group, sequence)
                _leave_after(module, group, sequence)
    if stage.is_first or (stage.is_last and stage.tied):
        _split(stage.embedding, tensor, _ROWS)
    if stage.is_first:
        rows = stage.embedding.num_embeddings // group.size()
        stage.embedding.first_row = rows * group.rank()
        _leave_after(stage.embedding, group, sequence)
    if stage.is_last:
        columns = stage.output.out_features // group.size()
        stage.loss = SplitTokenLoss(columns * group.rank(), group)
        _split(stage.output, tensor, _ROWS)
        _enter_before(stage.output, group, sequence)
    stage.tie()


def _split_feed_forward(module: nn.Module, tensor: DeviceMesh) -> nn.Module | None:
    """Split a feed-forward layer, of a mixture the shared experts; returns what works on the whole residual stream."""
    dense, around = (module.shared, module) if isinstance(module, MixtureOfExperts) else (module, module)
    if dense is not None:
        for name in ("gate", "up"):
            _split(dense.get_submodule(name), tensor, _ROWS)
        _split(dense.get_submodule("down"), tensor, _COLUMNS)
    return dense if isinstance(module, MixtureOfExperts) and routes_slices(module) else around


def partial_parameters(stage: DecoderStage, *, sequence: bool) -> list[nn.Parameter]:
    """The parameters of which each rank of a tensor group has only its positions' gradient: it has to be summed there.

    Under sequence parallelism these are the norms: they are whole on every rank but see a slice of the positions. And
    always the routers, which each rank learns from its own positions or through its own part of the experts.
    """
    norms = [parameter for parameter in stage.parameters() if parameter.ndim == 1] if sequence else []
    return [*norms, *routers_of(stage)]


def compute_on_local(stage: DecoderStage) -> dict[str, DTensor]:
    """Let modules hold the local parts of their distributed parameters; returns the latter by name, in the same memory.

    Autograd through a DTensor costs the host a third of a millisecond for every use of a parameter. FSDP needs its
    parameters distributed; where there is none, nothing does.
    """
    distributed: dict[str, DTensor] = {n: p for n, p in stage.named_parameters() if isinstance(p, DTensor)}
    for name, value in distributed.items():
        path, _, leaf = name.rpartition(".")
        stage.get_submodule(path).register_parameter(leaf, nn.Parameter(value.to_local().detach()))
    stage.tie()
    return distributed


def _split(module: nn.Module, tensor: DeviceMesh, placement: Shard) -> None:
    whole = module.get_parameter("weight")
    # No source rank: every rank takes its own part of what it has, and weights are drawn later.
    split = distribute_tensor(whole.detach(), tensor, [placement], src_data_rank=None)
    module.register_parameter("weight", nn.Parameter(split))


def _enter_before(module: nn.Module, group: dist.ProcessGroup, sequence: bool) -> None:
    def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (enter(inputs[0], group, sequence=sequence), *inputs[1:])

    module.register_forward_pre_hook(hook)


def _leave_after(module: nn.Module, group: dist.ProcessGroup, sequence: bool) -> None:
    def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return leave(output, group, sequence=sequence)

    module.register_forward_hook(hook)
