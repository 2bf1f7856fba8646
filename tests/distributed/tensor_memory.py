"""Bytes of tensors that are alive, counted where they are made, whoever holds them: autograd's graph, or a list."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from tests.distributed.op_recorder import EveryPass


class Allocated(EveryPass):
    """Remembers every storage that is made while it is entered, until the storage is gone."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        for storage in _storages(output):
            if storage._cdata in self._alive:
                continue
            # What an operation was given, it only hands on.
            given = {one._cdata for one in _storages((args, kwargs))} if given is None else given
            if storage._cdata not in given:
                self._remember(storage)
        return output

    def bytes(self, but: Iterable[torch.Tensor] = ()) -> int:
        """Of all that is alive, except what these tensors lie in. Sizes are asked now: FSDP changes them in place."""
        left_out = {storage._cdata for storage in _storages(list(but))}
        living = [(key, reference()) for key, reference in list(self._alive.items())]
        return sum(storage.nbytes() for key, storage in living if storage is not None and key not in left_out)

    def _remember(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._alive[key] = weakref.ref(storage, lambda _: self._alive.pop(key, None))


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Of every tensor in nested sequences and mappings, of a distributed one its local part's."""
    if isinstance(value, torch.Tensor):
        local = getattr(value, "_local_tensor", value)
        if local.device.type == "cpu":
            yield local.untyped_storage()
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _storages(item)
    elif isinstance(value, dict):
        yield from _storages(list(value.values()))
