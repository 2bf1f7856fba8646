"""A weight that arrives in fp8: what autograd, hooks and products see of it.

FSDP2 gathers its bytes, see `parallel/data/fp8_gather`. torchao has such a tensor too, but only together with its own
linear layers and casts, a second implementation of what is in this package, with other scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_aten: Any = torch.ops.aten
_VIEWS = {_aten.detach.default, _aten.alias.default, _aten.view.default, _aten.as_strided.default}


class GatheredWeight(torch.Tensor):
    """A matrix in fp8 with the type of the matrix it stands for, which is that of its gradient.

    Only fp8 products read it: any other operator raises an error, instead of computing with rounded numbers.
    """

    fp8_values: torch.Tensor
    """[rows, columns], fp8."""
    fp8_scale: torch.Tensor
    """fp32 []: the factor of the values."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> GatheredWeight:
        """Wrap `values` in fp8, times `scale`, as a matrix of `dtype`."""
        made: GatheredWeight = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=dtype, device=values.device
        )
        return made

    def __init__(self, values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.fp8_values, self.fp8_scale = values, scale

    def __repr__(self) -> str:  # type: ignore[override]
        """Return its shape: the values may not be there."""
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        """See `torch.utils._python_dispatch`: how compiled code takes it apart."""
        return ["fp8_values", "fp8_scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]
    ) -> GatheredWeight:
        """The reverse of `__tensor_flatten__`."""
        return GatheredWeight(inner["fp8_values"], inner["fp8_scale"], dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> torch.Tensor:
        """Views show the same bytes, and zeros for gradients are plain."""
        weight: GatheredWeight = args[0]
        options = dict(kwargs or {})
        if func in _VIEWS:
            return GatheredWeight(func(weight.fp8_values, *args[1:], **options), weight.fp8_scale, weight.dtype)
        if func is _aten.zeros_like.default:
            return torch.zeros(weight.shape, dtype=options.get("dtype") or weight.dtype, device=weight.device)
        raise NotImplementedError(
            f"{func} reads a weight that was gathered in fp8, which only fp8 products do: remove "
            "`training.fp8.allGather`"
        )
