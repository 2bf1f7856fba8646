"""One block of attention and its gradient, by torch's flash kernels (arXiv 2205.14135).

`scaled_dot_product_attention` does not return the logarithm of the softmax's denominator, which is what parts of a
softmax are put together by. The operators below it do, on CPU and CUDA, and their backward passes take the output and
the denominator of the whole softmax, so a part's gradient is exact (arXiv 2310.01889, section 3). They are private:
this module is the only one that knows them. Where CUDA has no such kernel (fp32, fp64) scores are computed plainly.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from meshwright_worker.precision.dtypes import upcast

_aten = torch.ops.aten
_CUDA_HEAD_MULTIPLE = 8


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of one block.

    Args:
        query: [batch, heads, queries, head size].
        key: [batch, key and value heads, keys, head size].
        value: [batch, key and value heads, keys, value size].
        causal: whether query i sees keys 0 to i; then there are as many keys as queries.
        scale: factor of the scores.

    Returns:
        The mix of values [batch, heads, queries, value size] and the logarithm of the sum of exponentials
        [batch, heads, queries], both in at least fp32.
    """
    size = value.shape[-1]
    key, value = _repeat_kv_heads(key, query), _repeat_kv_heads(value, query)
    if _needs_fallback(query, value):
        return _attend_fallback(query, key, value, causal, scale)
    query, key, value = _same_sizes(query, key, value)
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
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of a block's query, key and value, shaped like them, in their format.

    `gradient` and `attended` are those of the whole softmax for these queries, in the query's format, and so is
    `lse`, as `attend` gives it.
    """
    heads, size, head_size = key.shape[1], value.shape[-1], query.shape[-1]
    key, value = _repeat_kv_heads(key, query), _repeat_kv_heads(value, query)
    if _needs_fallback(query, value):
        parts = _backward_fallback(gradient, query, key, value, attended, lse, causal, scale)
    else:
        padded = _same_sizes(query, key, value)
        width = padded[0].shape[-1]
        gradient, attended = _pad_heads(gradient, width), _pad_heads(attended, width)
        kernel = _cuda_backward if query.is_cuda else _cpu_backward
        parts = kernel(gradient, *padded, attended, lse, causal, scale)
    query_grad, key_grad, value_grad = parts[0][..., :head_size], parts[1][..., :head_size], parts[2][..., :size]
    return query_grad, _sum_over_heads(key_grad, heads), _sum_over_heads(value_grad, heads)


_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _cpu_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> _Gradients:
    parts: _Gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, attended, lse, 0.0, causal, scale=scale
    )
    return parts


def _cuda_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> _Gradients:
    # Without dropout the state of the random numbers is not read, and without ragged rows neither are their borders.
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    lengths = (query.shape[2], key.shape[2])
    parts: _Gradients = _aten._scaled_dot_product_flash_attention_backward(
        gradient, query, key, value, attended, lse, None, None, *lengths, 0.0, causal, state, state, scale=scale
    )
    return parts


def _needs_fallback(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether there is no kernel: flash attention takes short formats, heads up to 256, and GPUs since Ampere."""
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


def _backward_fallback(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attended: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> _Gradients:
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


def _same_sizes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> _Gradients:
    """All with heads of one size, and on CUDA of a multiple of 8: zeros change neither scores nor the mix."""
    width = max(query.shape[-1], value.shape[-1])
    if query.is_cuda:
        width += -width % _CUDA_HEAD_MULTIPLE
    return _pad_heads(query, width), _pad_heads(key, width), _pad_heads(value, width)


def _pad_heads(x: torch.Tensor, width: int) -> torch.Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
