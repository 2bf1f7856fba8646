"""A module of one's own in the layout of a mesh. The order of the steps stands here and nowhere else.

What can be refused is, before anything is changed. Then the module is split over the tensor group, then sharded over
replicas: the other way round FSDP would gather what is about to be split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.replicas import DataParallelSpec
from meshwright.api.training import OptimizerSpec
from meshwright_worker.mesh import SHARD_REPLICA, TENSOR, Mesh
from meshwright_worker.models.initialize import local_part
from meshwright_worker.optimizer import AdamW, Optimizer
from meshwright_worker.optimizers.rounded import RoundedAdamW
from meshwright_worker.own.agree import first_difference
from meshwright_worker.own.plan import ParallelPlan
from meshwright_worker.own.randomness import Streams
from meshwright_worker.own.resolve import Parts, Role, resolve
from meshwright_worker.own.shard import check_has_rows, check_units, shard
from meshwright_worker.own.split import check_sizes, split
from meshwright_worker.parallel.ddp import BucketedAllReduce
from meshwright_worker.parallel.flat import FlatShards
from meshwright_worker.parallel.replicas import Reduced, Replicas
from meshwright_worker.parallel.shards import Shard, is_split_over_tensor
from meshwright_worker.parallel.tensor import hold_local_parts
from meshwright_worker.parallel.zero import settle

ZERO_STAGES = (0, 1, 2, 3)
FORMATS = (torch.float64, torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Built:
    """A module as this rank holds it, and what trains it."""

    module: nn.Module
    held: list[Shard]
    """Of every parameter that is trained, what this rank computes a gradient of."""
    frozen: list[Shard]
    """Of every other parameter."""
    replicas: Replicas
    optimizer: Optimizer
    zero_stage: int
    gathers: bool
    """Whether replicas compute every micro-batch together, since they gather parameters for it."""


def build(
    module: nn.Module,
    plan: ParallelPlan,
    mesh: Mesh,
    streams: Streams,
    spec: OptimizerSpec,
    *,
    zero_stage: int,
    seed: int,
) -> Built:
    """Split and shard a module in place. See `OwnTrainer` for the arguments and what is raised. Collective."""
    parts = checked(module, plan, mesh, zero_stage)
    module.to(mesh.device)
    # What an earlier backward pass has left would count in the first step.
    module.zero_grad()
    _check_same(module, mesh.device)
    streams.watch(parts)
    if mesh.layout.tensor > 1:
        split(module, parts, mesh.devices[TENSOR])
    several = mesh.replicas.size() > 1
    gathers = several and zero_stage >= 2
    if gathers:
        shard(module, parts, mesh.hybrid or mesh.replicas, zero_stage=zero_stage)
        settle(module)
        whole: Mapping[str, DTensor] = {n: p for n, p in module.named_parameters() if isinstance(p, DTensor)}
    else:
        whole = hold_local_parts(module)
    shards = [_shard(name, p, whole.get(name), parts, mesh, gathers) for name, p in module.named_parameters()]
    held = [one for one in shards if one.parameter.requires_grad]
    replicas: Replicas = Reduced(held)
    if several and zero_stage == 0:
        # How many micro-batches a step has, its caller decides; so gradients are summed after the last one.
        replicas = BucketedAllReduce(held, mesh, DataParallelSpec(), 1, overlap=False)
    elif several and zero_stage == 1:
        replicas = FlatShards(held, mesh, ParallelismSpec(zero_stage=1), 1, watch=False)
    optimizer = _optimizer(replicas, spec, seed)
    frozen = [one for one in shards if not one.parameter.requires_grad]
    return Built(module, held, frozen, replicas, optimizer, zero_stage, gathers)


def checked(module: nn.Module, plan: ParallelPlan, mesh: Mesh, zero_stage: int) -> Parts:
    """The parts of a plan, if it fits the module and the mesh. Changes nothing.

    Raises:
        PlanError: the plan does not fit the module.
        ValueError: the mesh, the stage or the module's formats are such that training would be wrong.
    """
    layout = mesh.layout
    if layout.pipeline > 1 or layout.context > 1 or layout.expert > 1:
        raise ValueError(
            "a module of one's own is split over tensor and data dimensions alone: `pipeline`, `context` and `expert` "
            f"are 1, not {layout.pipeline}, {layout.context} and {layout.expert}"
        )
    if mesh.islands is not None:
        raise ValueError("replicas of a module of one's own take every step together: leave out `training.outer`")
    if zero_stage not in ZERO_STAGES:
        raise ValueError(f"`zero_stage` is one of {', '.join(map(str, ZERO_STAGES))}, not {zero_stage}")
    _check_formats(module)
    _check_gradients(module)
    parts = resolve(module, plan)
    check_sizes(parts, layout.tensor)
    if zero_stage >= 2:
        check_units(module, parts)
    elif zero_stage == 1:
        for name, parameter in module.named_parameters():
            check_has_rows(name, parameter)
    return parts


def _check_formats(module: nn.Module) -> None:
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not trained:
        raise ValueError("the module has no parameter to train: all are frozen")
    first, expected = next((name, parameter.dtype) for name, parameter in trained.items())
    for name, parameter in trained.items():
        if parameter.dtype not in FORMATS:
            raise ValueError(
                f"`{name}` is {parameter.dtype}: parameters that are trained are fp64, fp32 or bf16; use `.to()` of "
                "one of them, and autocast in `forward` to compute in another"
            )
        if parameter.dtype is not expected:
            raise ValueError(
                f"`{first}` is {expected} and `{name}` is {parameter.dtype}: bring what is trained to one format by "
                "`.to()`, and use autocast in `forward` to compute in another"
            )


def _check_gradients(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) is True:
            raise ValueError(f"`{name}` has sparse gradients, which are not summed over ranks: leave out `sparse=True`")
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"`{name}` has a hook on its gradient, which the parts that ranks hold would not have: remove it, and "
                "change what `forward` computes instead"
            )


def _check_same(module: nn.Module, device: torch.device) -> None:
    name = first_difference({**dict(module.named_parameters()), **dict(module.named_buffers())}, device)
    if name is not None:
        raise ValueError(
            f"`{name}` is not the same on every rank: call `torch.manual_seed` with one seed before the module is "
            "built, or load the same weights everywhere"
        )


def _shard(name: str, parameter: nn.Parameter, whole: DTensor | None, parts: Parts, mesh: Mesh, gathers: bool) -> Shard:
    own_part = mesh.coordinates.tensor == 0 or is_split_over_tensor(whole)
    copies = mesh.hybrid is not None and mesh.hybrid.get_local_rank(SHARD_REPLICA) > 0
    counted = own_part and (not copies if gathers else mesh.replicas.get_local_rank() == 0)
    partial = mesh.layout.tensor > 1 and parts.roles[name] is Role.PARTIAL
    return Shard(name, parameter, local_part(parameter), whole, counted, partial, not gathers)


def _optimizer(replicas: Replicas, spec: OptimizerSpec, seed: int) -> Optimizer:
    if replicas.shards[0].local.dtype is torch.bfloat16:
        # Added in bf16, updates of less than a 256th of a weight would be lost.
        return RoundedAdamW(replicas.shards, spec, seed)
    return AdamW(replicas.shards, spec)
