"""NUMA nodes of the host, and the CPUs that each rank of a pod should run on.

A rank runs on the CPUs of its GPU's NUMA node, because copies between the GPU and memory of another node are slower. If
the GPU's node is unknown, the ranks of a pod are spread evenly over the nodes. A rank never gets a CPU that its pod may
not use, and never none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright_worker.preflight.host import Host, parse_cpu_list


def numa_nodes(host: Host) -> dict[int, set[int]]:
    """NUMA node -> its CPUs, of nodes that have CPUs."""
    found = {}
    for path in host.glob("/sys/devices/system/node/node[0-9]*"):
        number = path.name.removeprefix("node")
        cpus = parse_cpu_list(host.text(f"/sys/devices/system/node/{path.name}/cpulist"))
        if number.isdigit() and cpus:
            found[int(number)] = cpus
    return found


def numa_node_of(host: Host, address: str) -> int | None:
    """The NUMA node of a PCI device. None if the host does not know it."""
    text = host.text(f"/sys/bus/pci/devices/{address.lower()}/numa_node")
    return int(text) if text.isdigit() else None


def cpus_of_rank(host: Host, local_rank: int, local_ranks: int) -> set[int] | None:
    """The CPUs of one rank of the pod. None if it should keep those of the pod.

    Args:
        host: the host.
        local_rank: the rank's number in its pod, which is also that of its GPU.
        local_ranks: number of ranks in the pod.
    """
    allowed = host.allowed_cpus()
    nodes = {number: cpus & allowed for number, cpus in numa_nodes(host).items() if cpus & allowed}
    if len(nodes) < 2:
        return None
    gpus = host.gpus()
    if len(gpus) == local_ranks:
        node = numa_node_of(host, gpus[local_rank])
        if node is not None:
            return nodes.get(node)
    return _evenly(nodes, local_rank, local_ranks)


def _evenly(nodes: Mapping[int, set[int]], local_rank: int, local_ranks: int) -> set[int] | None:
    """The CPUs of the node that a rank gets if ranks fill nodes in order. None if one rank would leave nodes unused."""
    order: Sequence[int] = sorted(nodes)
    if local_ranks < len(order):
        return None
    return nodes[order[local_rank * len(order) // local_ranks]]


def far_gpus(host: Host) -> list[str]:
    """GPUs of whose NUMA node the pod may use no CPU, as `address (node N)`."""
    allowed, nodes = host.allowed_cpus(), numa_nodes(host)
    found = []
    for address in host.gpus():
        node = numa_node_of(host, address)
        if node in nodes and not nodes[node] & allowed:
            found.append(f"{address} (node {node})")
    return found
