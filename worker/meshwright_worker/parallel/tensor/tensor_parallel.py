"""Tensor parallelism as in Megatron-LM (arXiv 1909.08053), optionally with its sequence parallelism (2205.05198).

Attention heads, the feed-forward width and the vocabulary are split over the ranks of a tensor group. With sequence
parallelism, the residual stream between the blocks is split along the positions; collectives at the borders of a block
may then overlap its products (`async_tensor_parallel`).

Parameters become DTensors, from which FSDP and checkpoints know what a shard is part of. Computation uses the local
tensors, with explicit collectives at the borders of each block. DTensor's own styles give the same numbers, but then
every operator goes through its dispatcher, which costs the host more than a small layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.layers import Linear, PositionEmbedding, local
from meshwright_worker.models.lora import DOWN, UP, AdaptedLinear
from meshwright_worker.models.moe import MixtureOfExperts
from meshwright_worker.parallel.expert.expert_parallel import (
    router_parameters,
    routes_slices,
    unsplit_expert_parameters,
)
from meshwright_worker.parallel.tensor.async_tensor_parallel import AllGatherMatmul, MatmulReduceScatter
from meshwright_worker.parallel.tensor.cross_entropy import VocabParallelLoss
from meshwright_worker.parallel.tensor.regions import enter_tensor_parallel, exit_tensor_parallel

_ROWS, _COLUMNS = Shard(0), Shard(1)

_ROW_PARALLEL = ("output", "down")
"""Row-parallel matrices of a sub-layer: each rank computes a part of a sum, to which the bias is added once."""
_REPLICATED = ("query_down", "kv_down", "query_norm", "key_norm", "kv_norm")
"""Replicated on every rank of a tensor group, which uses them for its own heads."""
_STREAM_NORMS = ("norm", "attention_norm", "feed_forward_norm", "attention_output_norm", "feed_forward_output_norm")
"""Norms of the residual stream, and of what is added to it."""
_REPLICATED_ADAPTER_MATRIX = (DOWN, UP)
"""The adapter's matrix that is replicated if the adapted matrix is split by rows, and if it is split by columns."""


def apply_tensor_parallel(stage: DecoderStage, tensor: DeviceMesh, *, sequence: bool, overlap: bool = False) -> None:
    """Split a stage in place. On the meta device it communicates nothing.

    `nn.Linear` stores [outputs, inputs]: splitting rows splits the outputs, splitting columns the inputs.

    Args:
        stage: the stage to split.
        tensor: the group, a mesh of one dimension.
        sequence: whether each rank has its own positions of the residual stream.
        overlap: with `sequence`: whether collectives overlap neighboring products where there are any.
    """
    group = tensor.get_group()
    split = _overlap_sublayer if overlap else partial(_split_sublayer, sequence=sequence)
    for block in stage.layers.values():
        split(block.get_submodule("attention"), tensor)
        _split_feed_forward(block.get_submodule("feed_forward"), tensor, sequence, split)
    if stage.is_first or (stage.is_last and stage.tied):
        _split(stage.embedding, tensor, _ROWS)
    if stage.is_first:
        stage.embedding.first_row = local_offset(stage.embedding.num_embeddings, group)
        _leave_after(stage.embedding, group, sequence)
        if stage.positions is not None and sequence:
            _slice_positions(stage.positions, group)
    if stage.is_last:
        stage.loss = VocabParallelLoss(local_offset(stage.output.out_features, group), group)
        _split(stage.output, tensor, _ROWS)
        if overlap:
            stage.output.product = AllGatherMatmul(group).one
        else:
            _enter_before(stage.output, group, sequence)
    stage.tie()


