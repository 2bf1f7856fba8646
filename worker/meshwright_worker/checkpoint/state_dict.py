"""The tensors of a checkpoint: parameters and moments, named after the parameter in the full model.

Names contain neither stage nor rank, so a checkpoint can be loaded in every layout.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from meshwright_worker.checkpoint.shared_memory import SharedMemory
from meshwright_worker.memory.host_memory import CopyStreams, allocate_host_tensors
from meshwright_worker.optimizers.optimizer import Optimizer
from meshwright_worker.parallel.shards import ParameterShard

MODEL, OPTIMIZER = "model", "optimizer"


def checkpoint_tensors(
    shards: Sequence[ParameterShard], optimizer: Optimizer, buffers: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Return every tensor to save or load, by name, in the memory of the model and the optimizer."""
    tensors = {**model_tensors(shards), **{f"{MODEL}.{name}": buffer for name, buffer in (buffers or {}).items()}}
    for shard in shards:
        for moment, local in optimizer.moments(shard).items():
            tensors[f"{OPTIMIZER}.{shard.name}.{moment}"] = as_distributed(shard, local)
    return tensors


def model_tensors(shards: Sequence[ParameterShard]) -> dict[str, torch.Tensor]:
    """Return only the parameters, by name, in the memory of the model."""
    return {f"{MODEL}.{shard.name}": as_distributed(shard, shard.local) for shard in shards}


def copy_to_duplicates(shards: Sequence[ParameterShard], optimizer: Optimizer) -> None:
    """Fill every copy of a parameter on this rank from the one that was loaded, the last.

    A rank with both ends of a model has tied embeddings twice.
    """
    loaded = {shard.name: shard for shard in shards}
    for shard in shards:
        source = loaded[shard.name]
        if source is not shard:
            shard.local.copy_(source.local)
            for moment, local in optimizer.moments(shard).items():
                local.copy_(optimizer.moments(source)[moment])


def allocate_copy(
    tensors: dict[str, torch.Tensor], staged: dict[str, torch.Tensor], memory: SharedMemory | None
) -> dict[str, torch.Tensor]:
    """Return host memory for a copy of tensors, so that they can be written while training changes the originals.

    Args:
        tensors: the tensors to copy, see `copy_tensors`.
        staged: an earlier copy of the same tensors, whose memory is reused; empty the first time.
        memory: where new memory is allocated; None if it belongs to this process alone.
    """
    allocate = memory.allocate if memory is not None else allocate_host_tensors
    new = {name: tensor for name, tensor in tensors.items() if name not in staged}
    for pinned_memory in (True, False):
        selected = {name: tensor for name, tensor in new.items() if _local_part(tensor).is_cuda is pinned_memory}
        host_tensors = allocate([_local_part(tensor) for tensor in selected.values()], pinned_memory=pinned_memory)
        for (name, tensor), host_tensor in zip(selected.items(), host_tensors, strict=True):
            staged[name] = _distributed_like(tensor, host_tensor) if isinstance(tensor, DTensor) else host_tensor
    return {name: staged[name] for name in tensors}


@torch.no_grad()
def copy_tensors(tensors: Mapping[str, torch.Tensor], copies: Mapping[str, torch.Tensor]) -> None:
    """Copy the local part of each tensor into the one of the same name."""
    for name, tensor in tensors.items():
        _local_part(copies[name]).copy_(_local_part(tensor))


class LaterCopy:
    """A copy of tensors that another thread makes while the device works on. On CUDA it has its own stream."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], copies: Mapping[str, torch.Tensor], device: torch.device
    ) -> None:
        """The tensors are copied as they are after the work that is queued now."""
        self._tensors, self._copies = tensors, copies
        self._streams = CopyStreams(device)
        if self._streams.outward is not None:
            self._streams.outward.wait_stream(torch.cuda.current_stream())

    def run(self) -> None:
        """Make the copy. Until then nobody may change the tensors."""
        if self._streams.outward is None:
            copy_tensors(self._tensors, self._copies)
            return
        with torch.cuda.stream(self._streams.outward):
            copy_tensors(self._tensors, self._copies)
        self._streams.outward.synchronize()


def _local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_distributed(shard: ParameterShard, local: torch.Tensor) -> torch.Tensor:
    """Return `local` as a part of its distributed tensor, in the same memory; shaped like this rank's part of the
    shard.
    """
    return local if shard.whole is None else _distributed_like(shard.whole, local)


def _distributed_like(whole: DTensor, local: torch.Tensor) -> DTensor:
    """Return a distributed tensor whose local part is `local`, in its memory, on any device.

    `DTensor.from_local` would move a part in host memory to the mesh's GPU: loading would fill that copy, not the
    offloaded part. FSDP creates its offloaded parameters in the same way.
    """
    spec = copy.copy(whole._spec)
    if spec.tensor_meta is not None:
        spec.tensor_meta = spec.tensor_meta._replace(dtype=local.dtype)
    return DTensor(local.detach(), spec, requires_grad=False)  # type: ignore[no-untyped-call]
