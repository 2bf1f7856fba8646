"""Asynchronous SGD with a bound on staleness (Hogwild!, arXiv 1106.5730; bounded as in arXiv 1312.7869).

In a step, an island reads the parameters from the server, computes gradients, and sends them. The server applies each
island's gradients as they arrive, with the step's learning rate. An island waits for others only because of the bound,
at the end of a round, and until island 0 begins the next one. Messages use gloo, point to point: a header of two
numbers, then one tensor of all the rank's parts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from meshwright.api.training import OptimizerSpec
from meshwright_worker.distributed.collectives import flatten_tensors, unflatten_into
from meshwright_worker.distributed.device import use_device
from meshwright_worker.distributed.mesh import ISLAND, Mesh
from meshwright_worker.distributed.step_clock import beside_steps
from meshwright_worker.local_sgd.bounded_staleness import Event, ReplayOrder, StalenessGate
from meshwright_worker.local_sgd.outer_optimizer import local_tensors
from meshwright_worker.local_sgd.parameter_server import ParameterServer
from meshwright_worker.optimizers.optimizer import Optimizer
from meshwright_worker.parallel.shards import ParameterShard

_READ, _WRITE, _SYNCHRONIZE, _END = range(4)


class AsynchronousSGD:
    """An island's client; in island 0 also the server.

    Args:
        shards: what this rank updates.
        optimizer: settings of the server's optimizer.
        mesh: this rank's coordinates in its island and among islands.
        staleness: the bound, in updates.
        sync_parameters: gives the other replicas of the island the parameters that this rank has read.
    """

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        optimizer: OptimizerSpec,
        mesh: Mesh,
        staleness: int,
        sync_parameters: Callable[[], None],
    ) -> None:
        self._shards = shards
        self._mesh = mesh
        self.weight = 1 / mesh.group(ISLAND).size()
        self._sync_parameters = sync_parameters
        self._connection = _ServerConnection(mesh, sum(shard.local.numel() for shard in shards), shards[0].local.dtype)
        self.server = _serve(shards, optimizer, mesh, staleness, self._connection) if mesh.island == 0 else None

    def begin_step(self) -> None:
        """See `OuterOptimizer.begin_step`."""
        self._load_parameters(self.server.read(0) if self.server else self._connection.request_parameters(_READ))

    def update(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """See `OuterOptimizer.update`."""
        flat = flatten_tensors(gradients).cpu()
        if self.server:
            self.server.write(0, flat, rate)
        else:
            self._connection.send(_WRITE, flat, rate)
        for shard in self._shards:
            shard.parameter.grad = None

    def synchronize(self, *, stop: bool) -> bool:
        """See `OuterOptimizer.synchronize`."""
        if self.server:
            flat, stopping = self.server.synchronize(stop=stop)
        else:
            flat = self._connection.request_parameters(_SYNCHRONIZE, float(stop))
            stopping = self._connection.receive_flag()
        self._load_parameters(flat)
        return stopping

    def on_parameters_loaded(self, step: int) -> None:
        """See `OuterOptimizer.on_parameters_loaded`."""
        if self.server:
            self.server.load(local_tensors(self._shards), step * self._connection.islands)

    def tensors(self) -> dict[tuple[str, str], torch.Tensor]:
        """See `OuterOptimizer.tensors`: only the server's optimizer has state."""
        return {}

    def checkpointed_optimizer(self) -> tuple[Sequence[ParameterShard], Optimizer] | None:
        """See `OuterOptimizer.checkpointed_optimizer`."""
        return (self.server.shards, self.server.optimizer) if self.server else None

    def close(self) -> None:
        """See `OuterOptimizer.close`."""
        self._connection.close()

    def _load_parameters(self, flat: torch.Tensor) -> None:
        with torch.no_grad():
            unflatten_into(flat.to(self._mesh.device), local_tensors(self._shards))
        self._sync_parameters()