def local_offset(size: int, group: dist.ProcessGroup) -> int:
    """Return where this rank's part of a dimension begins; if it does not divide evenly, the last parts are smaller."""
    return -(-size // group.size()) * group.rank()


def partial_parameters(stage: DecoderStage, *, sequence: bool) -> list[nn.Parameter]:
    """Return the parameters whose gradients must be summed over a tensor group, since each rank has only a part of
    them.

    In attention these are the head norms and the projections into latents: replicated on every rank, which uses them
    only for its own heads. Of an adapter it is the matrix that is not split. Under sequence parallelism they include
    what works on the residual stream, of which a rank sees a slice of the positions. Routers are always included: each
    rank trains them on its own positions or through its own part of the experts. So are experts that no tensor group
    splits.
    """
    in_attention = [
        parameter
        for block in stage.layers.values()
        for name, module in block.get_submodule("attention").named_children()
        if name in _REPLICATED
        for parameter in module.parameters()
    ]
    in_attention += [*_adapter_parameters(stage), *router_parameters(stage), *unsplit_expert_parameters(stage)]
    return in_attention + (_residual_stream_parameters(stage) if sequence else [])


def _adapter_parameters(stage: DecoderStage) -> list[nn.Parameter]:
    return [
        module.get_parameter(_REPLICATED_ADAPTER_MATRIX[path.rpartition(".")[2] in _ROW_PARALLEL])
        for path, module in stage.named_modules()
        if isinstance(module, AdaptedLinear)
    ]


def _residual_stream_parameters(stage: DecoderStage) -> list[nn.Parameter]:
    modules = [module for module in stage.modules() if isinstance(module, PositionEmbedding)]
    found = [parameter for module in modules for parameter in module.parameters()]
    for path, module in stage.named_modules():
        name = path.rpartition(".")[2]
        if name in _STREAM_NORMS:
            found += module.parameters()
        elif name in _ROW_PARALLEL and module.bias is not None:
            found.append(module.bias)
    return found


def use_local_parameters(stage: DecoderStage) -> dict[str, DTensor]:
    """Replace distributed parameters by their local parts, in the same memory; return the former by name.

    Autograd through a DTensor costs the host a third of a millisecond for every use of a parameter. FSDP needs
    distributed parameters; without FSDP nothing does.
    """
    distributed = replace_with_local_parts(stage)
    stage.tie()
    return distributed


def replace_with_local_parts(module: nn.Module) -> dict[str, DTensor]:
    """Do the same as `use_local_parameters`, for any module. A parameter that is used in several places stays one."""
    distributed: dict[str, DTensor] = {n: p for n, p in module.named_parameters() if isinstance(p, DTensor)}
    parts = {
        id(value): nn.Parameter(value.to_local().detach(), requires_grad=value.requires_grad)
        for value in distributed.values()
    }
    for name, value in list(module.named_parameters(remove_duplicate=False)):
        if id(value) in parts:
            path, _, leaf = name.rpartition(".")
            module.get_submodule(path).register_parameter(leaf, parts[id(value)])
    return distributed


def _split_sublayer(module: nn.Module, tensor: DeviceMesh, sequence: bool) -> None:
    row_parallel = _split_matrices(module, tensor)
    for linear in row_parallel:
        linear.adds_bias = False
    _enter_before(module, tensor.get_group(), sequence)
    _leave_after(module, tensor.get_group(), sequence, row_parallel)


def _overlap_sublayer(module: nn.Module, tensor: DeviceMesh) -> None:
    for linear in _split_matrices(module, tensor):
        linear.product = MatmulReduceScatter(tensor.get_group())
    module.products = AllGatherMatmul(tensor.get_group())  # type: ignore[assignment]


def _split_feed_forward(
    module: nn.Module, tensor: DeviceMesh, sequence: bool, split: Callable[[nn.Module, DeviceMesh], None]
) -> None:
    """Split a feed-forward layer; of a mixture only the shared experts, since `apply_expert_parallel` splits the
    others.
    """
    if not isinstance(module, MixtureOfExperts):
        split(module, tensor)
    elif not routes_slices(module):
        # Routers also use the full residual stream: no product can hide its collectives.
        if module.shared is not None:
            _split_matrices(module.shared, tensor)
        _enter_before(module, tensor.get_group(), sequence)
        _leave_after(module, tensor.get_group(), sequence)
    elif module.shared is not None:
        split(module.shared, tensor)


def _split_matrices(module: nn.Module, tensor: DeviceMesh) -> list[Linear]:
    """Split the matrices of a sub-layer; returns those whose outputs are partial sums."""
    row_parallel = []
    for name, child in module.named_children():
        if name in _ROW_PARALLEL and isinstance(child, Linear):
            _split(child, tensor, _COLUMNS)
            row_parallel.append(child)
        elif isinstance(child, Linear) and name not in _REPLICATED:
            _split(child, tensor, _ROWS)
    return row_parallel


def _split(module: nn.Module, tensor: DeviceMesh, placement: Shard) -> None:
    for name, whole in list(module.named_parameters(recurse=False)):
        if whole.ndim <= placement.dim or name == _REPLICATED_ADAPTER_MATRIX[placement == _COLUMNS]:
            continue
        # No source rank: every rank takes its part of its own tensor, and weights are initialized later.
        split = distribute_tensor(whole.detach(), tensor, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split, requires_grad=whole.requires_grad))


def _enter_before(module: nn.Module, group: dist.ProcessGroup, sequence: bool) -> None:
    def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (enter_tensor_parallel(inputs[0], group, sequence=sequence), *inputs[1:])

    module.register_forward_pre_hook(hook)


def _leave_after(module: nn.Module, group: dist.ProcessGroup, sequence: bool, biased: Sequence[Linear] = ()) -> None:
    def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        x = exit_tensor_parallel(output, group, sequence=sequence)
        for linear in biased:
            if linear.bias is not None:
                x = x + local(linear.bias).to(x.dtype)
        return x

    module.register_forward_hook(hook)


def _slice_positions(module: nn.Module, group: dist.ProcessGroup) -> None:
    def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output.chunk(group.size(), dim=1)[group.rank()]

    module.register_forward_hook(hook)
