"""What a rank sends: every collective and point-to-point operation that torch dispatches, with its bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.op_recorder import EveryPass

_KINDS = {
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "alltoall_": "all-to-all",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "recv",
}


@dataclass
class Traffic:
    """Operations by kind and size of the group, and the bytes of the whole tensor that each works on.

    The bytes of an all-gather are those of its output, of a reduce-scatter and an all-to-all those of its input.
    """

    calls: Counter[tuple[str, int]] = field(default_factory=Counter)
    payload: Counter[tuple[str, int]] = field(default_factory=Counter)

    def sent(self) -> int:
        """Bytes that this rank sends when all-reduce, all-gather and reduce-scatter run in rings (Patarasuk 2009).

        Of X bytes and n ranks: 2(n-1)/n X for an all-reduce, (n-1)/n X for the others.
        """
        total = 0.0
        for (kind, size), amount in self.payload.items():
            share = {"all-reduce": 2 * (size - 1) / size, "send": 1.0, "recv": 0.0}.get(kind, (size - 1) / size)
            total += amount * share
        return round(total)

    def as_dict(self) -> Mapping[str, tuple[int, int]]:
        """`kind/size` -> (calls, bytes)."""
        return {f"{kind}/{size}": (calls, self.payload[kind, size]) for (kind, size), calls in self.calls.items()}


class Counting(EveryPass):
    """Counts while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        space, _, name = func._schema.name.partition("::")
        if space == "c10d" and name in _KINDS:
            self._count(_KINDS[name], args)
        return func(*args, **(kwargs or {}))

    def _count(self, kind: str, args: Sequence[Any]) -> None:
        group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and _is_group(a))
        self.traffic.calls[kind, group.size()] += 1
        self.traffic.payload[kind, group.size()] += _payload(kind, [_bytes(argument) for argument in args[:2]])


def _payload(kind: str, sizes: Sequence[int]) -> int:
    """Of the bytes of a call's first two arguments, output and input where it has both, those that are told."""
    if kind in ("send", "recv"):
        return sizes[0]
    # Of an uneven exchange, what comes in may be more than what goes out.
    return sizes[1] if kind == "all-to-all" else max(sizes)


def _is_group(value: Any) -> bool:
    return "ProcessGroup" in str(value._type())


def _bytes(argument: Any) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.numel() * argument.element_size()
    return sum(_bytes(item) for item in argument) if isinstance(argument, (list, tuple)) else 0
