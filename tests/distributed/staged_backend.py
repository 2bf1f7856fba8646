"""Several ranks on one GPU: a backend of torch.distributed that moves tensors over gloo, by way of the host.

NCCL refuses two ranks on one GPU. With this backend a layout of several ranks runs on the kernels of one, as slowly as
gloo. `MESHWRIGHT_TEST_DEVICE=cuda` makes the ranks of the tests' pool use it; `cpu` makes them stage copies of CPU
tensors, which tests the backend itself without a GPU.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from meshwright_worker.distributed import device, mesh
from meshwright_worker.trainer import train

BACKEND = "staged"
ASKED = os.environ.get("MESHWRIGHT_TEST_DEVICE", "")
"""The device of all ranks; empty for their usual ones."""


class StagedWork(dist._Work):
    """A transfer between hosts, and the copies to the device that end it."""

    def __init__(self, work: dist.Work, copies: list[tuple[torch.Tensor, torch.Tensor]], kept: Any) -> None:
        super().__init__()
        self._work, self._copies, self._kept = work, copies, kept
        """`kept` holds tensors that are being sent."""

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._work.wait()
        for target, source in self._copies:
            target.copy_(source)
        self._copies, self._kept = [], None
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        targets = [target for target, _ in self._copies]
        self.wait()
        future.set_result(targets)
        return future


class StagedGroup(dist.ProcessGroup):
    """gloo on copies: tensors are copied to the host first, and what was written is copied back at the wait."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    supports_coalescing = False

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> StagedGroup:
        return self

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _staged(self, name: str, *arguments: Any) -> StagedWork:
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def host(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if id(value) not in copies:
                    copies[id(value)] = (value, value.detach().to("cpu", copy=True).contiguous())
                return copies[id(value)][1]
            return [host(one) for one in value] if isinstance(value, (list, tuple)) else value

        staged = [host(argument) for argument in arguments]
        work = getattr(self._gloo, name)(*staged)
        # The first argument holds the results, of everything that has some.
        written = [] if name == "send" else [copies[id(tensor)] for tensor in _tensors(arguments[0])]
        return StagedWork(work, written, staged)

    def barrier(self, options: Any = None) -> dist.Work:
        return self._gloo.barrier()


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, (list, tuple)) else []


_SAME = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "gather", "scatter", "reduce_scatter"),
    *("alltoall", "send", "recv", "recv_anysource", "_allgather_base", "_reduce_scatter_base", "alltoall_base"),
)
_METHODS = {name: name for name in _SAME} | {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
"""torch's names, and gloo's."""


def _method(name: str) -> Callable[..., dist.Work]:
    def run(self: StagedGroup, *arguments: Any) -> dist.Work:
        return self._staged(name, *arguments)

    return run


for _name, _of_gloo in _METHODS.items():
    setattr(StagedGroup, _name, _method(_of_gloo))


def use_staged_backend(kind: str) -> None:
    """Make ranks of this process use one device of this kind together."""

    usual = device.init_device

    def init_device(local_rank: int, *, reproducible: bool = True) -> device.Device:
        first = usual(0, reproducible=reproducible).torch
        torch.set_num_threads(1)
        return device.Device(first if first.type == kind else torch.device(kind), BACKEND)

    properties = train.device_properties

    def of_the_first(_: int) -> device.DeviceProperties:
        return dataclasses.replace(properties(0), count=sys.maxsize)

    dist.Backend.register_backend(BACKEND, _create, devices=["cuda", "cpu"])
    mesh.init_device = init_device  # type: ignore[attr-defined]
    train.device_properties = of_the_first
    # `DTensor.full_tensor` uses torch's own operator, which looks for a backend in C++.
    for name in ("all_gather_single", "all_gather_tensor"):
        if hasattr(functional, name):
            setattr(functional, name, _all_gather)


def _all_gather(own: torch.Tensor, gather_dim: int, group: Any, *_: Any, **__: Any) -> torch.Tensor:
    group = group if isinstance(group, dist.ProcessGroup) else group[0].get_group(group[1])
    parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts, gather_dim)


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StagedGroup:
    return StagedGroup(store, rank, size, timeout)
