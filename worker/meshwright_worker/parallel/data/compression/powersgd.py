"""PowerSGD (arXiv 1905.13727): each matrix as the product of two thin factors, by one step of power iteration.

For a gradient M of [rows, columns] and the last step's Q of [columns, rank], the same on all ranks:

    P = sum over ranks of M Q, made orthonormal;  Q = sum over ranks of M^T P;  the sum of M is taken as P Q^T.

A rank sends (rows + columns) x rank numbers instead of rows x columns. It adds the residual of its own M, M - P Q^T /
N, to its next gradient. Tensors that would not become smaller, such as norms, are sent uncompressed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from meshwright_worker.distributed.collectives import flatten_tensors, unflatten
from meshwright_worker.parallel.data.compression.compressor import ErrorFeedback, Reduction


class PowerSGD:
    """Stores Q of every matrix, the start of the next power iteration (warm start)."""

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self._group = group
        self._rank = rank
        self._feedback = ErrorFeedback()
        self._right: dict[tuple[int, int], torch.Tensor] = {}

    def start(self, bucket: int, flat: torch.Tensor, shapes: Sequence[torch.Size]) -> Reduction:
        """See `Compressor.start`."""
        own = self._feedback.add_to(bucket, flat)
        parts = torch.split(own, [shape.numel() for shape in shapes])
        matrices = {
            index: part.view(shape[0], -1)
            for index, (part, shape) in enumerate(zip(parts, shapes, strict=True))
            if self._is_worth_compressing(shape)
        }
        whole = [part for index, part in enumerate(parts) if index not in matrices]
        right = [self._initial_right_factor(bucket, index, matrix) for index, matrix in matrices.items()]
        left = [matrix @ factor for matrix, factor in zip(matrices.values(), right, strict=True)]
        return _Iteration(self, bucket, own, matrices, left, whole)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """See `Compressor.state_dict`."""
        right = {f"right.{bucket}.{index}": factor for (bucket, index), factor in self._right.items()}
        return self._feedback.state_dict("left") | right

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """See `Compressor.load_state_dict`."""
        self._feedback.load_state_dict("left", state_dict)
        factors = {tuple(key.split(".")): factor for key, factor in state_dict.items() if key.startswith("right.")}
        self._right = {(int(bucket), int(index)): factor for (_, bucket, index), factor in factors.items()}

    def _is_worth_compressing(self, shape: torch.Size) -> bool:
        if len(shape) < 2:
            return False
        rows, columns = shape[0], shape[1:].numel()
        return (rows + columns) * self._rank < rows * columns

    def _initial_right_factor(self, bucket: int, index: int, matrix: torch.Tensor) -> torch.Tensor:
        known = self._right.get((bucket, index))
        if known is not None:
            return known
        generator = torch.Generator().manual_seed(index)
        drawn = torch.randn(matrix.shape[1], self._rank, generator=generator, dtype=torch.float64)
        return drawn.to(matrix)

    def sum_right(self, bucket: int, matrices: dict[int, torch.Tensor], left: Sequence[torch.Tensor]) -> None:
        """Second half of the iteration: compute Q of every matrix from the orthonormal P in `left`. Collective."""
        right = [matrix.mT @ factor for matrix, factor in zip(matrices.values(), left, strict=True)]
        summed = _all_reduce(right, self._group)
        for index, factor in zip(matrices, summed, strict=True):
            self._right[bucket, index] = factor

    def product(self, bucket: int, index: int, left: torch.Tensor) -> torch.Tensor:
        """P Q^T of a matrix."""
        return left @ self._right[bucket, index].mT

    def store(self, bucket: int, residual: torch.Tensor) -> None:
        """Store the residual to add to the bucket's next gradient."""
        self._feedback.store(bucket, residual)

    @property
    def group(self) -> dist.ProcessGroup:
        """The replicas."""
        return self._group


class _Iteration:
    def __init__(
        self,
        sgd: PowerSGD,
        bucket: int,
        own: torch.Tensor,
        matrices: dict[int, torch.Tensor],
        left: Sequence[torch.Tensor],
        whole: Sequence[torch.Tensor],
    ) -> None:
        self._sgd = sgd
        self._bucket = bucket
        self._own = own
        self._matrices = matrices
        self._shapes = [factor.shape for factor in left]
        self._sizes = [tensor.numel() for tensor in (*left, *whole)]
        self._sent = flatten_tensors([*left, *whole])
        self._work = dist.all_reduce(self._sent, group=sgd.group, async_op=True)

    def finish(self, flat: torch.Tensor) -> None:
        self._work.wait()
        sums = torch.split(self._sent, self._sizes)
        count = len(self._shapes)
        left = [_orthonormal(factor.view(shape)) for factor, shape in zip(sums[:count], self._shapes, strict=True)]
        if left:
            self._sgd.sum_right(self._bucket, self._matrices, left)
        self._fill(flat, left, list(sums[count:]))

    def _fill(self, flat: torch.Tensor, left: Sequence[torch.Tensor], whole: list[torch.Tensor]) -> None:
        factors = dict(zip(self._matrices, left, strict=True))
        taken, offset = torch.zeros_like(flat), 0
        for index in range(len(left) + len(whole)):
            if index in factors:
                part = self._sgd.product(self._bucket, index, factors[index]).flatten()
                size = part.numel()
                taken[offset : offset + size] = part / self._sgd.group.size()
            else:
                part = whole.pop(0)
                size = part.numel()
                taken[offset : offset + size] = self._own[offset : offset + size]
            flat[offset : offset + size] = part
            offset += size
        self._sgd.store(self._bucket, self._own - taken)


def _orthonormal(factor: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of a factor's columns, in at least fp32: LAPACK and cuSOLVER have no narrower QR."""
    wide = factor.to(torch.promote_types(factor.dtype, torch.float32))
    basis: torch.Tensor = torch.linalg.qr(wide).Q
    return basis.to(factor.dtype)


def _all_reduce(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    flat = flatten_tensors(tensors)
    dist.all_reduce(flat, group=group)
    return unflatten(flat, tensors)