class _ServerConnection:
    """Messages between the ranks at the same coordinates of all islands, and between the ranks of island 0.

    Args:
        mesh: creates two groups on gloo; collective over all ranks.
        elements: numbers in a message.
        dtype: of those numbers.
    """

    def __init__(self, mesh: Mesh, elements: int, dtype: torch.dtype) -> None:
        self.islands = mesh.group(ISLAND).size()
        size = mesh.layout.world_size // self.islands
        self.place = mesh.rank % size
        self.places = size
        between = [dist.new_group(list(range(at, self.islands * size, size)), backend="gloo") for at in range(size)]
        self._between: dist.ProcessGroup = between[self.place]
        self._inside: dist.ProcessGroup = dist.new_group(list(range(size)), backend="gloo")
        self._elements = elements
        self._dtype = dtype
        self.threads: list[threading.Thread] = []
        self._sends_end = mesh.island > 0
        self._broadcasts_events = mesh.rank == 0

    def request_parameters(self, kind: int, value: float = 0.0) -> torch.Tensor:
        """Send a request to the server and return the parameters of its reply."""
        self._header(kind, value)
        return self.receive_tensor(0)

    def send(self, kind: int, flat: torch.Tensor, value: float) -> None:
        """Send numbers to the server."""
        self._header(kind, value)
        dist.send(flat, group=self._between, group_dst=0)

    def receive_flag(self) -> bool:
        """Receive a boolean from the server."""
        reply = torch.empty(1)
        dist.recv(reply, group=self._between, group_src=0)
        return bool(reply.item())

    def receive_request(self, island: int) -> tuple[int, float]:
        """Receive an island's request and its number."""
        header = torch.empty(2, dtype=torch.float64)
        dist.recv(header, group=self._between, group_src=island)
        kind, value = header.tolist()
        return int(kind), value

    def receive_tensor(self, source: int) -> torch.Tensor:
        """Receive the numbers of a message from an island."""
        flat = torch.empty(self._elements, dtype=self._dtype)
        dist.recv(flat, group=self._between, group_src=source)
        return flat

    def reply(self, island: int, *tensors: torch.Tensor) -> None:
        """Send tensors to an island."""
        for tensor in tensors:
            dist.send(tensor.cpu(), group=self._between, group_dst=island)

    def announce(self, event: Event | None) -> None:
        """Send an event from rank 0 to the other ranks of its island; None at the end."""
        numbers = torch.tensor([-1, 0] if event is None else [int(event.kind == "write"), event.island])
        for place in range(1, self.places if self._broadcasts_events else 0):
            dist.send(numbers, group=self._inside, group_dst=place)

    def receive_event(self) -> tuple[str, int] | None:
        """Receive the next event from rank 0."""
        numbers = torch.empty(2, dtype=torch.int64)
        dist.recv(numbers, group=self._inside, group_src=0)
        kind, island = numbers.tolist()
        return None if kind < 0 else (("read", "write")[kind], island)

    def close(self) -> None:
        """Close the connection, and wait until the server's threads have ended."""
        if self._sends_end:
            self._header(_END, 0.0)
        for thread in self.threads:
            thread.join()
        # The servers of other ranks follow this one's order until its last connection is closed.
        self.announce(None)

    def _header(self, kind: int, value: float) -> None:
        dist.send(torch.tensor([kind, value], dtype=torch.float64), group=self._between, group_dst=0)


def _serve(
    shards: Sequence[ParameterShard],
    optimizer: OptimizerSpec,
    mesh: Mesh,
    staleness: int,
    connection: _ServerConnection,
) -> ParameterServer:
    """Start this rank's server, and a thread for each other island."""
    order = StalenessGate(staleness) if connection.place == 0 else ReplayOrder()
    server = ParameterServer(shards, optimizer, connection.islands, order, connection.announce)
    tasks: list[Callable[[], None]] = [
        _serve_island(server, connection, island) for island in range(1, connection.islands)
    ]
    if connection.place > 0:
        tasks.append(lambda: _replay_events(server, connection))
    for task in tasks:
        thread = threading.Thread(
            target=_report_errors(task, server, mesh.device), name="parameter-server", daemon=True
        )
        connection.threads.append(thread)
        thread.start()
    return server


def _serve_island(server: ParameterServer, connection: _ServerConnection, island: int) -> Callable[[], None]:
    def serve() -> None:
        while True:
            kind, value = connection.receive_request(island)
            if kind == _READ:
                connection.reply(island, server.read(island))
            elif kind == _WRITE:
                server.write(island, connection.receive_tensor(island), value)
            elif kind == _SYNCHRONIZE:
                flat, stop = server.synchronize(stop=bool(value))
                connection.reply(island, flat, torch.tensor([float(stop)]))
            else:
                return

    return serve


def _replay_events(server: ParameterServer, connection: _ServerConnection) -> None:
    while (event := connection.receive_event()) is not None:
        server.allow(*event)


def _report_errors(task: Callable[[], None], server: ParameterServer, device: torch.device) -> Callable[[], None]:
    def run() -> None:
        try:
            use_device(device)
            with beside_steps():
                task()
        except BaseException as error:
            server.fail(error)

    return run
