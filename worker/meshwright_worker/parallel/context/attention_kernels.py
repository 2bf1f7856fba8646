"""One block of attention and its gradient, by torch's flash kernels (arXiv 2205.14135).

`scaled_dot_product_attention` does not return the log-sum-exp of the scores (lse), which is needed to merge parts of a
softmax. The operators below it do, on CPU and CUDA. Their backward passes take output and lse of the full softmax, so a
part's gradient is exact (arXiv 2310.01889, section 3). These operators are private: only this module uses them. For
formats without such a kernel on CUDA (fp32, fp64), scores are computed with plain operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from meshwright_worker.dtypes import upcast
from meshwright_worker.parallel.context.attention_blocks import Shape

_aten = torch.ops.aten
CUDA_HEAD_MULTIPLE = 8
"""What flash kernels on CUDA need head sizes to be a multiple of."""
_READ_BYTES = 16
"""Bytes that these kernels read at once, from an address that is a multiple of it."""


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, shape: Shape, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax attention of one block.

    Args:
        query: [batch, heads, queries, head size].
        key: [batch, key and value heads, keys, head size].
        value: [batch, key and value heads, keys, value size].
        shape: which scores are used.
        scale: factor of the scores.

    Returns:
        The output [batch, heads, queries, value size] and the lse [batch, heads, queries], both in at least fp32.
    """
    if shape is Shape.UPPER:
        attended, lse = attend(_reverse(query), _reverse(key), _reverse(value), shape=Shape.LOWER, scale=scale)
        return _reverse(attended), lse.flip(-1)
    causal = shape is Shape.LOWER
    size = value.shape[-1]
    key, value = _repeat_kv_heads(key, query), _repeat_kv_heads(value, query)
    if _needs_fallback(query, value):
        return _attend_fallback(query, key, value, causal, scale)
    query, key, value = pad_to_one_size(query, key, value, CUDA_HEAD_MULTIPLE if query.is_cuda else 1)
    if query.is_cuda:
        attended, lse = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[:2]
    else:
        attended, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    return upcast(attended[..., :size]), upcast(lse)


def attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: torch.Tensor,
    lse: torch.Tensor,
    *,
    shape: Shape,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of a block's query, key and value, with the same shapes and formats.

    `gradient`, `attended` and `lse` belong to the full softmax of these queries: the first two in the query's format,
    `lse` as `attend` returns it.
    """
    if shape is Shape.UPPER:
        gradient, query, key, value, attended = map(_reverse, (gradient, query, key, value, attended))
        parts = attend_backward(gradient, query, key, value, attended, lse.flip(-1), shape=Shape.LOWER, scale=scale)
        return _reverse(parts[0]), _reverse(parts[1]), _reverse(parts[2])
    causal = shape is Shape.LOWER
    heads, size, head_size = key.shape[1], value.shape[-1], query.shape[-1]
    key, value = _repeat_kv_heads(key, query), _repeat_kv_heads(value, query)
    if _needs_fallback(query, value):
        parts = _backward_fallback(_BlockBackward(gradient, query, key, value, attended, lse, causal, scale))
    else:
        padded = pad_to_one_size(query, key, value, CUDA_HEAD_MULTIPLE if query.is_cuda else 1)
        width = padded[0].shape[-1]
        gradient, attended = pad_heads(gradient, width), pad_heads(attended, width)
        kernel = _cuda_backward if query.is_cuda else _cpu_backward
        parts = kernel(_BlockBackward(gradient, *padded, attended, lse, causal, scale))
    query_grad, key_grad, value_grad = parts[0][..., :head_size], parts[1][..., :head_size], parts[2][..., :size]
    return query_grad, _sum_over_heads(key_grad, heads), _sum_over_heads(value_grad, heads)


def _reverse(x: torch.Tensor) -> torch.Tensor:
    """Reverse the order of tokens in [batch, heads, tokens, size]: an upper triangle becomes a lower one, for which
    there are kernels.
    """
    return x.flip(2)


_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _BlockBackward(NamedTuple):
    """The inputs of a block's backward pass, see `attend_backward`; keys and values have as many heads as queries."""

    gradient: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attended: torch.Tensor
    lse: torch.Tensor
    causal: bool
    scale: float

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The first six, in the order in which the kernels take them."""
        return self[:6]


def _cpu_backward(block: _BlockBackward) -> _Gradients:
    parts: _Gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *block.tensors, 0.0, block.causal, scale=block.scale
    )
    return parts


def _cuda_backward(block: _BlockBackward) -> _Gradients:
    # Without dropout the RNG state is not read; without ragged rows neither are their borders.
    state = torch.zeros(2, dtype=torch.uint64, device=block.query.device)
    lengths = (block.query.shape[2], block.key.shape[2])
    parts: _Gradients = _aten._scaled_dot_product_flash_attention_backward(
        *block.tensors, None, None, *lengths, 0.0, block.causal, state, state, scale=block.scale
    )
    return parts


def _needs_fallback(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether there is no kernel: flash attention needs a 16-bit format, heads up to 256, and an Ampere GPU
    or newer.
    """
    if not query.is_cuda:
        return False
    short = query.dtype in (torch.bfloat16, torch.float16) and max(query.shape[-1], value.shape[-1]) <= 256
    return not short or torch.cuda.get_device_capability(query.device) < (8, 0)


