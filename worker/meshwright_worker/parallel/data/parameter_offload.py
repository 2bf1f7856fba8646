"""FSDP's parameter shards in memory-mapped files, so that host memory contains only what is in use.

The files (ZeRO-Infinity, arXiv 2104.07857) replace the shards' memory. Layers gather from them, and the optimizer
updates them; the kernel pages the data in and out. It drops pages that were not used for long, and writes changed ones
back in the background. Results do not change.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwright_worker.memory.host_memory import mmap_zeros
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.parallel.data.fsdp import sharded_parameters


def offload_parameters_to_files(stage: DecoderStage, directory: str) -> None:
    """Move the shards of a stage, which FSDP stores in host memory, to files of this process below `directory`.

    The files are deleted with the process: a restarted run loads its checkpoint.

    Raises:
        OSError: the directory cannot be created, or has no free space.
        RuntimeError: this version of torch stores FSDP's parameters elsewhere.
    """
    for parameter in sharded_parameters(stage, "remove `training.parameterOffloadPath`"):
        _move(parameter, directory)


def _move(parameter: Any, directory: str) -> None:
    local: torch.Tensor = parameter.sharded_param._local_tensor
    # FSDP gathers equal parts: if a dimension does not divide evenly, the last shards are padded with zeros.
    size, dimension = torch.Size(parameter.padded_sharded_param_size), parameter.fsdp_placement.dim
    padded = mmap_zeros(directory, size.numel(), local.dtype, "parameters-", "training.parameterOffloadPath").view(size)
    unpadded = padded.narrow(dimension, 0, local.size(dimension) if local.numel() else 0)
    unpadded.copy_(local)
    parameter._sharded_param_data = padded.view(-1)
    parameter.sharded_param._local_tensor = unpadded
