"""A loopback address for every pod, and names for pods and services.

All of 127.0.0.0/8 is this machine, so each pod can listen on well-known ports at its own address. A cluster claims one
127.N.0.0/16 while it runs, so that clusters on one machine do not collide, and assigns a part to each node. The
network's `names` act as the cluster's DNS.
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
    """One 127.N.0.0/16, claimed with an abstract socket, which the kernel frees when the process ends."""

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
        """Release the network."""
        self._claim.close()

    def part(self, index: int, parts: int) -> PodAddresses:
        """Return the addresses of one of `parts` nodes.

        Raises:
            NoAddressError: The network has too few addresses for that many nodes.
        """
        size = _BLOCKS // parts
        if size == 0:
            raise NoAddressError(f"{parts} nodes: an embedded cluster can have at most {_BLOCKS}")
        blocks = range(index * size, (index + 1) * size)
        return PodAddresses((f"127.{self.number}.{block}" for block in blocks), self.names)


class PodAddresses:
    """The free addresses of one node. A released address is reused last, so that late packets reach no new pod."""

    def __init__(self, blocks: Iterator[str], names: ClusterNames | None = None) -> None:
        self.names = names or ClusterNames()
        self._free = deque(f"{block}.{host}" for block in blocks for host in range(1, _HOSTS + 1))

    def allocate(self) -> str:
        """Return an address for a pod.

        Raises:
            NoAddressError: All addresses are in use.
        """
        if not self._free:
            raise NoAddressError("every address of this node is in use")
        return self._free.popleft()

    def release(self, address: str) -> None:
        """Release the address of a pod that is gone."""
        self._free.append(address)
