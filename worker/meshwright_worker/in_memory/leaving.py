"""Leaving the process groups of a generation whose peers are gone.

gloo's `abort` does nothing, and a rank that waits for one that lives is told of a lost one only at the time limit. A
connection that is shut down makes both of its ends fail at once, whatever they wait for. Its descriptor stays open and
is gloo's to close.

Private parts of torch 2.13: `_world.pg_map` and the caches of DTensor. Equal meshes of two generations are equal keys
of these caches, which would bring back the groups of the older one.
"""

from __future__ import annotations

import os
import socket
import stat
import threading

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

_DESCRIPTORS = "/proc/self/fd"


class Connections:
    """The TCP connections that this process opens from now on, until `close`: those of a generation's groups."""

    def __init__(self) -> None:
        self._before = frozenset(_connections())
        self._own: frozenset[int] | None = None

    def close(self) -> None:
        """Count no connection that is opened later: all groups exist."""
        self._own = frozenset(_connections()) - self._before

    def cut(self) -> int:
        """Shut them down, from any thread; return how many."""
        cut = 0
        for inode, descriptor in _connections().items():
            if inode in self._before or (self._own is not None and inode not in self._own):
                continue
            try:
                with socket.socket(fileno=os.dup(descriptor)) as duplicate:
                    # The descriptor may have been closed and reused since it was listed.
                    if os.fstat(duplicate.fileno()).st_ino == inode:
                        duplicate.shutdown(socket.SHUT_RDWR)
                        cut += 1
            except OSError:
                continue  # it is closed or not connected any more
        return cut


def _connections() -> dict[int, int]:
    """Inode -> descriptor of each connected TCP socket of this process."""
    found = {}
    for name in os.listdir(_DESCRIPTORS):
        try:
            facts = os.fstat(int(name))
            if not stat.S_ISSOCK(facts.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as duplicate:
                if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                    duplicate.getpeername()
                    found[facts.st_ino] = int(name)
        except OSError:
            continue  # closed meanwhile, or it listens
    return found


LEFT_BEHIND: list[tuple[threading.Thread, list[dist.ProcessGroup]]] = []
"""Threads that are still inside a collective, with their groups: freeing these would wait for the threads."""


def destroy_groups(stuck: threading.Thread | None) -> None:
    """Destroy all groups of this process. `stuck` is a thread that is still inside a collective of one.

    gloo sometimes loses the wake-up of a send: such a thread comes back at its time limit, and is of no use then.
    """
    # Those that have come back meanwhile keep nothing any more.
    LEFT_BEHIND[:] = [one for one in LEFT_BEHIND if one[0].is_alive()]
    if stuck is not None:
        LEFT_BEHIND.append((stuck, list(distributed_c10d._world.pg_map)))
    if dist.is_initialized():
        dist.destroy_process_group()
    # An interrupted rendezvous has counted groups, and all ranks must give the next ones the same names.
    distributed_c10d._world.group_count = 0
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    clear_redistribute_planner_cache()
