"""The process groups of one mesh generation, in the rank order that the planner and the operator assigned.

Ranks negotiate nothing: rank, world size and master address come from the operator. The store's keys contain the
generation, so a straggler of an older generation cannot join.
"""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import logging
import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.layout import Coordinates, Layout
from meshwright.protocol.run_config import Run
from meshwright_worker.distributed.device import Device, init_device
from meshwright_worker.distributed.node_check import Place, check_nodes
from meshwright_worker.rank.task import RankTask

log = logging.getLogger(__name__)

DATA, PIPELINE, CONTEXT, TENSOR = "data", "pipeline", "context", "tensor"
REPLICA = "replica"
"""The ranks that have the same dense parameters: data x context."""
SHARD, SHARD_REPLICA = "shard", "shard_replica"
"""The replicas that share one set of shards, and those that have the same shard."""
ISLAND = "island"
"""The ranks at the same coordinates in islands that train separately."""
EXPERT, EXPERT_REPLICA = "expert", "expert_replica"
"""The ranks that have different experts of a layer, and those that have the same ones: together, the replicas."""
EXPERT_NODE, EXPERT_LOCAL = "expert_node", "expert_local"
"""The ranks of an expert group with the same place in each node, and those on one node."""

_RENDEZVOUS_TIMEOUT = timedelta(seconds=300)
"""Ranks join once they have opened their data, which takes some pods longer than others if it is tokenized there."""
START_TIMEOUT = timedelta(minutes=30)
"""Limit of a collective until the first step is complete: ranks compile, and load weights at different speeds."""
STEP_TIMEOUT = timedelta(minutes=10)
"""Limit of a collective of later steps. A hang is usually found earlier: see `docs/recovery.md`."""
_CHECKPOINT_TIMEOUT = timedelta(minutes=60)
"""Limit of a collective about checkpoints, in which a rank waits for the slowest access to their volume."""
_LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"

_SIOCGIFADDR = 0x8915
_LOOPBACK = "lo"


@dataclass(frozen=True)
class Mesh:
    """This rank's coordinates among all ranks, and its groups."""

    layout: Layout
    rank: int
    device: torch.device
    device_mesh: DeviceMesh
    """Dimensions `data`, `pipeline`, `context`, `tensor`."""
    replicas: DeviceMesh
    """One dimension: the replicas that take every step together (`data` and `context` of this island, flattened)."""
    hsdp_mesh: DeviceMesh | None
    """Dimensions `shard_replica`, `shard`: the replicas, if a set of shards covers only some of them."""
    islands: DeviceMesh | None
    """One dimension, `island`; None if all ranks take every step together."""
    island_group: dist.ProcessGroup
    """All ranks of this island: they take every step together."""
    experts: DeviceMesh
    """Dimensions `expert_replica`, `expert`, `pipeline`, `tensor`: the same ranks, as experts are distributed over
    them. `device_mesh` itself if experts are not distributed.
    """
    checkpoint_group: dist.ProcessGroup
    """All ranks, on gloo, for the thread that writes checkpoints while training uses the other groups."""
    ranks_per_node: int = 1
    """Number of ranks of each worker; they are consecutive."""

    @property
    def coordinates(self) -> Coordinates:
        """This rank's coordinates."""
        return self.layout.coordinates(self.rank)

    def group(self, dimension: str) -> dist.ProcessGroup:
        """The ranks that differ from this one only in `dimension`, one of this module's names."""
        if dimension == REPLICA or (dimension == EXPERT_REPLICA and self.layout.expert == 1):
            return self.replicas.get_group()
        if dimension in (SHARD, SHARD_REPLICA):
            return (self.hsdp_mesh or self.replicas).get_group(dimension if self.hsdp_mesh else 0)
        if dimension == ISLAND:
            if self.islands is None:
                raise ValueError("all replicas take every step together: `training.outer` is not set")
            return self.islands.get_group()
        mesh = self.experts if dimension in (EXPERT, EXPERT_REPLICA) else self.device_mesh
        return mesh.get_group(dimension)

    @property
    def shards(self) -> DeviceMesh:
        """One dimension: the replicas that share one set of shards."""
        return self.hsdp_mesh[SHARD] if self.hsdp_mesh is not None else self.replicas

    @property
    def island(self) -> int:
        """The index of this rank's island."""
        return self.islands.get_local_rank() if self.islands is not None else 0


