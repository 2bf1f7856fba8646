"""Where a step waits for its device: operations that would synchronize on a GPU, found on the CPU by interception."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import meshwright_worker
from tests.distributed.op_recorder import EveryPass

_OPERATORS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::multinomial",
}
"""Operators whose result, or its shape, the host reads."""
_METHODS = ("tolist", "item", "cpu", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__")
"""Methods that read values on the host. On the CPU, torch does so without an operator."""
_OWN = str(Path(meshwright_worker.__file__).parent)
_FALLBACK = "models/grouped_mm.py"
"""GPUs on which one kernel computes all groups do not run the loop over groups, which reads their sizes."""


class _Operators(EveryPass):
    def __init__(self, sites: list[str]) -> None:
        super().__init__()
        self._sites = sites

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name in _OPERATORS or _has_open_size(name, args, kwargs or {}) or _has_mask(name, args):
            self._sites.append(_site())
        return func(*args, **(kwargs or {}))


def _has_open_size(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a result is as long as the sum of a tensor."""
    return name == "aten::repeat_interleave" and kwargs.get("output_size") is None and len(args) < 3


def _has_mask(name: str, args: Sequence[Any]) -> bool:
    if name not in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


@contextmanager
def host_syncs() -> Iterator[list[str]]:
    """Yield the places in the worker at which the host waits, in order; each is `file:line`."""
    sites: list[str] = []
    inside: list[str] = []
    originals = {name: getattr(torch.Tensor, name) for name in _METHODS}

    def watched(name: str) -> Any:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not inside and not self.is_meta:
                sites.append(_site())
            inside.append(name)
            try:
                with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
                    return originals[name](self, *args, **kwargs)
            finally:
                inside.pop()

        return method

    try:
        for name in _METHODS:
            setattr(torch.Tensor, name, watched(name))
        with _Operators(sites):
            yield sites
    finally:
        for name, original in originals.items():
            if name in vars(torch._C.TensorBase):
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, original)


def _site() -> str:
    """The innermost line of the worker that is running; of torch, if there is none."""
    frames = traceback.extract_stack()
    own = [frame for frame in frames if frame.filename.startswith(_OWN)]
    frame = (own or frames)[-1]
    return f"{Path(frame.filename).relative_to(_OWN) if own else frame.filename}:{frame.lineno}"


def without_fallback(sites: Sequence[str]) -> list[str]:
    """The places that a GPU with a kernel for grouped products has too."""
    return [site for site in sites if not site.startswith(_FALLBACK)]
