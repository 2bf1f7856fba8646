"""Applies the layout of a mesh to a custom module. This is the only module that defines the order of the steps.

All checks run before the module is modified. Then the module is split over the tensor group, and then sharded over
replicas: in the other order FSDP would gather what is about to be split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.api.data_parallel import DataParallelSpec
from meshwright.api.parallelism import ParallelismSpec
from meshwright.api.training import OptimizerName, OptimizerOffload, OptimizerSpec
from meshwright_worker.custom_module.fsdp import apply_fsdp, check_fsdp_units, check_shardable
from meshwright_worker.custom_module.plan import ParallelPlan
from meshwright_worker.custom_module.plan_resolution import ResolvedPlan, Role, resolve
from meshwright_worker.custom_module.rng import RandomStreams
from meshwright_worker.custom_module.tensor_parallel import apply_tensor_parallel, check_sizes
from meshwright_worker.distributed.mesh import SHARD_REPLICA, TENSOR, Mesh
from meshwright_worker.models.init_weights import local_part
from meshwright_worker.optimizers.adamw import AdamW
from meshwright_worker.optimizers.bf16_adamw import BF16AdamW
from meshwright_worker.optimizers.optimizer import Optimizer
from meshwright_worker.parallel.data.data_parallel import DataParallel, NoReduction
from meshwright_worker.parallel.data.ddp import BucketedAllReduce
from meshwright_worker.parallel.data.fsdp import UsedParameters, preallocate_fsdp_storage
from meshwright_worker.parallel.data.zero import ZeroShards
from meshwright_worker.parallel.shards import ParameterShard, is_split_over_tensor
from meshwright_worker.parallel.tensor.tensor_parallel import replace_with_local_parts

ZERO_STAGES = (0, 1, 2, 3)
FORMATS = (torch.float64, torch.float32, torch.bfloat16)

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class ParallelModule:
    """A custom module as this rank stores it, and the objects that train it."""

    module: nn.Module
    trained_shards: list[ParameterShard]
    """For every trained parameter, the part that this rank computes a gradient of."""
    frozen: list[ParameterShard]
    """The same for every other parameter."""
    data_parallel: DataParallel
    optimizer: Optimizer
    zero_stage: int
    gathers_parameters: bool
    """Whether replicas run every micro-batch at the same time, since they gather parameters for it."""
    used: UsedParameters | None
    """Set if backward passes reduce gradients themselves."""


def parallelize(
    module: nn.Module,
    plan: ParallelPlan,
    mesh: Mesh,
    streams: RandomStreams,
    spec: OptimizerSpec,
    *,
    zero_stage: int,
    seed: int,
) -> ParallelModule:
    """Split and shard a module in place. Arguments and errors as for `CustomModuleTrainer`. Collective."""
    parts = check_plan(module, plan, mesh, zero_stage)
    _check_optimizer(spec)
    module.to(mesh.device)
    _make_contiguous(module)
    # Gradients of an earlier backward pass would count in the first step.
    module.zero_grad()
    _check_same_weights(module, mesh.device)
    streams.watch(parts)
    if mesh.layout.tensor > 1:
        apply_tensor_parallel(module, parts, mesh.device_mesh[TENSOR])
    has_replicas = mesh.replicas.size() > 1
    gathers_parameters = has_replicas and zero_stage >= 2
    used: UsedParameters | None = None
    if gathers_parameters:
        apply_fsdp(module, parts, mesh.hsdp_mesh or mesh.replicas, zero_stage=zero_stage)
        preallocate_fsdp_storage(module)
        used = UsedParameters(module)
        whole: Mapping[str, DTensor] = {n: p for n, p in module.named_parameters() if isinstance(p, DTensor)}
    else:
        whole = replace_with_local_parts(module)
    shards = [
        _shard(name, p, whole.get(name), parts, mesh, gathers_parameters) for name, p in module.named_parameters()
    ]
    trained_shards = [one for one in shards if one.parameter.requires_grad]
    data_parallel: DataParallel = NoReduction(trained_shards)
    if has_replicas and zero_stage == 0:
        # The caller decides the number of micro-batches per step, so gradients are summed after the last one.
        data_parallel = BucketedAllReduce(trained_shards, mesh, DataParallelSpec(), 1, overlap=False)
    elif has_replicas and zero_stage == 1:
        data_parallel = ZeroShards(trained_shards, mesh, ParallelismSpec(zero_stage=1), 1, watch=False)
    optimizer = _optimizer(data_parallel, spec, seed)
    frozen = [one for one in shards if not one.parameter.requires_grad]
    return ParallelModule(
        module, trained_shards, frozen, data_parallel, optimizer, zero_stage, gathers_parameters, used
    )


def check_plan(module: nn.Module, plan: ParallelPlan, mesh: Mesh, zero_stage: int) -> ResolvedPlan:
    """Return the parts of a plan, if it fits the module and the mesh. Changes nothing.

    Raises:
        PlanError: the plan does not fit the module.
        ValueError: with this mesh, ZeRO stage or these formats, training would be wrong.
    """
    layout = mesh.layout
    if layout.pipeline > 1 or layout.context > 1 or layout.expert > 1:
        raise ValueError(
            "a custom module is split over the tensor and data dimensions only: `pipeline`, `context` and `expert` "
            f"must be 1, got {layout.pipeline}, {layout.context} and {layout.expert}"
        )
    if mesh.islands is not None:
        raise ValueError("`training.outer` is not supported with a custom module: leave it out")
    if zero_stage not in ZERO_STAGES:
        raise ValueError(f"`zero_stage` must be one of {', '.join(map(str, ZERO_STAGES))}, got {zero_stage}")
    _check_formats(module)
    _check_unsplit(module)
    _check_gradients(module)
    _check_state(module)
    parts = resolve(module, plan)
    check_sizes(parts, layout.tensor)
    if zero_stage >= 2:
        check_fsdp_units(module, parts)
    elif zero_stage == 1:
        for name, parameter in module.named_parameters():
            check_shardable(name, parameter)
    return parts


def _check_formats(module: nn.Module) -> None:
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not trained:
        raise ValueError("the module has no parameter to train: all are frozen")
    first, expected = next((name, parameter.dtype) for name, parameter in trained.items())
    for name, parameter in trained.items():
        if parameter.dtype not in FORMATS:
            raise ValueError(
                f"`{name}` is {parameter.dtype}: trained parameters must be fp64, fp32 or bf16: use `.to()` with "
                "one of them, and autocast in `forward` to compute in another"
            )
        if parameter.dtype is not expected:
            raise ValueError(
                f"`{first}` is {expected} and `{name}` is {parameter.dtype}: convert trained parameters to one format "
                "with `.to()`, and use autocast in `forward` to compute in another"
            )


def _check_unsplit(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"`{name}` is split already, as by `fully_shard`: give the trainer the module before that, which it "
                "splits by `plan` and `zero_stage`"
            )


def _check_optimizer(spec: OptimizerSpec) -> None:
    if spec.name is not OptimizerName.ADAMW:
        raise ValueError(f"`optimizer.name` is {spec.name.value}: a custom module is trained with AdamW: leave it out")
    if spec.offload is not OptimizerOffload.NONE:
        raise ValueError(
            f"`optimizer.offload` is {spec.offload.value}, which is not supported with a custom module: leave it out; "
            "ZeRO stages 1 to 3 make the optimizer's state smaller"
        )


def _make_contiguous(module: nn.Module) -> None:
    """Store parameters in the order of their dimensions, not transposed or as `channels_last`.

    Summed gradients are in that order. The fused update reads a parameter, its gradient and its moments in the order of
    memory, so another order would mix up their elements, without an error; FSDP rejects it.
    """
    for parameter in module.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _check_gradients(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) is True:
            raise ValueError(f"`{name}` has sparse gradients, which cannot be summed over ranks: remove `sparse=True`")
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"`{name}` has a hook on its gradient, which the parts on the ranks would not have: remove it, and "
                "change what `forward` computes instead"
            )


def _check_state(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(
                f"`{name or type(part).__name__}` has `get_extra_state`, and checkpoints have tensors only: register "
                "its state as buffers"
            )


def _check_same_weights(module: nn.Module, device: torch.device) -> None:
    name = first_mismatch({**dict(module.named_parameters()), **dict(module.named_buffers())}, device)
    if name is not None:
        raise ValueError(
            f"`{name}` is not the same on every rank: call `torch.manual_seed` with one seed before the module is "
            "built, or load the same weights everywhere"
        )


def _shard(
    name: str, parameter: nn.Parameter, whole: DTensor | None, parts: ResolvedPlan, mesh: Mesh, gathers_parameters: bool
) -> ParameterShard:
    owns_part = mesh.coordinates.tensor == 0 or is_split_over_tensor(whole)
    copies = mesh.hsdp_mesh is not None and mesh.hsdp_mesh.get_local_rank(SHARD_REPLICA) > 0
    counted = owns_part and (not copies if gathers_parameters else mesh.replicas.get_local_rank() == 0)
    partial = mesh.layout.tensor > 1 and parts.roles[name] is Role.PARTIAL
    return ParameterShard(name, parameter, local_part(parameter), whole, counted, partial, not gathers_parameters)


def _optimizer(data_parallel: DataParallel, spec: OptimizerSpec, seed: int) -> Optimizer:
    if data_parallel.shards[0].local.dtype is torch.bfloat16:
        # In bf16, updates of less than a 256th of a weight would be lost.
        return BF16AdamW(data_parallel.shards, spec, seed)
    return AdamW(data_parallel.shards, spec)


def first_mismatch(tensors: Mapping[str, torch.Tensor], device: torch.device) -> str | None:
    """Return the name of the first tensor that is not the same on every rank, bit for bit. Collective over all ranks.

    No other check would detect that replicated tensors differ.

    Every rank has the same names, and tensors stay on the device. Sums of bits are compared, so a permutation of the
    same bits is not detected.
    """
    if not tensors or dist.get_world_size() == 1:
        return None
    sums = torch.stack([_sum_of_bits(tensor).to(device) for tensor in tensors.values()])
    extremes = torch.cat((sums, -sums))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    highest, lowest = extremes.chunk(2)
    return next((name for name, same in zip(tensors, (highest == -lowest).tolist(), strict=True) if not same), None)


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.element_size()
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.detach().contiguous().view(_INTEGERS[min(size, plain.element_size())]).sum(dtype=torch.int64)
