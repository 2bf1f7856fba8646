"""One block of attention and its gradient, by torch's flash kernels (arXiv 2205.14135).

`scaled_dot_product_attention` does not return the logarithm of the softmax's denominator, which is what parts of a
softmax are put together by. The operators below it do, on CPU and CUDA, and their backward passes take the output and
the denominator of the whole softmax, so a part's gradient is exact (arXiv 2310.01889, section 3). They are private:
this module is the only one that knows them. Where CUDA has no such kernel (fp32, fp64) scores are computed plainly.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from meshwright_worker.precision import wide

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
    key, value = _for_every_head(key, query), _for_every_head(value, query)
    if _plain(query, value):
        return _plain_attend(query, key, value, causal, scale)
    query, key, value = _same_sizes(query, key, value)
    if query.is_cuda:
        mixed, denominator = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[:2]
    else:
        mixed, denominator = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
    return wide(mixed[..., :size]), wide(denominator)


def attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixed: torch.Tensor,
    denominator: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of a block's query, key and value, shaped like them, in their format.

    `gradient` and `mixed` are those of the whole softmax for these queries, in the query's format, and so is
    `denominator`, as `attend` gives it.
    """
    heads, size, head_size = key.shape[1], value.shape[-1], query.shape[-1]
    key, value = _for_every_head(key, query), _for_every_head(value, query)
    if _plain(query, value):
        parts = _plain_backward(gradient, query, key, value, mixed, denominator, causal, scale)
    else:
        padded = _same_sizes(query, key, value)
        width = padded[0].shape[-1]
        gradient, mixed = _widened(gradient, width), _widened(mixed, width)
        kernel = _cuda_backward if query.is_cuda else _cpu_backward
        parts = kernel(gradient, *padded, mixed, denominator, causal, scale)
    of_query, of_key, of_value = parts[0][..., :head_size], parts[1][..., :head_size], parts[2][..., :size]
    return of_query, _sum_over_heads(of_key, heads), _sum_over_heads(of_value, heads)


_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _cpu_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixed: torch.Tensor,
    denominator: torch.Tensor,
    causal: bool,
    scale: float,
) -> _Three:
    parts: _Three = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, mixed, denominator, 0.0, causal, scale=scale
    )
    return parts


def _cuda_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixed: torch.Tensor,
    denominator: torch.Tensor,
    causal: bool,
    scale: float,
) -> _Three:
    # Without dropout the state of the random numbers is not read, and without ragged rows neither are their borders.
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    lengths = (query.shape[2], key.shape[2])
    parts: _Three = _aten._scaled_dot_product_flash_attention_backward(
        gradient, query, key, value, mixed, denominator, None, None, *lengths, 0.0, causal, state, state, scale=scale
    )
    return parts


def _plain(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether there is no kernel: flash attention takes short formats, heads up to 256, and GPUs since Ampere."""
    if not query.is_cuda:
        return False
    short = query.dtype in (torch.bfloat16, torch.float16) and max(query.shape[-1], value.shape[-1]) <= 256
    return not short or torch.cuda.get_device_capability(query.device) < (8, 0)


def _scores(query: torch.Tensor, key: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    scores = wide(query) @ wide(key).transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _plain_attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(query, key, causal, scale)
    denominator = scores.logsumexp(dim=-1)
    return (scores - denominator.unsqueeze(-1)).exp() @ wide(value), denominator


def _plain_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixed: torch.Tensor,
    denominator: torch.Tensor,
    causal: bool,
    scale: float,
) -> _Three:
    gradient = wide(gradient)
    weights = (_scores(query, key, causal, scale) - denominator.unsqueeze(-1)).exp()
    along = (gradient * wide(mixed)).sum(dim=-1, keepdim=True)
    of_scores = weights * (gradient @ wide(value).transpose(-1, -2) - along) * scale
    of_query, of_key = of_scores @ wide(key), of_scores.transpose(-1, -2) @ wide(query)
    of_value = weights.transpose(-1, -2) @ gradient
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _for_every_head(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    groups = query.shape[1] // x.shape[1]
    return x.repeat_interleave(groups, dim=1) if groups > 1 else x


def _sum_over_heads(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    groups = gradient.shape[1] // heads
    return torch.unflatten(gradient, 1, (heads, groups)).sum(dim=2) if groups > 1 else gradient


def _same_sizes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> _Three:
    """All with heads of one size, and on CUDA of a multiple of 8: zeros change neither scores nor the mix."""
    width = max(query.shape[-1], value.shape[-1])
    if query.is_cuda:
        width += -width % _CUDA_HEAD_MULTIPLE
    return _widened(query, width), _widened(key, width), _widened(value, width)


def _widened(x: torch.Tensor, width: int) -> torch.Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
