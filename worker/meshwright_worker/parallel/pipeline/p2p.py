"""Sends hidden states and their gradients between the ranks of one pipeline.

Transfers to higher and to lower ranks use separate process groups. On NCCL, all transfers between two ranks in one
group form one queue, in which a send that waits for its receiver would block a receive behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
import torch.distributed as dist

from meshwright_worker.distributed.mesh import PIPELINE, Mesh
from meshwright_worker.distributed.step_clock import wait_for


class P2PChannels:
    """The point-to-point transfers of this rank's pipeline. Building it is collective over the world.

    Args:
        mesh: the mesh.
        pairs: every (source, target) of pipeline ranks that will ever `send`. Exchanges need none.
    """

    def __init__(self, mesh: Mesh, pairs: Iterable[tuple[int, int]]) -> None:
        self._up = mesh.group(PIPELINE)
        down, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
            mesh.layout.pipeline_groups()
        )
        self._down = down
        self._rank = mesh.coordinates.pipeline
        self._device = mesh.device
        self._in_flight: deque[tuple[dist.Work, torch.Tensor]] = deque()
        if mesh.device.type == "cuda":
            self._connect(connection_order(pairs))

    def post_receive(self, source: int, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> PendingReceive:
        """Start to receive the next tensor that `source` sends."""
        buffer = torch.empty(shape, dtype=dtype, device=self._device)
        group = self._up if source < self._rank else self._down
        work = dist.irecv(buffer, group=group, group_src=source)
        return PendingReceive(_checked(work), buffer, self._up)

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Send a tensor to `target`; returns at once."""
        group = self._up if target > self._rank else self._down
        tensor = tensor.contiguous()
        work = _checked(dist.isend(tensor, group=group, group_dst=target))
        # The tensor's memory must not change until it is sent.
        self._in_flight.append((work, tensor))
        while self._in_flight and self._in_flight[0][0].is_completed():
            self._in_flight.popleft()

    def flush(self, keep: int = 0) -> None:
        """Wait until all tensors were sent, except for the newest `keep`."""
        while len(self._in_flight) > keep:
            wait_for(self._in_flight.popleft()[0], self._up)

    def exchange(self, tensor: torch.Tensor, partner: int) -> torch.Tensor:
        """Send this tensor to `partner` and return its tensor of the same shape, on the same device."""
        # One operation for both directions: two ranks that each waited for their device after one of them would wait
        # for each other.
        own, theirs = tensor.to(self._device).contiguous(), torch.empty_like(tensor, device=self._device)
        operations = [
            dist.P2POp(dist.isend, own, group=self._up, group_peer=partner),
            dist.P2POp(dist.irecv, theirs, group=self._up, group_peer=partner),
        ]
        for work in dist.batch_isend_irecv(operations):
            wait_for(work, self._up)
        return theirs.to(tensor.device)

    def _connect(self, pairs: list[tuple[int, int]]) -> None:
        # NCCL connects two ranks at their first transfer, and each waits for the other. A global order of the transfers
        # rules out a deadlock. Exchanges use the communicator of the entire group, which its first collective creates.
        dist.all_reduce(torch.zeros(1, device=self._device), group=self._up)
        token = torch.zeros(1, device=self._device)
        for source, target in pairs:
            if self._rank == source:
                self.send(token, target)
                self.flush()
            elif self._rank == target:
                self.post_receive(source, token.shape, token.dtype).wait()


def connection_order(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (source, target) of ranks in the order in which all ranks connect them.

    Neighbors whose lower rank is even come first, then the other neighbors, then the rest. So half of a pipeline
    connects at a time, where in the order of ranks one pair would after the other.
    """

    def place(pair: tuple[int, int]) -> tuple[int, bool, tuple[int, int]]:
        lower, upper = min(pair), max(pair)
        return lower % 2 if upper - lower == 1 else 2, pair[0] > pair[1], pair

    return sorted(pairs, key=place)


class PendingReceive:
    """A tensor that is being received."""

    def __init__(self, work: dist.Work, buffer: torch.Tensor, pipeline: dist.ProcessGroup) -> None:
        self._work = work
        self._buffer = buffer
        self._pipeline = pipeline

    def wait(self) -> torch.Tensor:
        """Wait for the tensor and return it."""
        wait_for(self._work, self._pipeline)
        return self._buffer


def _checked(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this rank is not in its pipeline's group")
    return work
