"""A parameter as this rank stores it: a plain tensor that shares the parameter's memory.

Optimizer, norm, clipping and checkpoints are element-wise or sums, so they need no distributed tensors. On local shards
the same code works in every layout, without DTensor's overhead per operation. `ParameterShard` adds what they need to
know: which rank counts a replicated shard, and whose gradients are still to be summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright_worker.distributed.mesh import TENSOR
from meshwright_worker.models.init_weights import local_part, local_shard


@dataclass(frozen=True, eq=False)
class ParameterShard:
    """This rank's part of one parameter."""

    name: str
    parameter: nn.Parameter
    local: torch.Tensor
    """The shard itself, in the parameter's memory."""
    whole: DTensor | None
    """The tensor that it is a part of; None if this rank has the full tensor."""
    counted: bool
    """Whether this rank, of all that have the same shard, counts it in sums over all ranks."""
    partial: bool
    """Whether gradients are still to be summed over the tensor group."""
    replicated: bool
    """Whether gradients are still to be summed over replicas."""
    expert: bool = False
    """Whether it belongs to distributed experts, which have other replicas than the dense parameters."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the full parameter."""
        return self.local.shape if self.whole is None else self.whole.shape

    @cached_property
    def box(self) -> tuple[slice, ...]:
        """Position of the local part in the full parameter."""
        return local_shard(self.local if self.whole is None else self.whole)[1]

    def gradient(self) -> torch.Tensor:
        """This rank's part of the gradient, in the gradient's memory.

        Raises:
            RuntimeError: no gradient was computed.
        """
        gradient = self.parameter.grad
        if gradient is None:
            raise RuntimeError(f"no gradient was computed for {self.name}")
        # Some gradients are one of several views of a tensor, which autograd does not allow to change in place.
        return local_part(gradient)


def is_split_over_tensor(whole: DTensor | None) -> bool:
    """Return whether the ranks of a tensor group have different parts of a parameter."""
    if whole is None:
        return False
    names = whole.device_mesh.mesh_dim_names or ()
    return any(
        name == TENSOR and not placement.is_replicate()
        for name, placement in zip(names, whole.placements, strict=False)
    )
