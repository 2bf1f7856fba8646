"""Splits a module over a tensor group according to its plan, in place."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from meshwright.rules.nearest import nearest
from meshwright_worker.custom_module.plan import PlanError
from meshwright_worker.custom_module.plan_resolution import ResolvedPlan, Role
from meshwright_worker.custom_module.tensor_parallel_layers import (
    ColumnLinear,
    GatheredLinear,
    RowLinear,
    SplitEmbedding,
)
from meshwright_worker.parallel.tensor.regions import enter_tensor_parallel, exit_tensor_parallel

_DIMENSION = {Role.ROWS: 0, Role.COLUMNS: 1}


def apply_tensor_parallel(module: nn.Module, parts: ResolvedPlan, tensor: DeviceMesh) -> None:
    """Split a module over a tensor group. Every rank must have the same weights. Communicates nothing.

    Raises:
        PlanError: a size does not divide evenly.
    """
    group = tensor.get_group()
    check_sizes(parts, group.size())
    _split_parameters(module, parts, tensor)
    for column in parts.column.values():
        column.__class__ = ColumnLinear
    for row in parts.row.values():
        row.__class__ = RowLinear
        row.bias_factor = float(group.rank() == 0)  # type: ignore[assignment]
    for gathered in parts.gathered.values():
        gathered.__class__ = GatheredLinear
        gathered.group = group  # type: ignore[assignment]
    for table in parts.vocabulary.values():
        table.__class__ = SplitEmbedding
        table.first_row = table.num_embeddings // group.size() * group.rank()  # type: ignore[assignment]
        table.group = group  # type: ignore[assignment]
    for name, region in parts.regions.items():
        _add_region_hooks(name, region, group)


def check_sizes(parts: ResolvedPlan, ranks: int) -> None:
    """Raise `PlanError` for sizes that do not divide over the ranks of a tensor group, with sizes that would."""
    for name, linear in {**parts.column, **parts.gathered}.items():
        _check(linear.out_features, ranks, f"outputs of `{name}`")
    for name, linear in parts.row.items():
        _check(linear.in_features, ranks, f"inputs of `{name}`")
    for name, table in parts.vocabulary.items():
        _check(table.num_embeddings, ranks, f"rows of `{name}`")


def _check(size: int, ranks: int, what: str) -> None:
    if size % ranks:
        degrees = nearest(ranks, lambda degree: size % degree == 0, size)
        raise PlanError(
            f"the {size} {what} do not divide over {ranks} ranks: the nearest tensor degrees that do are {degrees}, "
            f"the nearest size is {-(-size // ranks) * ranks}"
        )


def _split_parameters(module: nn.Module, parts: ResolvedPlan, tensor: DeviceMesh) -> None:
    split_parameters: dict[int, nn.Parameter] = {}
    # A parameter that is used in several places stays one, and accumulates the gradients of all of them.
    for name, whole in list(module.named_parameters(remove_duplicate=False)):
        dimension = _DIMENSION.get(parts.roles[name])
        if dimension is None:
            continue
        if id(whole) not in split_parameters:
            # A view would keep the full tensor in memory.
            local_part = whole.detach().chunk(tensor.size(), dim=dimension)[tensor.get_local_rank()].clone()
            split_parameters[id(whole)] = _part(local_part, whole, tensor, dimension)
        path, _, leaf = name.rpartition(".")
        module.get_submodule(path).register_parameter(leaf, split_parameters[id(whole)])


def _part(local_part: torch.Tensor, whole: nn.Parameter, tensor: DeviceMesh, dimension: int) -> nn.Parameter:
    parts = DTensor.from_local(
        local_part, tensor, [Shard(dimension)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return nn.Parameter(parts, requires_grad=whole.requires_grad)


def _add_region_hooks(name: str, region: nn.Module, group: dist.ProcessGroup) -> None:
    def before(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Of each tensor argument of a region, each rank has a part of the gradient.
        return tree_map_only(torch.Tensor, entered, (inputs, named))  # type: ignore[no-any-return]

    def entered(x: torch.Tensor) -> torch.Tensor:
        return enter_tensor_parallel(x, group, sequence=False) if x.requires_grad else x

    def after(_: nn.Module, __: object, output: Any) -> torch.Tensor:
        if not isinstance(output, torch.Tensor):
            raise PlanError(f"`regions`: `{name}` returned a {type(output).__name__}: a region returns one tensor")
        return exit_tensor_parallel(output, group, sequence=False)

    region.register_forward_pre_hook(before, with_kwargs=True)
    region.register_forward_hook(after)
