"""How a module that Meshwright knows nothing about is split over ranks: a plan of names, and what is done by it.

The plan names parts of the module as in `named_modules()`; `*` stands for any part of a name, as in shells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

from meshwright.api.precision import Precision
from meshwright_worker.models.layers import local
from meshwright_worker.parallel.collectives import enter, leave
from meshwright_worker.precision import sharding_policy

Part = TypeVar("Part", bound=nn.Module)


class PlanError(ValueError):
    """A plan that does not fit its module. The message names the entry and what is wrong."""


@dataclass(frozen=True)
class ParallelPlan:
    """Names of a module's parts.

    A region is a sub-layer such as attention or a feed-forward layer: its input is whole on every rank of a tensor
    group, and the sum of its outputs over the ranks is its output. In between, matrices split by rows (`column` linear
    layers in Megatron-LM's words) give each rank some of the features or heads, and those split by columns take them
    in. Heads must be counted from the tensors, `x.unflatten(-1, (-1, head_size))`: a rank has some of them.
    """

    regions: tuple[str, ...] = ()
    """Modules that are split inside; their first argument and their result are tensors."""
    column: tuple[str, ...] = ()
    """`nn.Linear` layers in regions of which each rank computes some of the outputs."""
    row: tuple[str, ...] = ()
    """`nn.Linear` layers that end regions: each rank takes some of the inputs. Their bias is added once."""
    vocabulary: tuple[str, ...] = ()
    """`nn.Embedding` tables of which each rank holds some of the rows."""
    partial: tuple[str, ...] = ()
    """Modules in regions that every rank holds whole, such as norms of heads: their gradients are summed over ranks."""
    blocks: tuple[str, ...] = ()
    """Modules that ZeRO gathers one at a time: the layers."""


class _ColumnLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, local(self.weight), None if self.bias is None else local(self.bias))


class _RowLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, local(self.weight))


class _SplitEmbedding(nn.Embedding):
    first_row: int

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = local(self.weight)
        own = tokens - self.first_row
        elsewhere = (own < 0) | (own >= rows.shape[0])
        return F.embedding(own.masked_fill(elsewhere, 0), rows).masked_fill(elsewhere.unsqueeze(-1), 0.0)


def split(module: nn.Module, plan: ParallelPlan, tensor: DeviceMesh) -> None:
    """Split a module over a tensor group, in place. Every rank has the same weights before. Communicates nothing.

    Raises:
        PlanError: an entry names nothing, a module of another kind, or one that does not divide.
    """
    group = tensor.get_group()
    ranks = group.size()
    for name, linear in _named(module, plan.column, nn.Linear, "column"):
        _check(linear.out_features, ranks, f"outputs of `{name}`")
        _split(linear, tensor, Shard(0))
        linear.__class__ = _ColumnLinear
    rows = dict(_named(module, plan.row, nn.Linear, "row"))
    for name, linear in rows.items():
        _check(linear.in_features, ranks, f"inputs of `{name}`")
        _split(linear, tensor, Shard(1))
        linear.__class__ = _RowLinear
    for name, table in _named(module, plan.vocabulary, nn.Embedding, "vocabulary"):
        _check(table.num_embeddings, ranks, f"rows of `{name}`")
        _split(table, tensor, Shard(0))
        table.__class__ = _SplitEmbedding
        table.first_row = table.num_embeddings // ranks * group.rank()  # type: ignore[assignment]
        table.register_forward_hook(lambda _, __, output: leave(output, group, sequence=False))
    for name, region in _named(module, plan.regions, nn.Module, "regions"):
        region.register_forward_pre_hook(lambda _, inputs: (enter(inputs[0], group, sequence=False), *inputs[1:]))
        ends = [linear for path, linear in rows.items() if path == name or path.startswith(f"{name}.")]

        def summed(_: nn.Module, __: object, output: torch.Tensor, ends: list[nn.Linear] = ends) -> torch.Tensor:
            x = leave(output, group, sequence=False)
            for linear in ends:
                x = x if linear.bias is None else x + local(linear.bias)
            return x

        region.register_forward_hook(summed)


def shard(module: nn.Module, plan: ParallelPlan, replicas: DeviceMesh, *, zero_stage: int) -> None:
    """Shard every parameter over replicas by FSDP2, block by block, in place.

    Raises:
        PlanError: an entry of `blocks` names nothing.
    """
    blocks = [block for _, block in _named(module, plan.blocks, nn.Module, "blocks")]
    for part in [*blocks, module]:
        unit = fully_shard(
            part, mesh=replicas, reshard_after_forward=zero_stage == 3, mp_policy=sharding_policy(Precision.FP32)
        )
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def partial_names(module: nn.Module, plan: ParallelPlan) -> set[str]:
    """The parameters whose gradients are to be summed over the tensor group."""
    found = _named(module, plan.partial, nn.Module, "partial")
    return {f"{path}.{name}" for path, part in found for name, _ in part.named_parameters()}


def _named(module: nn.Module, patterns: tuple[str, ...], kind: type[Part], field: str) -> Iterator[tuple[str, Part]]:
    for pattern in patterns:
        found = [(name, part) for name, part in module.named_modules() if fnmatchcase(name, pattern)]
        if not found:
            raise PlanError(f"`{field}`: no module is called `{pattern}`")
        for name, part in found:
            if not isinstance(part, kind):
                raise PlanError(f"`{field}`: `{name}` is a {type(part).__name__}, not a {kind.__name__}")
            yield name, part


def _check(size: int, ranks: int, what: str) -> None:
    if size % ranks:
        raise PlanError(f"the {size} {what} do not divide over {ranks} ranks")


def _split(module: nn.Module, tensor: DeviceMesh, placement: Shard) -> None:
    for name, whole in list(module.named_parameters(recurse=False)):
        if whole.ndim > placement.dim:
            parts: DTensor = distribute_tensor(whole.detach(), tensor, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(parts))