def await_listener(
    address: str,
    port: int,
    world_size: int,
    seconds: float = _RENDEZVOUS_TIMEOUT.total_seconds(),
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until rank 0's store listens, or the time is up: then the connection of the store says what is wrong.

    A store that is refused connects again after half a second, and later after more. Here that is a twentieth of a
    second, and more in a large job: rank 0's pod is not asked more than 2,000 times per second.

    Raises:
        ConnectionError: `cancelled` said so.
    """
    deadline, pause = time.monotonic() + seconds, max(0.05, world_size / 2000)
    while time.monotonic() < deadline:
        if cancelled():
            raise ConnectionError("connection closed: the generation is over")
        try:
            socket.create_connection((address, port), timeout=max(1.0, pause)).close()
        except OSError:
            time.sleep(pause * random.uniform(1.0, 1.5))  # noqa: S311 - spreading, not secrecy
        else:
            return


@contextmanager
def join_mesh(task: RankTask[Run]) -> Iterator[Mesh]:
    """Build the mesh of the task's generation for the duration of the block; its groups are destroyed on every exit.

    Raises:
        torch.distributed.DistError: a rank did not join within the time limit, or disconnected.
    """
    with join_process_group(task) as device:
        yield build_mesh(task, device)


@contextmanager
def join_process_group(task: RankTask[Run]) -> Iterator[torch.device]:
    """Create one group of all ranks of the task's generation, destroyed on exit; yields this rank's device.

    After an error, NCCL groups are not destroyed: that would wait for pending collectives, and so for peers that wait
    for this rank. The process reports the error and exits instead.

    Raises:
        torch.distributed.DistError: a rank did not join within the time limit, or disconnected.
    """
    device = connect(task)
    try:
        yield device.torch
    except BaseException:
        if device.backend != "nccl":
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def connect(task: RankTask[Run], cancelled: Callable[[], bool] = lambda: False) -> Device:
    """Create one group of all ranks of the task's generation; returns this rank's device.

    With `in_memory`, the store is that of the agent of rank 0. With `node_check`, the nodes are checked first.

    Raises:
        NodeFaultError: the check found this rank's worker at fault.
        torch.distributed.DistError: a rank did not join within the time limit, or disconnected.
        ConnectionError: `cancelled` said so while the store did not listen, or another worker is at fault.
    """
    device = init_device(task.local_rank, reproducible=task.run.deterministic)
    _pin_interface(task.pod_address)
    hosts = task.rank == 0 and not task.in_memory
    if not hosts:
        await_listener(task.master_address, task.master_port, task.world_size, cancelled=cancelled)
    store = TCPStore(
        task.master_address,
        task.master_port,
        task.world_size,
        is_master=hosts,
        timeout=_RENDEZVOUS_TIMEOUT,
        wait_for_workers=False,
    )
    if task.node_check:
        place = Place(task.rank, task.world_size, task.local_world_size)
        check_nodes(PrefixStore(f"node-check-{task.generation}", store), place, device.torch)
    # No `device_id`: with it, ranks outside a new group of any backend split NCCL's communicator, and those inside a
    # gloo group do not, so they would wait for each other forever (`_new_process_group_helper` in torch 2.13).
    # `init_device` has already set the current device, which collectives use.
    dist.init_process_group(
        device.backend,
        store=PrefixStore(f"generation-{task.generation}", store),
        rank=task.rank,
        world_size=task.world_size,
        timeout=START_TIMEOUT,
    )
    return device


def is_same_on_all_ranks(text: str, mesh: Mesh) -> bool:
    """Return whether every rank has the same string. Collective."""
    value = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
    extremes = torch.tensor([value, -value])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=mesh.checkpoint_group)
    return int(extremes[0]) == -int(extremes[1])


def build_mesh(task: RankTask[Run], device: torch.device) -> Mesh:
    """Create the groups of the task's layout among connected ranks. Collective.

    Raises:
        ValueError: the layout has another number of ranks than the generation.
    """
    layout = task.run.layout
    if layout.world_size != task.world_size:
        raise ValueError(f"{layout} needs {layout.world_size} ranks, but the generation has {task.world_size}")
    shape = (layout.data, layout.pipeline, layout.context, layout.tensor)
    device_mesh = init_device_mesh(device.type, shape, mesh_dim_names=(DATA, PIPELINE, CONTEXT, TENSOR))
    # Replicas differ from the data dimension only if sequences are split.
    replicas = device_mesh[DATA, CONTEXT]._flatten(REPLICA) if layout.context > 1 else device_mesh[DATA]
    islands, hsdp_mesh = None, None
    if task.run.islands > 1:
        island_dimensions = _split_dimension(replicas, replicas.size() // task.run.islands, (ISLAND, "island_replica"))
        islands, replicas = island_dimensions[ISLAND], island_dimensions["island_replica"]
    shard_size = (task.run.parallelism.data_parallel.shard_size or layout.data) * layout.context
    if shard_size < replicas.size():
        hsdp_mesh = _split_dimension(replicas, shard_size, (SHARD_REPLICA, SHARD))
    mesh = Mesh(
        layout=layout,
        rank=task.rank,
        device=device,
        device_mesh=device_mesh,
        replicas=replicas,
        hsdp_mesh=hsdp_mesh,
        islands=islands,
        island_group=_build_island_group(task.run.islands, task.rank, layout.world_size),
        # Creating groups takes time, so unused ones are not created.
        experts=_build_expert_mesh(layout, device) if layout.expert > 1 else device_mesh,
        checkpoint_group=new_host_group(_CHECKPOINT_TIMEOUT, lazy=not task.in_memory),
        ranks_per_node=task.local_world_size,
    )
    set_collective_timeout(START_TIMEOUT)
    return mesh


def new_host_group(timeout: timedelta, *, lazy: bool = True) -> dist.ProcessGroup:
    """Create a group of all ranks on gloo, whose ranks connect when they first communicate. Collective.

    Otherwise each rank would open a connection to every other rank: its collectives use those to a few of them. A rank
    that recovers in memory does that, if not `lazy`: it has to know all connections of its groups. If the ranks are
    simulated, so is this group.
    """
    backend = "fake" if dist.get_backend() == "fake" else "gloo"
    if not lazy:
        eager: dist.ProcessGroup = dist.new_group(backend=backend, timeout=timeout)
        return eager
    before = os.environ.get(_LAZY_GLOO)
    os.environ[_LAZY_GLOO] = "1"
    try:
        group: dist.ProcessGroup = dist.new_group(backend=backend, timeout=timeout)
    finally:
        del os.environ[_LAZY_GLOO]
        if before is not None:
            os.environ[_LAZY_GLOO] = before
    return group


def own_groups() -> list[dist.ProcessGroup]:
    """Return the groups of this rank in the order in which they were created, which is the same on all ranks."""
    return list(dist.distributed_c10d._world.pg_map)


def set_collective_timeout(timeout: timedelta) -> None:
    """Set the limit of collectives that start from now on, in the group of all ranks and in groups between GPUs.

    Groups on gloo have their own limits, because hosts wait in them for other things than steps.
    """
    for group in own_groups():
        backend = dist.get_backend(group)
        if backend == "nccl" or (backend == "gloo" and group is dist.group.WORLD):
            dist.distributed_c10d._set_pg_timeout(timeout, group)


def split_experts_by_node(mesh: Mesh) -> DeviceMesh | None:
    """Return the expert group as two dimensions, `expert_node` and `expert_local`; None if it is on one node.
    Collective.

    Raises:
        ValueError: a node has a different number of ranks of an expert group than another.
    """
    experts, ranks_per_node = mesh.layout.expert, mesh.ranks_per_node
    nodes = (mesh.experts.mesh // ranks_per_node).movedim(1, -1).reshape(-1, experts)
    new_node = nodes[:, 1:] != nodes[:, :-1]
    if not new_node.any():
        return None
    local = int(new_node[0].int().argmax()) + 1
    even = torch.arange(1, experts) % local == 0
    if experts % local or not (new_node == even).all():
        raise ValueError(
            f"`parallelism.expertDispatch: OncePerNode` needs the same number of an expert group's {experts} ranks on "
            f"each node, and nodes have {ranks_per_node} ranks: change `parallelism.expert`"
        )
    return _split_dimension(mesh.experts[EXPERT], local, (EXPERT_NODE, EXPERT_LOCAL))


def _split_dimension(replicas: DeviceMesh, inner: int, names: tuple[str, str]) -> DeviceMesh:
    """Return `replicas` as two dimensions; the inner one has neighbors."""
    return replicas._unflatten(0, (replicas.size() // inner, inner), names)


def _build_island_group(islands: int, rank: int, world_size: int) -> dist.ProcessGroup:
    if islands == 1 and dist.group.WORLD is not None:
        return dist.group.WORLD
    # Replicas are the outermost dimension, so an island has consecutive ranks.
    size = world_size // islands
    firsts = range(0, world_size, size)
    groups: list[dist.ProcessGroup] = [dist.new_group(list(range(first, first + size))) for first in firsts]
    return groups[rank // size]


def _build_expert_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    ranks = torch.arange(layout.world_size).view(layout.data, layout.pipeline, layout.context, layout.tensor)
    spread = ranks.transpose(1, 2).reshape(-1, layout.expert, layout.pipeline, layout.tensor)
    return DeviceMesh(device.type, spread, mesh_dim_names=(EXPERT_REPLICA, EXPERT, PIPELINE, TENSOR))


def _pin_interface(address: str) -> None:
    """Make collectives use the interface that has the pod's address, unless the environment already names one."""
    interface = find_interface(address)
    if interface is None:
        log.debug("no interface has the address %s; the collective libraries choose one", address)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # NCCL would also take every interface whose name begins with this one, such as `net10` for `net1`.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def find_interface(address: str) -> str | None:
    """Return the name of the interface with this address, or None. `::1` and all of 127.0.0.0/8 are `lo`.

    By default gloo resolves the host's name, which may be on another interface.
    """
    parsed = ipaddress.ip_address(address)
    names = [name for _, name in socket.if_nameindex()]
    if parsed.is_loopback:
        return _LOOPBACK if _LOOPBACK in names else None
    if parsed.version == 6:
        return _ipv6_interfaces().get(parsed.packed)
    return next((name for name in names if _address_of(name) == address), None)


def _ipv6_interfaces() -> dict[bytes, str]:
    """IPv6 address -> interface. Linux has no ioctl for this; the file is absent without IPv6."""
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return {}
    fields = [line.split() for line in lines]
    return {bytes.fromhex(parts[0]): parts[-1] for parts in fields if len(parts) == 6}


def _address_of(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
