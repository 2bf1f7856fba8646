"""Variables of NCCL and gloo that follow from a plan and the fabric of the site.

Each variable is documented in NVIDIA's *NCCL User Guide*, "Environment Variables", or in PyTorch's documentation of
`torch.distributed`. Nothing is set that these libraries find out as well by themselves. A variable in `workers.env` or
in the image wins.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.planner.topology.levels import DOMAIN, RACK
from meshwright.planner.topology.site import NetworkKind, SiteFabric, SiteNetwork


def communication_environment(site: SiteFabric, *, several_workers: bool) -> Mapping[str, str]:
    """Return the variables for all ranks of a job.

    Args:
        site: what the administrator states about the fabric.
        several_workers: whether the job has several workers, or may have. One alone uses no network.
    """
    found: dict[str, str] = {}
    if site.inside(DOMAIN).in_network_reduction is False:
        # NCCL_NVLS_ENABLE: by default NCCL uses NVLink SHARP where it finds it. 0 turns it off.
        found["NCCL_NVLS_ENABLE"] = "0"
    if not several_workers:
        return found
    if site.inside(RACK).in_network_reduction:
        # NCCL_COLLNET_ENABLE: SHARP is off by default, and 1 turns it on. NCCL still chooses the fastest algorithm of
        # each collective, so NCCL_ALGO is not set: it would also bind collectives that SHARP does not have.
        found["NCCL_COLLNET_ENABLE"] = "1"
    found |= _network(site.network)
    return found | dict(site.network.environment)


def _network(network: SiteNetwork) -> dict[str, str]:
    found: dict[str, str] = {}
    if network.adapters:
        # NCCL_IB_HCA: a list of devices. With `=` the names are compared as a whole, and mlx5_1 is not mlx5_10.
        found["NCCL_IB_HCA"] = "=" + ",".join(network.adapters)
    if network.interfaces:
        # NCCL_SOCKET_IFNAME: the same, for interfaces. GLOO_SOCKET_IFNAME (PyTorch) has whole names.
        found["NCCL_SOCKET_IFNAME"] = "=" + ",".join(network.interfaces)
        found["GLOO_SOCKET_IFNAME"] = ",".join(network.interfaces)
    if network.rails is not None:
        # NCCL_CROSS_NIC: 0 keeps a ring or tree on one adapter, for a switch per adapter. 1 lets it change adapters,
        # for adapters that are all connected to the same switch. The default 2 tries to keep it.
        found["NCCL_CROSS_NIC"] = "0" if network.rails else "1"
    if network.gid_index is not None:
        # NCCL_IB_GID_INDEX: the global identifier of RoCE.
        found["NCCL_IB_GID_INDEX"] = str(network.gid_index)
    if network.traffic_class is not None:
        # NCCL_IB_TC: the traffic class of InfiniBand and RoCE.
        found["NCCL_IB_TC"] = str(network.traffic_class)
    if not network.tcp_fallback and network.kind in (NetworkKind.INFINIBAND, NetworkKind.ROCE):
        # NCCL_NET: with a name, NCCL uses this network or fails. `IB` is InfiniBand and RoCE.
        found["NCCL_NET"] = "IB"
    return found