def _scores(query: torch.Tensor, key: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    scores = upcast(query) @ upcast(key).transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _attend_fallback(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(query, key, causal, scale)
    lse = scores.logsumexp(dim=-1)
    return (scores - lse.unsqueeze(-1)).exp() @ upcast(value), lse


def _backward_fallback(block: _BlockBackward) -> _Gradients:
    gradient, query, key, value, attended, lse, causal, scale = block
    gradient = upcast(gradient)
    weights = (_scores(query, key, causal, scale) - lse.unsqueeze(-1)).exp()
    along = (gradient * upcast(attended)).sum(dim=-1, keepdim=True)
    scores_grad = weights * (gradient @ upcast(value).transpose(-1, -2) - along) * scale
    query_grad, key_grad = scores_grad @ upcast(key), scores_grad.transpose(-1, -2) @ upcast(query)
    value_grad = weights.transpose(-1, -2) @ gradient
    return query_grad.to(query.dtype), key_grad.to(key.dtype), value_grad.to(value.dtype)


def _repeat_kv_heads(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    groups = query.shape[1] // x.shape[1]
    return x.repeat_interleave(groups, dim=1) if groups > 1 else x


def _sum_over_heads(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    groups = gradient.shape[1] // heads
    return torch.unflatten(gradient, 1, (heads, groups)).sum(dim=2) if groups > 1 else gradient


def pad_to_one_size(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, multiple: int) -> _Gradients:
    """Pad all heads to one size, a multiple of `multiple`: zeros change neither scores nor outputs.

    With a multiple above 1, a kernel of a GPU can read the results.
    """
    width = max(query.shape[-1], value.shape[-1])
    width += -width % multiple
    query, key, value = (pad_heads(x, width) for x in (query, key, value))
    return (query, key, value) if multiple == 1 else (_readable(query), _readable(key), _readable(value))


def _readable(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, or a copy of it in which every head begins at a multiple of what a kernel reads at once.

    A part of a wider tensor, such as the values that latent attention expands with the keys, may begin elsewhere.
    """
    unit = _READ_BYTES // x.element_size()
    steps = [step for step, count in zip(x.stride()[:-1], x.shape[:-1], strict=True) if count > 1]
    if x.stride(-1) == 1 and not any(step % unit for step in (*steps, x.storage_offset())):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def pad_heads(x: torch.Tensor, width: int) -> torch.Tensor:
    """Pad [..., size] with zeros to [..., width]."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
