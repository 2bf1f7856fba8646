"""A GPU without one: CUDA tensors that have a device, a shape and a format, and no numbers. Needs `library`.

Operators on CUDA tensors compute shapes only, and raise if their tensors are on several devices. Operators on CPU
tensors run. Numbers of CUDA tensors that the host reads are made up. Where the host would wait for the device is
recorded: where it reads numbers, and where it copies to or from memory that is not pinned.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshwright_worker

GPU = torch.device("cuda", 0)
CAPABILITY = (9, 0)
"""Hopper's."""
_OWN = str(Path(meshwright_worker.__file__).parent)
_aten: Any = torch.ops.aten


class FakeGpu(TorchDispatchMode):
    """Computes on the fake GPU; see `fake_gpu`."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._shapes = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        leaves = tree_leaves((args, options))
        on_gpu = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        if not on_gpu and not any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves):
            return _on_cpu(func, args, options)
        if func is _aten._local_scalar_dense.default:
            self.waits.append(_site())
            return 1.0 if args[0].is_floating_point() else 1
        if func is _aten._to_copy.default and options.get("device") is not None:
            return self._moved(func, args[0], options)
        if func is _aten.copy_.default and not all(isinstance(tensor, FakeTensor) for tensor in args[:2]):
            return self._copied(func, *args, **options)
        return self._shape(func, args, options)

    def _shape(self, func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        with self._shapes:
            return func(*args, **options)

    def _moved(self, func: Callable[..., Any], tensor: torch.Tensor, options: Mapping[str, Any]) -> Any:
        leaves, enters = isinstance(tensor, FakeTensor), options["device"].type == "cuda"
        if leaves and not enters:
            # torch copies to memory that is not pinned: it waits.
            self.waits.append(_site())
            return torch.ones(tensor.shape, dtype=options.get("dtype") or tensor.dtype)
        if not leaves and not (options.get("non_blocking") and _is_pinned(tensor)):
            self.waits.append(_site())
        return self._shape(func, (tensor,), options)

    def _copied(
        self, func: Callable[..., Any], target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> Any:
        host = source if isinstance(target, FakeTensor) else target
        if not (non_blocking and _is_pinned(host)):
            self.waits.append(_site())
        return host.fill_(1) if host is target else self._shape(func, (target, source, non_blocking), {})


def _on_cpu(func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    if func is _aten.is_pinned.default:
        return _is_pinned(args[0])
    if func is _aten._pin_memory.default:
        made = args[0].clone()
        made.pinned = True
        return made
    if options.get("pin_memory"):
        made = func(*args, **{**options, "pin_memory": None})
        made.pinned = True
        return made
    return func(*args, **options)


def _is_pinned(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "pinned", False)


def _site() -> str:
    """The innermost line of the worker that is running; of anything, if there is none."""
    frames = traceback.extract_stack()[:-3]
    own = [frame for frame in frames if frame.filename.startswith(_OWN)]
    frame = (own or frames)[-1]
    return f"{Path(frame.filename).relative_to(_OWN) if own else frame.filename}:{frame.lineno}"


def _event_of(waits: list[str]) -> type:
    class Event:
        """Of a stream of the fake GPU."""

        def record(self) -> None:
            """Nothing runs, so nothing has to be passed."""

        def synchronize(self) -> None:
            """The host waits."""
            waits.append(_site())

    return Event


@contextmanager
def fake_gpu() -> Iterator[list[str]]:
    """Compute on the fake GPU in the block. Yields where the host waits, in order: each is `file:line`."""
    with ExitStack() as stack:
        for target, name, value in (
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "get_device_capability", lambda *_: CAPABILITY),
            (torch.cuda, "_lazy_init", lambda: None),
            (fake_tensor, "init_gpu_context", lambda *_: None),
            (FakeTensorMode, "avoid_device_init", True),
            # In place of one read for each number.
            (FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist()),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        gpu = FakeGpu()
        stack.enter_context(mock.patch.object(torch.cuda, "Event", _event_of(gpu.waits)))
        stack.enter_context(gpu)
        yield gpu.waits
