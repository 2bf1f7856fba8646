"""The process groups of one mesh generation, in the rank order that planner and operator gave.

Nothing is negotiated: rank, world size and master come from the operator, and the store's keys carry the generation, so
a straggler of an older one meets nobody.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.layout import Coordinates, Layout
from meshwright_worker.device import claim
from meshwright_worker.network import interface_of
from meshwright_worker.task import RankTask

log = logging.getLogger(__name__)

DATA, PIPELINE, CONTEXT, TENSOR = "data", "pipeline", "context", "tensor"
REPLICA = "replica"
"""The ranks that hold the same dense parameters: data x context."""
EXPERT, EXPERT_REPLICA = "expert", "expert_replica"
"""The ranks that hold different experts of a layer, and those that hold the same ones: together, the replicas."""

_RENDEZVOUS_TIMEOUT = timedelta(seconds=120)
_COLLECTIVE_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class Mesh:
    """This rank's place among all ranks, and its groups."""

    layout: Layout
    rank: int
    device: torch.device
    devices: DeviceMesh
    """Dimensions `data`, `pipeline`, `context`, `tensor`."""
    replicas: DeviceMesh
    """The one dimension `replica`: `data` and `context` flattened."""
    experts: DeviceMesh
    """Dimensions `expert_replica`, `expert`, `pipeline`, `tensor`: the same ranks, as experts are spread over them."""
    checkpoint_group: dist.ProcessGroup
    """All ranks, on gloo, for the thread that writes checkpoints while training uses the other groups."""

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank is."""
        return self.layout.coordinates(self.rank)

    def group(self, dimension: str) -> dist.ProcessGroup:
        """The ranks that differ from this one in `dimension` alone, one of this module's names."""
        if dimension == REPLICA:
            return self.replicas.get_group()
        mesh = self.experts if dimension in (EXPERT, EXPERT_REPLICA) else self.devices
        return mesh.get_group(dimension)


@contextmanager
def joined(task: RankTask) -> Iterator[Mesh]:
    """The mesh of the task's generation, for as long as the block runs; its groups are destroyed on every way out.

    Raises:
        torch.distributed.DistError: a rank did not come within the time limit, or went away.
    """
    device = claim(task.local_rank)
    _pin_interface(task.pod_address)
    store = TCPStore(
        task.master_address,
        task.master_port,
        task.world_size,
        is_master=task.rank == 0,
        timeout=_RENDEZVOUS_TIMEOUT,
        wait_for_workers=False,
    )
    dist.init_process_group(
        device.backend,
        store=PrefixStore(f"generation-{task.generation}", store),
        rank=task.rank,
        world_size=task.world_size,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    try:
        yield _mesh(task, device.torch)
    finally:
        dist.destroy_process_group()


def same_everywhere(text: str, mesh: Mesh) -> bool:
    """Whether every rank has the same text. Collective."""
    value = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
    extremes = torch.tensor([value, -value])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=mesh.checkpoint_group)
    return int(extremes[0]) == -int(extremes[1])


def _mesh(task: RankTask, device: torch.device) -> Mesh:
    layout = task.run.layout
    if layout.world_size != task.world_size:
        raise ValueError(f"{layout} needs {layout.world_size} ranks, but the generation has {task.world_size}")
    shape = (layout.data, layout.pipeline, layout.context, layout.tensor)
    devices = init_device_mesh(device.type, shape, mesh_dim_names=(DATA, PIPELINE, CONTEXT, TENSOR))
    # Only a sequence that is split makes replicas anything but the data dimension.
    replicas = devices[DATA, CONTEXT]._flatten(REPLICA) if layout.context > 1 else devices[DATA]
    checkpoint_group = dist.new_group(backend="gloo", timeout=_COLLECTIVE_TIMEOUT)
    return Mesh(layout, task.rank, device, devices, replicas, _experts(layout, device), checkpoint_group)


def _experts(layout: Layout, device: torch.device) -> DeviceMesh:
    ranks = torch.arange(layout.world_size).view(layout.data, layout.pipeline, layout.context, layout.tensor)
    spread = ranks.transpose(1, 2).reshape(-1, layout.expert, layout.pipeline, layout.tensor)
    return DeviceMesh(device.type, spread, mesh_dim_names=(EXPERT_REPLICA, EXPERT, PIPELINE, TENSOR))


def _pin_interface(address: str) -> None:
    """Make collectives use the interface that holds the pod's address, unless the environment already names one."""
    interface = interface_of(address)
    if interface is None:
        log.debug("no interface holds %s; the collective libraries choose one", address)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
