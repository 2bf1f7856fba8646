"""FSDP's shards of parameters in memory-mapped files, so that main memory holds only what is in use.

The files (ZeRO-Infinity, arXiv 2104.07857) take the place of the memory that shards are in: what a layer gathers is
read out of them, what the optimizer updates is written into them, page by page, by the kernel. It drops pages that
nobody used for long and writes changed ones back beside the computation. No number changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from meshwright_worker.memory.mmap_tensor import mmap_zeros
from meshwright_worker.models.decoder import DecoderStage


def offload_parameters_to_files(stage: DecoderStage, directory: str) -> None:
    """Move the shards of a stage, which FSDP keeps in main memory, to files of this process below `directory`.

    Files live as long as the process: a restarted run loads its checkpoint.

    Raises:
        OSError: the directory cannot be made, or has no room.
        RuntimeError: this version of torch keeps FSDP's parameters elsewhere.
    """
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            for group in _groups(module._get_fsdp_state()):
                for parameter in group.fsdp_params:
                    _move(parameter, directory)


def _move(parameter: Any, directory: str) -> None:
    local: torch.Tensor = parameter.sharded_param._local_tensor
    # FSDP gathers equal parts: where a dimension does not divide, the last shards are filled up with zeros.
    size, dimension = torch.Size(parameter.padded_sharded_param_size), parameter.fsdp_placement.dim
    padded = mmap_zeros(directory, size.numel(), local.dtype, "parameters-", "training.parameterOffloadPath").view(size)
    unpadded = padded.narrow(dimension, 0, local.size(dimension) if local.numel() else 0)
    unpadded.copy_(local)
    parameter._sharded_param_data = padded.view(-1)
    parameter.sharded_param._local_tensor = unpadded


def _groups(state: Any) -> list[Any]:
    # torch 2.13 has several groups a module, earlier versions one or none.
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    if not hasattr(state, "_fsdp_param_group"):
        raise RuntimeError(
            "FSDP of this version of torch keeps its parameters elsewhere: remove `training.parameterOffloadPath`"
        )
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
