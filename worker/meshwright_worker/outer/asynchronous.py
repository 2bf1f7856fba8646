"""Asynchronous SGD with a bound on staleness (Hogwild!, arXiv 1106.5730; bounded as in arXiv 1312.7869).

A step of an island: read the parameters from the server, compute gradients, send them. The server applies each island's
gradients as they come, with the step's learning rate; no island waits for another but for the bound and at the end of a
round. Messages travel on gloo, point to point: a header of four numbers, then one tensor of all that the rank holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from meshwright.api.training import OptimizerSpec
from meshwright_worker.device import use
from meshwright_worker.mesh import ISLAND, Mesh
from meshwright_worker.optimizer import Optimizer
from meshwright_worker.outer.flat import joined_up, spread_out
from meshwright_worker.outer.outer import locals_of
from meshwright_worker.outer.server import ParameterServer
from meshwright_worker.outer.staleness import Event, Script, StalenessGate
from meshwright_worker.parallel.shards import Shard

_READ, _WRITE, _MEET, _END = range(4)


class AsynchronousSGD:
    """An island's side, and in island 0 the server's too.

    Args:
        shards: what this rank updates.
        optimizer: settings of the server's.
        mesh: its place in an island, and among islands.
        staleness: the bound, in updates.
        publish: gives the other replicas of the island what this rank has read.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        optimizer: OptimizerSpec,
        mesh: Mesh,
        staleness: int,
        publish: Callable[[], None],
    ) -> None:
        self._shards = shards
        self._mesh = mesh
        self.weight = 1 / mesh.group(ISLAND).size()
        self._publish = publish
        self._link = _Link(mesh, sum(shard.local.numel() for shard in shards), shards[0].local.dtype)
        self.server = _serve(shards, optimizer, mesh, staleness, self._link) if mesh.island == 0 else None

    def before(self) -> None:
        """See `Outer.before`."""
        self._take(self.server.read(0) if self.server else self._link.ask(_READ))

    def update(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """See `Outer.update`."""
        flat = joined_up(gradients).cpu()
        if self.server:
            self.server.write(0, flat, rate)
        else:
            self._link.send(_WRITE, flat, rate)
        for shard in self._shards:
            shard.parameter.grad = None

    def meet(self, *, stop: bool) -> bool:
        """See `Outer.meet`."""
        if self.server:
            flat, stopping = self.server.meet(stop=stop)
        else:
            flat = self._link.ask(_MEET, float(stop))
            stopping = self._link.flag()
        self._take(flat)
        return stopping

    def loaded(self, step: int) -> None:
        """See `Outer.loaded`."""
        if self.server:
            self.server.load(locals_of(self._shards), step * self._link.islands)

    def tensors(self) -> dict[tuple[str, str], torch.Tensor]:
        """See `Outer.tensors`: nothing but the server's optimizer."""
        return {}

    def updated(self) -> tuple[Sequence[Shard], Optimizer] | None:
        """See `Outer.updated`."""
        return (self.server.shards, self.server.optimizer) if self.server else None

    def close(self) -> None:
        """See `Outer.close`."""
        self._link.close()

    def _take(self, flat: torch.Tensor) -> None:
        with torch.no_grad():
            spread_out(flat.to(self._mesh.device), locals_of(self._shards))
        self._publish()


class _Link:
    """Messages between the ranks in one place of all islands, and between those of island 0.

    Args:
        mesh: makes two groups on gloo; collective over all ranks.
        elements: numbers in a message.
        dtype: of those.
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
        self._ends = mesh.island > 0
        self._tells = mesh.rank == 0

    def ask(self, kind: int, value: float = 0.0) -> torch.Tensor:
        """Send a request to the server; the parameters that it answers with."""
        self._header(kind, value)
        return self.payload(0)

    def send(self, kind: int, flat: torch.Tensor, value: float) -> None:
        """Send numbers to the server."""
        self._header(kind, value)
        dist.send(flat, group=self._between, group_dst=0)

    def flag(self) -> bool:
        """A yes or no from the server."""
        answer = torch.empty(1)
        dist.recv(answer, group=self._between, group_src=0)
        return bool(answer.item())

    def request(self, island: int) -> tuple[int, float]:
        """What an island wants, and the number that goes with it."""
        header = torch.empty(2, dtype=torch.float64)
        dist.recv(header, group=self._between, group_src=island)
        kind, value = header.tolist()
        return int(kind), value

    def payload(self, source: int) -> torch.Tensor:
        """The numbers of a message from an island."""
        flat = torch.empty(self._elements, dtype=self._dtype)
        dist.recv(flat, group=self._between, group_src=source)
        return flat

    def answer(self, island: int, *tensors: torch.Tensor) -> None:
        """Send tensors to an island."""
        for tensor in tensors:
            dist.send(tensor.cpu(), group=self._between, group_dst=island)

    def tell(self, event: Event | None) -> None:
        """Rank 0 tells the other ranks of its island what happened; None at the end."""
        numbers = torch.tensor([-1, 0] if event is None else [int(event.kind == "write"), event.island])
        for place in range(1, self.places if self._tells else 0):
            dist.send(numbers, group=self._inside, group_dst=place)

    def told(self) -> tuple[str, int] | None:
        """What rank 0 tells next."""
        numbers = torch.empty(2, dtype=torch.int64)
        dist.recv(numbers, group=self._inside, group_src=0)
        kind, island = numbers.tolist()
        return None if kind < 0 else (("read", "write")[kind], island)

    def close(self) -> None:
        """End the conversation, and wait until the server's threads have ended."""
        if self._ends:
            self._header(_END, 0.0)
        for thread in self.threads:
            thread.join()
        # Other ranks' servers follow this one's order until its last conversation is over.
        self.tell(None)

    def _header(self, kind: int, value: float) -> None:
        dist.send(torch.tensor([kind, value], dtype=torch.float64), group=self._between, group_dst=0)


def _serve(
    shards: Sequence[Shard], optimizer: OptimizerSpec, mesh: Mesh, staleness: int, link: _Link
) -> ParameterServer:
    """Start this rank's server, and a thread for each island but its own."""
    order = StalenessGate(staleness) if link.place == 0 else Script()
    server = ParameterServer(shards, optimizer, link.islands, order, link.tell)
    tasks: list[Callable[[], None]] = [_conversation(server, link, island) for island in range(1, link.islands)]
    if link.place > 0:
        tasks.append(lambda: _follow(server, link))
    for task in tasks:
        thread = threading.Thread(target=_guarded(task, server, mesh.device), name="parameter-server", daemon=True)
        link.threads.append(thread)
        thread.start()
    return server


def _conversation(server: ParameterServer, link: _Link, island: int) -> Callable[[], None]:
    def talk() -> None:
        while True:
            kind, value = link.request(island)
            if kind == _READ:
                link.answer(island, server.read(island))
            elif kind == _WRITE:
                server.write(island, link.payload(island), value)
            elif kind == _MEET:
                flat, stop = server.meet(stop=bool(value))
                link.answer(island, flat, torch.tensor([float(stop)]))
            else:
                return

    return talk


def _follow(server: ParameterServer, link: _Link) -> None:
    while (event := link.told()) is not None:
        server.expect(*event)


def _guarded(task: Callable[[], None], server: ParameterServer, device: torch.device) -> Callable[[], None]:
    def run() -> None:
        try:
            use(device)
            task()
        except BaseException as error:
            server.fail(error)

    return run
