"""A loopback address for every pod, and names for pods and services.

All of 127.0.0.0/8 is this machine, so each pod can listen on well-known ports at an address of its own. A cluster
claims one 127.N.0.0/16 for as long as it lives, against other clusters of the machine, and gives each node a part. The
names belong to the network too, as a cluster's DNS does: see `names`.
"""

from __future__ import annotations

import random
import socket
from collections import deque
from collections.abc import Iterator

from meshwright_local.nodeagent.network.hosts_files import ClusterNames

_LOWEST, _HIGHEST = 16, 239
_BLOCKS = 255
_HOSTS = 254


class NoAddressError(Exception):
    """No address is free."""


class ClusterNetwork:
    """One 127.N.0.0/16, claimed by an abstract socket: the kernel frees it when the process ends in any way."""

    def __init__(self) -> None:
        self.names = ClusterNames()
        for number in random.sample(range(_LOWEST, _HIGHEST + 1), _HIGHEST + 1 - _LOWEST):
            self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self._claim.bind(f"\0meshwright-network-127.{number}")
            except OSError:
                self._claim.close()
                continue
            self.number = number
            return
        raise NoAddressError("every 127.N.0.0/16 belongs to another embedded cluster: stop one")

    def close(self) -> None:
        """Give the network back."""
        self._claim.close()

    def part(self, index: int, parts: int) -> PodAddresses:
        """The addresses of one of `parts` nodes.

        Raises:
            NoAddressError: More nodes than the network can be cut for.
        """
        size = _BLOCKS // parts
        if size == 0:
            raise NoAddressError(f"{parts} nodes: an embedded cluster has room for at most {_BLOCKS}")
        blocks = range(index * size, (index + 1) * size)
        return PodAddresses((f"127.{self.number}.{block}" for block in blocks), self.names)


class PodAddresses:
    """The free addresses of one node. One that was given back is used again last, so late packets find nobody."""

    def __init__(self, blocks: Iterator[str], names: ClusterNames | None = None) -> None:
        self.names = names or ClusterNames()
        self._free = deque(f"{block}.{host}" for block in blocks for host in range(1, _HOSTS + 1))

    def allocate(self) -> str:
        """An address for a pod.

        Raises:
            NoAddressError: All are in use.
        """
        if not self._free:
            raise NoAddressError("every address of this node is in use")
        return self._free.popleft()

    def release(self, address: str) -> None:
        """The pod is gone."""
        self._free.append(address)


def free_port() -> int:
    """Return a TCP port of the loopback address that no process listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
