"""Matrix products of consecutive groups of rows, each with its own matrix: dropless mixtures of experts compute these.

One kernel computes all groups if the device has it (MegaBlocks, arXiv 2211.15841, measured the gain). Otherwise the
groups are computed one after the other, which works on any device and in any format.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional as F

_ALIGNMENT = 16
"""The kernel's rows must be multiples of this many bytes."""
_KERNEL_MAJOR = 9
"""Major compute capability of the GPUs on which the kernel is right: Hopper's. On Blackwell, gradients of experts
without rows are wrong (github.com/pytorch/pytorch/issues/172439).
"""


def grouped_linear(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor | int) -> torch.Tensor:
    """Multiply the rows of group g with the transposed matrix g.

    Args:
        rows: [rows, inputs], sorted by group.
        weight: [groups, outputs, inputs], in the format of the rows.
        counts: int64 [groups], number of rows per group; their sum is the number of rows. One number if all groups have
            the same: then it is one batched product on every device.

    Returns:
        [rows, outputs]. Every matrix gets a gradient, 0 for a group without rows.
    """
    if isinstance(counts, int):
        return torch.bmm(_even(rows, counts), weight.transpose(1, 2)).flatten(0, 1)
    kernel = _has_kernel(rows, *weight.shape[1:])
    return grouped_mm_kernel(rows, weight, counts) if kernel else grouped_mm_loop(rows, weight, counts)


def grouped_mm_kernel(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """`grouped_linear` in one call, without copying the counts to the host."""
    product = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
    result: torch.Tensor = product(rows, weight.transpose(-2, -1), offs=counts.cumsum(0).to(torch.int32))
    return result


def grouped_mm_loop(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """`grouped_linear` as a loop over the groups."""
    parts = torch.split(rows, counts.tolist())
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, weight.unbind(0), strict=True)])


def grouped_input_grad(gradients: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor | int) -> torch.Tensor:
    """The gradients of `grouped_linear`'s rows: each row's gradient times the matrix of its group.

    Args:
        gradients: [rows, outputs].
        weight: [groups, outputs, inputs], in the same format.
        counts: as for `grouped_linear`.

    Returns:
        [rows, inputs].
    """
    if isinstance(counts, int):
        return torch.bmm(_even(gradients, counts), weight).flatten(0, 1)
    if _has_kernel(gradients, *weight.shape[1:]):
        product = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
        result: torch.Tensor = product(gradients, weight, offs=counts.cumsum(0).to(torch.int32))
        return result
    parts = torch.split(gradients, counts.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, weight.unbind(0), strict=True)])


def grouped_weight_grad(gradients: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor | int) -> torch.Tensor:
    """The gradients of `grouped_linear`'s matrices: the sum over each group's rows of their outer products.

    Args:
        gradients: [rows, outputs].
        rows: [rows, inputs], in the same format.
        counts: as for `grouped_linear`.

    Returns:
        [groups, outputs, inputs].
    """
    if isinstance(counts, int):
        return torch.bmm(_even(gradients, counts).transpose(1, 2), _even(rows, counts))
    if _has_kernel(rows, gradients.shape[1], rows.shape[1]):
        product = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
        result: torch.Tensor = product(gradients.t(), rows, offs=counts.cumsum(0).to(torch.int32))
        return result
    sizes = counts.tolist()
    parts = zip(torch.split(gradients, sizes), torch.split(rows, sizes), strict=True)
    return torch.stack([gradient.t() @ x for gradient, x in parts])


def _even(rows: torch.Tensor, count: int) -> torch.Tensor:
    """[groups x count, columns] -> [groups, count, columns]."""
    return rows.view(-1, count, rows.shape[1])


def _has_kernel(rows: torch.Tensor, *widths: int) -> bool:
    """Whether the kernel supports matrices of these widths; the number of rows does not matter."""
    if not rows.is_cuda or rows.dtype != torch.bfloat16 or rows.shape[0] == 0:
        return False
    known = hasattr(F, "grouped_mm") or hasattr(torch, "_grouped_mm")
    return known and kernel_serves(torch.cuda.get_device_capability(rows.device), rows.element_size(), widths)


def kernel_serves(capability: tuple[int, int], bytes_per_element: int, widths: Iterable[int]) -> bool:
    """Whether the kernel is right for matrices of these widths on a GPU of this compute capability."""
    aligned = all(size * bytes_per_element % _ALIGNMENT == 0 for size in widths)
    return aligned and capability[0] == _KERNEL_MAJOR
