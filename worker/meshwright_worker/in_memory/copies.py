"""Copies of a rank's state in host memory: its own, to go back to, and a peer's, who gets it if its process is lost.

Every k steps a rank copies its state, which is all that training waits for. A thread then sends the copy to the rank's
peer and receives that of another rank, over a group of its own. Before the next copy all ranks wait until everyone has
the one before, so that there is always a step of which every rank's state is in two places.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.memory_copies import find_copies
from meshwright.protocol.messages import HeldCopy, HeldState, MemoryCopies
from meshwright_worker.checkpoint.manifest import TrainingState
from meshwright_worker.distributed.step_clock import beside_steps

_ALIGNMENT = 16
_PIECE_BYTES = 1 << 28
"""gloo sends at most 2 GiB at once."""
MAX_COPIES = 16
"""Maximum number of copies that a rank says it has, as in `HeldState`."""


@dataclass(frozen=True, slots=True)
class HostCopy:
    """One rank's state after one step."""

    content: torch.Tensor
    """All tensors of the state, uint8 [bytes]."""
    state: TrainingState | None = None
    """All other state, the same on every rank. None in a peer's copy."""


class HostCopies:
    """The complete copies that a process has. They outlive generations."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[tuple[int, int], HostCopy] = {}

    def get(self, rank: int, step: int) -> HostCopy | None:
        """Return a copy of this rank's state after this step."""
        with self._lock:
            return self._copies.get((rank, step))

    def put(self, rank: int, step: int, copy: HostCopy) -> None:
        """Add a copy."""
        with self._lock:
            self._copies[rank, step] = copy

    def complete(self) -> tuple[tuple[int, int], ...]:
        """Return the rank and step of each copy."""
        with self._lock:
            return tuple(sorted(self._copies))

    def keep(self, step: int | None, ranks: Iterable[int]) -> None:
        """Keep only the copies of these ranks of this step."""
        with self._lock:
            for rank, of_step in set(self._copies) - {(rank, step) for rank in ranks}:
                del self._copies[rank, of_step]


class Copier:
    """Makes the copies of one rank in one generation."""

    def __init__(self, copies: HostCopies, spec: MemoryCopies, group: dist.ProcessGroup) -> None:
        """`group` has all ranks, on gloo, and is used for nothing else."""
        self._copies, self._every, self._group = copies, spec.every_steps, group
        self._rank, world = dist.get_rank(), dist.get_world_size()
        self._holder, self._source = (self._rank + spec.shift) % world, (self._rank - spec.shift) % world
        self._complete: int | None = None
        """The step of the copies that this generation made last."""
        self._error: BaseException | None = None
        self.thread: threading.Thread | None = None
        """Exchanges copies. It may be inside a collective that it cannot leave."""

    def due(self, step: int) -> bool:
        """Whether a copy is made after this step."""
        return step % self._every == 0

    def take(self, tensors: list[torch.Tensor], state: TrainingState) -> None:
        """Copy the state, and begin to exchange the copy. Collective.

        Raises:
            RuntimeError: a rank is lost.
        """
        if self.thread is not None:
            self.thread.join()
        if self._error is not None:
            raise self._error
        if self._complete is None:
            complete = self._newest_complete(state.step)
        else:
            dist.barrier(group=self._group)
            complete = self._complete
        self._copies.keep(complete, (self._rank, self._source))
        self._complete = state.step
        own = HostCopy(pack(tensors), state)
        self._copies.put(self._rank, state.step, own)
        self.thread = threading.Thread(target=self._run, args=(state.step, own), name="copies", daemon=True)
        self.thread.start()

    def _newest_complete(self, now: int) -> int | None:
        """The newest step until `now` of which copies of all states are left from the generation before. Collective.

        Ranks may have copies of different steps, and each step that they keep takes memory.
        """
        ranks = self._rank, self._source
        own = [(of, step) for of, step in self._copies.complete() if of in ranks and step <= now][-MAX_COPIES:]
        table = torch.full((MAX_COPIES, 2), -1, dtype=torch.int64)
        if own:
            table[: len(own)] = torch.tensor(own)
        world = dist.get_world_size()
        tables = [torch.empty_like(table) for _ in range(world)]
        dist.all_gather(tables, table, group=self._group)
        held = {
            rank: HeldState(step=0, copies=[HeldCopy(rank=of, step=step) for of, step in one.tolist() if step >= 0])
            for rank, one in enumerate(tables)
        }
        found = find_copies(world, held)
        return found[0] if found is not None else None

    def _run(self, step: int, own: HostCopy) -> None:
        try:
            with beside_steps():
                self._copies.put(self._source, step, HostCopy(self._exchange(own.content)))
        # torch's errors of lost connections have several types; the training thread raises this one.
        except BaseException as error:
            self._error = error

    def _exchange(self, content: torch.Tensor) -> torch.Tensor:
        """Send a copy to the peer that holds it, and return that of another rank."""
        size, expected = torch.tensor([len(content)]), torch.zeros(1, dtype=torch.int64)
        sent = dist.isend(size, self._holder, group=self._group)
        dist.recv(expected, self._source, group=self._group)
        _wait(sent)
        received = torch.empty(int(expected), dtype=torch.uint8)
        works = [dist.isend(piece, self._holder, group=self._group) for piece in pieces(content)]
        for piece in pieces(received):
            dist.recv(piece, self._source, group=self._group)
        for work in works:
            _wait(work)
        return received


def pieces(content: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return parts of a copy that can be sent at once, in its memory."""
    return iter(torch.split(content, _PIECE_BYTES))


def pack(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the content of tensors one after the other in host memory, uint8 [bytes]."""
    content = torch.zeros(_offsets(tensors)[-1], dtype=torch.uint8)
    for part, tensor in zip(_parts(content, tensors), tensors, strict=True):
        part.copy_(tensor)
    return content


def unpack(content: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copy what `pack` has returned into tensors of the same shapes.

    Raises:
        ValueError: it is the content of others.
    """
    if len(content) != _offsets(tensors)[-1]:
        raise ValueError(f"a copy of {len(content)} bytes is not of this state, which has {_offsets(tensors)[-1]}")
    for part, tensor in zip(_parts(content, tensors), tensors, strict=True):
        tensor.copy_(part)


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _parts(content: torch.Tensor, tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    for tensor, offset in zip(tensors, _offsets(tensors)[:-1], strict=True):
        yield content[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _offsets(tensors: list[torch.Tensor]) -> list[int]:
    """Return where each tensor begins, and where the last one ends."""
    offsets = [0]
    for tensor in tensors:
        offsets.append(offsets[-1] + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return offsets
