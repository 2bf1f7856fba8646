"""Initial weights that depend only on the seed and the parameter's name, and are therefore the same in every layout.

Each parameter has its own generator, and so has each expert of a mixture. A rank generates one full matrix at a time on
the CPU, and keeps its shard: no communication, and never more than one full matrix in memory.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch.distributed.tensor import DTensor

from meshwright.models.architecture import Architecture
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.lora import DOWN, UP
from meshwright_worker.precision.dtypes import PARAMETER_DTYPE, upcast

_RESIDUAL_OUTPUTS = (
    "attention.output.weight",
    "feed_forward.down.weight",
    "feed_forward.shared.down.weight",
    "feed_forward.experts.down",
)


def materialize(stage: DecoderStage, device: torch.device, storage_device: torch.device | None = None) -> None:
    """Allocate uninitialized memory on `device` for a stage that was built on the meta device.

    If `storage_device` is given, parameters are allocated there: the code that gathers them moves them to the device.
    Buffers are always on `device`.
    """
    stage.to_empty(device=storage_device or device)
    for module in stage.modules():
        for name, buffer in module.named_buffers(recurse=False):
            # In at least fp32: the steps of routers' biases are too small for bf16, even if parameters are bf16.
            setattr(module, name, torch.empty_like(buffer, device=device, dtype=upcast(buffer).dtype))
    stage.tie()


def init_weights(
    stage: DecoderStage,
    model: Architecture,
    seed: int,
    device: torch.device,
    storage_device: torch.device | None = None,
) -> None:
    """Allocate a stage that was built on the meta device, see `materialize`, and initialize its weights.

    Norms are 1, biases 0. Of an adapter's matrices, one is 0 and the other has standard deviation 1 / sqrt(inputs).
    Other matrices are normal with deviation sqrt(2 / 5 hidden) (arXiv 1910.05895; as in GPT-NeoX); those that write to
    the residual stream are divided by sqrt(2 layers) (GPT-2; Megatron-LM, arXiv 1909.08053). With a fixed 0.02, narrow
    models would not improve in their first hundred steps. Buffers, the balancing biases of routers, are 0.
    """
    materialize(stage, device, storage_device)
    with torch.no_grad():
        for buffer in stage.buffers():
            buffer.zero_()
        for name, parameter in stage.named_parameters():
            local, box = local_shard(parameter)
            if parameter.ndim < 3:
                local.copy_(init_parameter_part(name, parameter.shape, model, seed)[box])
                continue
            first, *inner = box
            for row, expert in enumerate(range(*first.indices(parameter.shape[0]))):
                initial_parameter = init_parameter_part(name, parameter.shape[1:], model, seed, expert)
                local[row].copy_(initial_parameter[tuple(inner)])


def local_shard(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """Return this rank's part of a parameter, in its memory, and the part's position in the full parameter."""
    local = local_part(parameter)
    if not isinstance(parameter, DTensor):
        return local, tuple(slice(0, size) for size in parameter.shape)
    chunks = parameter.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if not chunks:
        return local, tuple(slice(0, size) for size in local.shape)
    (chunk,) = chunks
    box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return local, box


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter, in its memory."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def initial_parameter(name: str, shape: torch.Size, model: Architecture, seed: int) -> torch.Tensor:
    """Return the initial value of the full parameter of that name, with all experts."""
    if len(shape) < 3:
        return init_parameter_part(name, shape, model, seed)
    return torch.stack([init_parameter_part(name, shape[1:], model, seed, expert) for expert in range(shape[0])])


def init_parameter_part(
    name: str, shape: torch.Size, model: Architecture, seed: int, expert: int | None = None
) -> torch.Tensor:
    """Return the initial value of the full parameter of that name, or of one expert's part, in the format of
    parameters.
    """
    if name.endswith((".bias", UP)):
        return torch.zeros(shape, dtype=PARAMETER_DTYPE)
    if len(shape) == 1:
        return torch.ones(shape, dtype=PARAMETER_DTYPE)
    key = f"{seed}/{name}" if expert is None else f"{seed}/{name}/{expert}"
    hashed = hashlib.blake2b(key.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(hashed, "little") >> 1)
    deviation = math.sqrt(0.4 / model.hidden_size)
    if name.endswith(DOWN):
        deviation = shape[1] ** -0.5
    elif name.endswith(_RESIDUAL_OUTPUTS):
        deviation /= math.sqrt(2 * model.layers)
    return torch.empty(shape, dtype=PARAMETER_DTYPE).normal_(0.0, deviation, generator=generator)
