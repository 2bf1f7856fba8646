"""A stage's parameters as what this rank really holds: plain tensors that share their memory.

Optimizer, norm, clipping and checkpoints are element-wise or sums, so they need no distributed tensor: working on the
local shards they are the same code in every layout, free of DTensor's cost per operation. What they do need to know
stands here: which rank counts a shard that several hold, and whose gradients are still to be summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.protocol.messages import RunConfig
from meshwright_worker.distributed.mesh import SHARD_REPLICA, TENSOR, Mesh
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.init_weights import local_part, local_shard
from meshwright_worker.parallel.expert.expert_parallel import expert_parameters
from meshwright_worker.parallel.parallelize import uses_fsdp
from meshwright_worker.parallel.tensor.tensor_parallel import partial_parameters


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """This rank's part of one parameter."""

    name: str
    parameter: nn.Parameter
    local: torch.Tensor
    """The part itself, in the parameter's memory."""
    whole: DTensor | None
    """What it is a part of; None where this rank holds all of it."""
    counted: bool
    """Whether this rank is the one of its equals that counts the shard in sums over all ranks."""
    partial: bool
    """Whether gradients are still to be summed over the tensor group."""
    replicated: bool
    """Whether gradients are still to be summed over replicas."""
    expert: bool = False
    """Whether it is of experts that are spread over ranks, whose replicas are others than those of all else."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return self.local.shape if self.whole is None else self.whole.shape

    @cached_property
    def box(self) -> tuple[slice, ...]:
        """Where in the whole parameter the local part lies."""
        return local_shard(self.local if self.whole is None else self.whole)[1]

    def gradient(self) -> torch.Tensor:
        """This rank's part of the gradient, in the gradient's memory.

        Raises:
            RuntimeError: no gradient was computed.
        """
        gradient = self.parameter.grad
        if gradient is None:
            raise RuntimeError(f"no gradient was computed for {self.name}")
        # Some gradients are one of several views of a tensor, which autograd lets nobody change in place.
        return local_part(gradient)


def parameter_shards(
    stage: DecoderStage, distributed: dict[str, DTensor], run: RunConfig, mesh: Mesh
) -> list[ParameterShard]:
    """The shards of every parameter of a stage from `build_stages`, in the order of its parameters."""
    sharded = uses_fsdp(run)
    layout, tensor, replica = mesh.layout, mesh.coordinates.tensor, mesh.replicas.get_local_rank()
    copies = mesh.hsdp_mesh is not None and mesh.hsdp_mesh.get_local_rank(SHARD_REPLICA) > 0
    sequence = run.parallelism.sequence and mesh.layout.tensor > 1
    partial = {id(parameter) for parameter in partial_parameters(stage, sequence=sequence)}
    expert_parameter_ids = {id(parameter) for parameter in expert_parameters(stage)} if layout.expert > 1 else set()
    shards = []
    for name, parameter in stage.named_parameters():
        local, whole = local_part(parameter), distributed.get(name)
        expert = id(parameter) in expert_parameter_ids
        # Norms and routers are whole on each rank of a tensor group.
        owns_part = tensor == 0 or is_split_over_tensor(whole)
        first = replica // layout.expert == 0 if expert else replica == 0
        counted = owns_part and (not copies if sharded else first)
        shards.append(
            ParameterShard(name, parameter, local, whole, counted, id(parameter) in partial, not sharded, expert)
        )
    return shards


def stage_buffers(stage: DecoderStage) -> dict[str, torch.Tensor]:
    """What a stage has learned beside its parameters, whole on every rank: the routers' balancing biases."""
    return dict(stage.named_buffers())


def is_split_over_tensor(whole: DTensor | None) -> bool:
    """Whether the ranks of a tensor group hold different parts of a parameter."""
    if whole is None:
        return False
    names = whole.device_mesh.mesh_dim_names or ()
    return any(
        name == TENSOR and not placement.is_replicate()
        for name, placement in zip(names, whole.placements, strict=False)
    )
