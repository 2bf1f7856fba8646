"""Cross-entropy on logits that may be split along the vocabulary (Megatron-LM, arXiv 1909.08053, section 3).

Full logits would be the largest tensor of a step. Under tensor parallelism each rank keeps its columns, and ranks
exchange three numbers per token: the largest logit, then the sum of exponentials and the target's logit.

`ChunkedLoss` also fuses the output projection, over chunks of tokens, so that full logits are never stored. The
gradient of a chunk's logits is known as soon as its loss is. It is therefore multiplied into the gradients of hidden
states and matrix at once (Liger kernel, arXiv 2410.10989), and the backward pass only scales them. Compiled, a chunk's
logits stay in the format of the hidden states: no copy of them in fp32 is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from meshwright_worker.data.batch import IGNORED
from meshwright_worker.dtypes import upcast
from meshwright_worker.models.decoder import DecoderStage
from meshwright_worker.models.layers import Linear, TokenLoss, local
from meshwright_worker.parallel.tensor.regions import enter_tensor_parallel


class _CrossEntropy(NamedTuple):
    """The summed loss of some tokens, and what its gradient is computed from."""

    loss: torch.Tensor
    exponentials: torch.Tensor
    """Of this rank's logits, less the largest logit of each token: [tokens, own part of the vocabulary]."""
    denominator: torch.Tensor
    """Their sums over the full vocabulary, [tokens]."""
    column: torch.Tensor
    """The target's column in this rank's part, [tokens, 1]; 0 for a target that another rank has."""
    outside: torch.Tensor
    """Whether another rank has the target, [tokens, 1]."""
    counts: torch.Tensor
    """Whether the token has a target, [tokens]."""


def _cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, first: int, group: dist.ProcessGroup | None, *, overwrite: bool
) -> _CrossEntropy:
    """Compute the loss of logits, [tokens, own part of the vocabulary]. Collective over `group`.

    Args:
        logits: of columns `first` and following.
        targets: [tokens].
        first: see above.
        group: the ranks that have the other columns; None if this rank has all of them.
        overwrite: whether the exponentials may take the memory of `logits`.
    """
    largest = logits.amax(dim=-1)
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shifted = logits.sub_(largest.unsqueeze(-1)) if overwrite else logits - largest.unsqueeze(-1)
    column = (targets - first).unsqueeze(-1)
    outside = (column < 0) | (column >= logits.shape[-1])
    column = column.masked_fill(outside, 0)
    target_logits = shifted.gather(-1, column).masked_fill(outside, 0.0).squeeze(-1)
    exponentials = shifted.exp_()
    sums = torch.stack([exponentials.sum(dim=-1), target_logits])
    if group is not None:
        dist.all_reduce(sums, group=group)
    counts = targets != IGNORED
    loss = (sums[0].log() - sums[1]).masked_fill_(~counts, 0.0).sum()
    return _CrossEntropy(loss, exponentials, sums[0], column, outside, counts)


class VocabParallelLoss(TokenLoss):
    """`TokenLoss` for a group whose ranks each have the logits of a part of the vocabulary; this rank's begins at
    `first`.
    """

    def __init__(self, first: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._first = first
        self._group = group

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Logits [batch, positions, own part of the vocabulary] and targets [batch, positions] -> [], on every rank."""
        loss: torch.Tensor = _VocabParallelCrossEntropy.apply(  # type: ignore[no-untyped-call]
            upcast(logits.flatten(0, 1)), targets.flatten(), self._first, self._group
        )
        return loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, first: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        part = _cross_entropy(logits, targets, first, group, overwrite=False)
        probabilities = part.exponentials.div_(part.denominator.unsqueeze(-1))
        ctx.save_for_backward(probabilities, part.column, part.outside, part.counts)
        return part.loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        probabilities, column, outside, counts = ctx.saved_tensors
        (gradient,) = gradients
        ones = torch.ones_like(column, dtype=probabilities.dtype).masked_fill_(outside, 0.0)
        return probabilities.scatter_add(-1, column, -ones) * (gradient * counts.unsqueeze(-1)), None, None, None


class ChunkedLoss(nn.Module):
    """The loss of hidden states. For logits that already exist, see `TokenLoss`.

    Args:
        chunk: number of tokens whose logits exist at a time.
        group: the ranks that have the other parts of the matrix; None if this rank has all of it.
        sequence: whether each of them has its own positions of the hidden states.
    """

    def __init__(self, chunk: int, group: dist.ProcessGroup | None = None, *, sequence: bool = False) -> None:
        super().__init__()
        self._chunk = chunk
        self._group = group
        self._sequence = sequence
        self._pass: _ChunkPass = _loss_and_gradient
        self._scale: _Scale = _scaled

    def compile_passes(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile what lies between a chunk's products and collectives; `backend` is torch.compile's."""
        self._pass = _compiled_pass(backend)
        self._scale = torch.compile(_scaled, backend=backend, dynamic=False)

    def forward(self, hidden: torch.Tensor, output: Linear, targets: torch.Tensor) -> torch.Tensor:
        """Hidden states [batch, positions, width] and targets [batch, positions] -> [], the sum over targets."""
        weight, first = local(output.weight), 0
        if self._group is not None:
            hidden = enter_tensor_parallel(hidden, self._group, sequence=self._sequence)
            first = self._group.rank() * weight.shape[0]
        loss: torch.Tensor = _ChunkedLinearLoss.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, 1),
            weight,
            targets.flatten(),
            self._chunk,
            first,
            self._group,
            torch.is_grad_enabled(),
            self._pass,
            self._scale,
        )
        return loss


