"""Attention of all documents of a micro-batch in one call, and its gradient, by torch's varlen flash kernel.

`torch.nn.attention.varlen` calls the same operators, but its backward pass takes no log-sum-exp of a softmax over more
keys, which context parallelism needs. These operators are private: only this module uses them. Where there is no such
kernel (CPUs, fp32, fp64), the blocks of the segments are computed one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from meshwright_worker.parallel.context.attention_kernels import CUDA_HEAD_MULTIPLE, pad_heads, pad_to_one_size
from meshwright_worker.parallel.context.online_softmax import AttentionGradients, OnlineSoftmax
from meshwright_worker.parallel.context.varlen_segments import VarlenBlocks

_aten = torch.ops.aten
_FIRST_VERSION = (2, 11)
"""Of torch, whose varlen kernel returns the log-sum-exps as [heads, tokens]."""
_LARGEST_HEAD = 256
_SMALLER_CHIPS = ((8, 6), (8, 9), (12, 0), (12, 1))
"""Compute capabilities with less shared memory: no backward pass of heads over 192."""
_MOST_SEGMENTS = 65_535
"""The largest second dimension of a kernel's grid, which the kernel uses for segments."""
_LEAST_QUERIES = 2
"""With a longest segment of one query, the kernel takes another path, for inference: it splits keys over blocks of the
GPU and reorders heads.
"""


class KernelFacts(NamedTuple):
    """What decides whether there is a varlen kernel."""

    device: str
    """Type of the device."""
    capability: tuple[int, int]
    """The GPU's compute capability; (0, 0) without a GPU."""
    dtype: torch.dtype
    head_size: int
    """The larger one of keys and values."""
    version: tuple[int, int]
    """Of torch."""
    flash_built: bool
    """Whether torch was built with flash kernels for NVIDIA's GPUs."""
    segments: int = 1
    """Number of segments of the call."""


def has_varlen_kernel(facts: KernelFacts) -> bool:
    """Return whether torch's varlen kernel computes attention and its gradient with this device and these numbers."""
    if facts.device != "cuda" or not facts.flash_built or facts.version < _FIRST_VERSION:
        return False
    if facts.dtype not in (torch.bfloat16, torch.float16) or facts.capability < (8, 0):
        return False
    if facts.segments > _MOST_SEGMENTS:
        return False
    return facts.head_size <= (192 if facts.capability in _SMALLER_CHIPS else _LARGEST_HEAD)


Places = slice | torch.Tensor
"""Which tokens of all rows: consecutive ones, or int64 indices."""


@dataclass(frozen=True)
class VarlenCall:
    """A call on a device."""

    blocks: VarlenBlocks
    queries: Places
    keys: Places
    query_ends: torch.Tensor
    """int32 [segments + 1], where segments of the taken queries begin and end."""
    key_ends: torch.Tensor
    longest: tuple[int, int]
    """Bounds of the numbers of queries and of keys of a segment."""

    @classmethod
    def of(cls, blocks: VarlenBlocks, device: torch.device) -> VarlenCall:
        """Copy the borders of segments to a device, without waiting for it."""
        queries = [segment.queries for segment in blocks.segments]
        keys = [segment.keys for segment in blocks.segments]
        return cls(
            blocks,
            _places(queries, device),
            _places(keys, device),
            _ends(queries, device),
            _ends(keys, device),
            (max(_LEAST_QUERIES, *map(len, queries)), max(map(len, keys))),
        )


def attend_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: VarlenCall, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax attention inside the segments.

    Args:
        query: [tokens, heads, head size], those of `call.queries`.
        key: [tokens, key and value heads, head size], those of `call.keys`.
        value: [tokens, key and value heads, value size], those of `call.keys`.
        call: the segments.
        scale: factor of the scores.

    Returns:
        The output [tokens, heads, value size] in the query's format, and the lse [heads, tokens] in at least fp32.
    """
    if not has_varlen_kernel(_facts(query, value, call)):
        online_softmax = OnlineSoftmax(_one_row(query), value.shape[-1], scale)
        online_softmax.add(_one_row(key), _one_row(value), list(call.blocks.local_blocks()))
        attended, lse = online_softmax.result()
        return attended.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return _flash_forward(query, key, value, call, scale)


def attend_varlen_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: torch.Tensor,
    lse: torch.Tensor,
    call: VarlenCall,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value, with their shapes, in their format or a wider one.

    `gradient`, `attended` and `lse` belong to the full softmax of these queries, as in `attend_backward`.
    """
    if not has_varlen_kernel(_facts(query, value, call)):
        grads = AttentionGradients(_one_row(gradient), _one_row(query), _one_row(attended), lse.unsqueeze(0), scale)
        parts = grads.add(_one_row(key), _one_row(value), list(call.blocks.local_blocks()))
        query_grad, key_grad, value_grad = (x.squeeze(0).transpose(0, 1) for x in (grads.query_grad, *parts))
        return query_grad, key_grad, value_grad
    return _flash_backward((gradient, query, key, value, attended), lse, call, scale)


def _flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: VarlenCall, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    size = value.shape[-1]
    attended, lse = _aten._flash_attention_forward(
        *pad_to_one_size(query, key, value, CUDA_HEAD_MULTIPLE),
        call.query_ends,
        call.key_ends,
        *call.longest,
        0.0,
        call.blocks.causal,
        False,
        scale=scale,
    )[:2]
    return attended[..., :size], lse


def _flash_backward(
    tensors: Sequence[torch.Tensor], lse: torch.Tensor, call: VarlenCall, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gradient, query, key, value, attended = tensors
    size, head_size = value.shape[-1], query.shape[-1]
    padded = pad_to_one_size(query, key, value, CUDA_HEAD_MULTIPLE)
    width = padded[0].shape[-1]
    # Without dropout the RNG state is not read.
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    query_grad, key_grad, value_grad = _aten._flash_attention_backward(
        pad_heads(gradient, width),
        *padded,
        pad_heads(attended, width),
        lse.contiguous(),
        call.query_ends,
        call.key_ends,
        *call.longest,
        0.0,
        call.blocks.causal,
        state,
        torch.empty(0, device=query.device),
        scale=scale,
    )
    return query_grad[..., :head_size], key_grad[..., :head_size], value_grad[..., :size]


def _facts(query: torch.Tensor, value: torch.Tensor, call: VarlenCall) -> KernelFacts:
    device = query.device
    return KernelFacts(
        device.type,
        torch.cuda.get_device_capability(device) if query.is_cuda else (0, 0),
        query.dtype,
        max(query.shape[-1], value.shape[-1]),
        *_build(),
        len(call.blocks.segments),
    )


@lru_cache(maxsize=1)
def _build() -> tuple[tuple[int, int], bool]:
    major, minor = torch.__version__.split(".")[:2]
    flash = torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()
    return (int(major), int(minor)), flash


def _one_row(x: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, size] -> [1, heads, tokens, size]."""
    return x.transpose(0, 1).unsqueeze(0)


def _places(ranges: Sequence[range], device: torch.device) -> Places:
    if ranges[0].step > 0 and all(before.stop == after.start for before, after in pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop)
    return _to_device(np.concatenate([np.arange(part.start, part.stop, part.step) for part in ranges]), device)


def _ends(ranges: Sequence[range], device: torch.device) -> torch.Tensor:
    return _to_device(np.array([0, *accumulate(map(len, ranges))], dtype=np.int32), device)


def _to_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
