"""What islands read from a parameter server between rounds, when their threads wake up early or late."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import nn

from meshwright.api.training import OptimizerSpec
from meshwright_worker.local_sgd.bounded_staleness import StalenessGate
from meshwright_worker.local_sgd.parameter_server import ParameterServer
from meshwright_worker.parallel.shards import ParameterShard

RATE = 0.1
GRADIENT = torch.ones(4)


def server_of(islands: int, bound: int = 8) -> ParameterServer:
    """A server whose parameters have no values yet."""
    parameter = nn.Parameter(torch.full((4,), math.nan))
    shard = ParameterShard("weight", parameter, parameter.detach(), None, True, False, False)
    return ParameterServer([shard], OptimizerSpec(), islands, StalenessGate(bound), lambda event: None)


def moments(server: ParameterServer) -> list[torch.Tensor]:
    return [moment.clone() for moment in server.optimizer.moments(server.shards[0]).values()]


def goes_ahead(request: Future[torch.Tensor]) -> bool:
    """Whether a request is answered before island 0 does anything."""
    return bool(wait([request], timeout=0.3).done)


def test_an_island_that_is_early_does_not_read_parameters_without_values() -> None:
    server = server_of(islands=2)
    with ThreadPoolExecutor(1) as other:
        early = other.submit(server.read, 1)
        assert not goes_ahead(early)
        server.load([torch.full((4,), 3.0)], 0)
        assert torch.equal(server.read(0), torch.full((4,), 3.0))
        assert torch.equal(early.result(), torch.full((4,), 3.0))


def step_of(server: ParameterServer, island: int) -> None:
    server.read(island)
    server.write(island, GRADIENT, RATE)


def test_moments_do_not_change_between_rounds() -> None:
    server = server_of(islands=2)
    server.load([torch.full((4,), 3.0)], 0)

    def other_island() -> torch.Tensor:
        step_of(server, 1)
        server.synchronize(stop=False)
        step_of(server, 1)
        return server.read(1)

    with ThreadPoolExecutor(1) as other:
        ahead = other.submit(other_island)
        step_of(server, 0)
        at_end, _ = server.synchronize(stop=False)
        saved = moments(server)
        assert not goes_ahead(ahead)
        # What a checkpoint of this round contains.
        assert all(torch.equal(now, before) for now, before in zip(moments(server), saved, strict=True))
        assert torch.equal(server.read(0), at_end)
        assert not torch.equal(ahead.result(), at_end)


def test_an_island_that_wakes_up_late_gets_the_parameters_of_the_end_of_the_round() -> None:
    server = server_of(islands=3)
    server.load([torch.full((4,), 3.0)], 0)
    with ThreadPoolExecutor(2) as others:
        late = [others.submit(server.synchronize, stop=island == 2) for island in (1, 2)]
        while server._synchronization.arrived < 2:
            time.sleep(0.01)
        with server._change:  # the others cannot wake up before island 0 has updated the parameters again
            at_end, stop = server.synchronize(stop=False)
            step_of(server, 0)
            assert not torch.equal(server.read(0), at_end)
        assert stop
        for parameters, stopping in (one.result() for one in late):
            assert torch.equal(parameters, at_end)
            assert stopping
