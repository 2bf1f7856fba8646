"""Initial weights that depend only on the seed and the parameter's name, and are therefore the same in every layout.

Each parameter has its own generator, and so has each expert of a mixture. Large matrices have one for each tile of rows
and columns. A rank draws the tiles that its shard overlaps, on the CPU, a few rows at a time: no communication, and no
matrix in memory beside the shard.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch.distributed.tensor import DTensor

from meshwright.models.architecture import Architecture
from meshwright_worker.dtypes import PARAMETER_DTYPE, upcast
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.lora import DOWN, UP

_RESIDUAL_OUTPUTS = (
    "attention.output.weight",
    "feed_forward.down.weight",
    "feed_forward.shared.down.weight",
    "feed_forward.experts.down",
)


_UNTILED_ELEMENTS = 1 << 22
"""The most elements of a matrix that one generator draws as a whole."""
_TILE_ROWS, _TILE_COLUMNS = 8, 1024
"""FSDP shards have few of a matrix's rows, those of a tensor group many of its rows or columns."""


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
    *,
    tiled: bool = True,
) -> None:
    """Allocate a stage that was built on the meta device, see `materialize`, and initialize its weights.

    Norms are 1, biases 0. Of an adapter's matrices, one is 0 and the other has standard deviation 1 / sqrt(inputs).
    Other matrices are normal with deviation sqrt(2 / 5 hidden) (arXiv 1910.05895; as in GPT-NeoX); those that write to
    the residual stream are divided by sqrt(2 layers) (GPT-2; Megatron-LM, arXiv 1909.08053). With a fixed 0.02, narrow
    models would not improve in their first hundred steps. Buffers, the balancing biases of routers, are 0.
    """
    allocate(stage, device, storage_device)
    for name, parameter in stage.named_parameters():
        local, box = local_shard(parameter)
        draw_into(local, name, parameter.shape, box, model, seed, tiled=tiled)


def allocate(stage: DecoderStage, device: torch.device, storage_device: torch.device | None = None) -> None:
    """Allocate a stage as `init_weights` does, without weights: `draw_into` draws them, or a checkpoint has them."""
    materialize(stage, device, storage_device)
    with torch.no_grad():
        for buffer in stage.buffers():
            buffer.zero_()


@torch.no_grad()
def draw_into(
    local: torch.Tensor,
    name: str,
    shape: torch.Size,
    box: tuple[slice, ...],
    model: Architecture,
    seed: int,
    *,
    tiled: bool = True,
) -> None:
    """Fill `local`, the part `box` of the parameter of that name and full shape, with its initial values.

    If not `tiled`, one generator draws each matrix, however large, as version 0.1.0 did: the frozen weights of a run
    that began then are drawn again for its adapters.
    """
    if len(shape) < 3:
        _draw_part(local, name, shape, box, model, f"{seed}/{name}", tiled=tiled)
        return
    first, *inner = box
    for row, expert in enumerate(range(*first.indices(shape[0]))):
        _draw_part(local[row], name, shape[1:], tuple(inner), model, f"{seed}/{name}/{expert}", tiled=tiled)


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


def initial_parameter(
    name: str, shape: torch.Size, model: Architecture, seed: int, *, tiled: bool = True
) -> torch.Tensor:
    """Return the initial value of the full parameter of that name, with all experts, in the format of parameters."""
    whole = torch.empty(shape, dtype=PARAMETER_DTYPE)
    draw_into(whole, name, shape, tuple(slice(0, size) for size in shape), model, seed, tiled=tiled)
    return whole


def _draw_part(
    local: torch.Tensor,
    name: str,
    shape: torch.Size,
    box: tuple[slice, ...],
    model: Architecture,
    key: str,
    *,
    tiled: bool,
) -> None:
    """Fill the part of a vector or of a matrix."""
    if name.endswith((".bias", UP)):
        local.zero_()
        return
    if len(shape) == 1:
        local.fill_(1.0)
        return
    deviation = math.sqrt(0.4 / model.hidden_size)
    if name.endswith(DOWN):
        deviation = shape[1] ** -0.5
    elif name.endswith(_RESIDUAL_OUTPUTS):
        deviation /= math.sqrt(2 * model.layers)
    if not tiled or shape.numel() <= _UNTILED_ELEMENTS:
        generator = _seeded(torch.Generator(), key)
        whole = torch.empty(shape, dtype=PARAMETER_DTYPE).normal_(0.0, deviation, generator=generator)
        local.copy_(whole[box])
    elif local.numel():
        _draw_tiles(local, shape, box, deviation, key)


def _draw_tiles(local: torch.Tensor, shape: torch.Size, box: tuple[slice, ...], deviation: float, key: str) -> None:
    """Fill the part of a matrix from the tiles that it overlaps, one row of tiles after the other."""
    (first_row, last_row, _), (first, last, _) = (cut.indices(size) for cut, size in zip(box, shape, strict=True))
    generator = torch.Generator()
    left = first - first % _TILE_COLUMNS
    for top in range(first_row - first_row % _TILE_ROWS, last_row, _TILE_ROWS):
        tiles = [
            torch.empty(
                min(_TILE_ROWS, shape[0] - top), min(_TILE_COLUMNS, shape[1] - at), dtype=PARAMETER_DTYPE
            ).normal_(0.0, deviation, generator=_seeded(generator, f"{key}/{top}/{at}"))
            for at in range(left, last, _TILE_COLUMNS)
        ]
        strip = torch.cat(tiles, dim=1)
        start, stop = max(top, first_row), min(top + _TILE_ROWS, last_row)
        local[start - first_row : stop - first_row].copy_(strip[start - top : stop - top, first - left : last - left])


def _seeded(generator: torch.Generator, key: str) -> torch.Generator:
    hashed = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return generator.manual_seed(int.from_bytes(hashed, "little") >> 1)