def use_chunked_loss(stage: DecoderStage, chunk: int, group: dist.ProcessGroup | None, *, sequence: bool) -> None:
    """Make the last stage compute its loss in chunks; `group` is the ranks that its vocabulary is split over."""
    if stage.is_last:
        stage.chunked_loss = ChunkedLoss(chunk, group, sequence=sequence)


class _ChunkedLinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        chunk: int,
        first: int,
        group: dist.ProcessGroup | None,
        needed: bool,
        loss_and_gradient: _ChunkPass,
        scale: _Scale,
    ) -> torch.Tensor:
        matrix = weight.to(hidden.dtype)
        hidden_gradient = torch.empty_like(hidden) if needed else None
        accumulated = torch.promote_types(weight.dtype, torch.float32)
        shift = _sum_shift(hidden.dtype, min(chunk, len(targets)))
        weight_gradient: torch.Tensor | None = None
        total = torch.zeros((), dtype=accumulated, device=hidden.device)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            loss, gradient = loss_and_gradient(hidden[part] @ matrix.T, targets[part], first, group)
            total += loss
            if hidden_gradient is not None:
                hidden_gradient[part] = gradient @ matrix
                of_chunk = gradient.T @ (hidden[part] if shift == 1.0 else hidden[part] / shift)
                if weight_gradient is None:
                    # The only chunk's is not added to anything: it keeps its format until the backward pass.
                    weight_gradient = of_chunk if chunk >= len(targets) else of_chunk.to(accumulated)
                else:
                    weight_gradient.add_(of_chunk)
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.formats = hidden.dtype, weight.dtype
        ctx.scale, ctx.shift = scale, shift
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        hidden_format, weight_format = ctx.formats
        hidden_needed, weight_needed, *_ = ctx.needs_input_grad
        of_sum = gradients[0] if ctx.shift == 1.0 else gradients[0] * ctx.shift
        return (
            (of_hidden * gradients[0]).to(hidden_format) if hidden_needed else None,
            ctx.scale(of_weight, of_sum, weight_format) if weight_needed else None,
            *[None] * 7,
        )


def _sum_shift(dtype: torch.dtype, tokens: int) -> float:
    """Return the power of two that hidden states are divided by for the sum of a weight's gradient over tokens.

    In fp16, products of many tokens with the same target overflow before the loss scale, which is applied in the
    backward pass, could prevent it. Divided by this, they do not if hidden states are below 1,023.
    """
    return float(1 << max(0, math.ceil(math.log2(max(1, tokens) / 64)))) if dtype is torch.float16 else 1.0


_Scale = Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
"""A gradient times a number, [], computed in at least fp32, in a format."""


def _scaled(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `_Scale`."""
    return (upcast(gradient) * factor).to(dtype)


_ChunkPass = Callable[[torch.Tensor, torch.Tensor, int, dist.ProcessGroup | None], tuple[torch.Tensor, torch.Tensor]]
"""The summed loss, [], of logits [tokens, own part of the vocabulary] and targets [tokens], and its gradient, which is
like the logits. Further arguments as for `_cross_entropy`.
"""


def _loss_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, first: int, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `_ChunkPass`; computed in the memory of `logits`, if these are wide."""
    dtype, wide = logits.dtype, upcast(logits)
    del logits  # its memory is needed
    part = _cross_entropy(wide, targets, first, group, overwrite=True)
    ones = part.counts.unsqueeze(-1).to(part.exponentials.dtype)
    probabilities = part.exponentials.mul_(ones / part.denominator.unsqueeze(-1))
    gradient = probabilities.scatter_add_(-1, part.column, -ones.masked_fill(part.outside, 0.0))
    return part.loss, gradient.to(dtype)


def _compiled_pass(backend: str | Callable[..., Any]) -> _ChunkPass:
    """Return `_loss_and_gradient` compiled: one graph, or one before, between and after the collectives of a group."""
    compiled = partial(torch.compile, backend=backend, dynamic=False)
    whole, parts_of = compiled(_whole_pass), compiled(_vocabulary_parts)
    sums_of, gradient_of = compiled(_exponential_sums), compiled(_loss_gradient)

    def run(
        logits: torch.Tensor, targets: torch.Tensor, first: int, group: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns, counts = targets - first, targets != IGNORED
        result: tuple[torch.Tensor, torch.Tensor]
        if group is None:
            result = whole(logits, columns, counts)
            return result
        parts = parts_of(logits)
        dist.all_reduce(parts.largest, op=dist.ReduceOp.MAX, group=group)
        sums = sums_of(logits, columns, parts)
        dist.all_reduce(sums, group=group)
        result = gradient_of(logits, columns, counts, parts.largest, sums)
        return result

    return run


class _Parts(NamedTuple):
    """What is known of each token's logits after one pass over them."""

    largest: torch.Tensor
    """The largest logit, [tokens]."""
    part_largest: torch.Tensor
    """Of each part of the vocabulary, [tokens, parts]."""
    part_sums: torch.Tensor
    """Sum of exponentials of each part's logits, less its largest: [tokens, parts]."""


_PART = 256
"""Columns of a part: a GPU's kernel keeps this many logits in registers between their maximum and their sum."""


def _whole_pass(logits: torch.Tensor, columns: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    parts = _vocabulary_parts(logits)
    return _loss_gradient(logits, columns, counts, parts.largest, _exponential_sums(logits, columns, parts))


def _vocabulary_parts(logits: torch.Tensor) -> _Parts:
    """Read the logits once: a sum over the full vocabulary, less the largest logit, would read them twice."""
    padded = nn.functional.pad(upcast(logits), (0, -logits.shape[-1] % _PART), value=-math.inf)
    parts = padded.view(len(logits), -1, _PART)
    largest = parts.amax(dim=-1)
    return _Parts(largest.amax(dim=-1), largest, (parts - largest.unsqueeze(-1)).exp().sum(dim=-1))


def _exponential_sums(logits: torch.Tensor, columns: torch.Tensor, parts: _Parts) -> torch.Tensor:
    """Return the sum of exponentials and the target's logit less the largest, [2, tokens]; `columns` are the targets'
    in this part of the vocabulary, or outside of it.
    """
    sums = (parts.part_sums * (parts.part_largest - parts.largest.unsqueeze(-1)).exp()).sum(dim=-1)
    outside = (columns < 0) | (columns >= logits.shape[-1])
    target_logits = logits.gather(-1, columns.masked_fill(outside, 0).unsqueeze(-1)).squeeze(-1)
    return torch.stack([sums, (upcast(target_logits) - parts.largest).masked_fill(outside, 0.0)])


def _loss_gradient(
    logits: torch.Tensor, columns: torch.Tensor, counts: torch.Tensor, largest: torch.Tensor, sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss and its gradient, from the sums over the full vocabulary."""
    log_sum = sums[0].log()
    loss = (log_sum - sums[1]).masked_fill(~counts, 0.0).sum()
    # One exponential and no division per logit: on a GPU these limit the pass, not its memory.
    probabilities = (upcast(logits) - (largest + log_sum).unsqueeze(-1)).exp()
    is_target = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.int32) == columns.int().unsqueeze(-1)
    return loss, ((probabilities - is_target.to(probabilities.dtype)) * counts.unsqueeze(-1)).to(logits.dtype)
