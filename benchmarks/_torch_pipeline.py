"""torch.distributed.pipelining's 1F1B over stages that sleep: the baseline of our executor."""

from __future__ import annotations

import multiprocessing
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks._pipeline_ranks import WIDTH, Took, bubble
from meshwright.schedules.simulator import ActionCosts


class _Busy:
    seconds = 0.0


def _compute(seconds: float) -> None:
    began = time.monotonic()
    time.sleep(seconds)
    _Busy.seconds += time.monotonic() - began


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, costs: ActionCosts) -> torch.Tensor:
        ctx.costs = costs
        _compute(costs.forward)
        return x + weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        _compute(ctx.costs.backward_input + ctx.costs.backward_weight)
        return gradients[0], gradients[0].sum(dim=(0, 1)), None


class _Stage(nn.Module):
    def __init__(self, costs: ActionCosts) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self._costs = costs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Sleep.apply(x, self.weight, self._costs)
        return output


def measure_torch(ranks: int, micro_batches: int, costs: ActionCosts, steps: int) -> float:
    """The bubble of its best step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    ends, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (theirs, rank, ranks, port, micro_batches, costs, steps)
        process = context.Process(target=_rank, args=arguments, daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    took = [end.recv() for end in ends]
    for process in processes:
        process.join()
    return bubble(took)


def _rank(
    answer: Connection, rank: int, ranks: int, port: int, micro_batches: int, costs: ActionCosts, steps: int
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    shape = torch.empty(1, 2, WIDTH, device="meta", requires_grad=True)
    stage = PipelineStage(
        _Stage(costs), rank, ranks, torch.device("cpu"), input_args=shape, output_args=shape, group=dist.group.WORLD
    )
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=lambda output, _: output.sum(), scale_grads=False)
    whole = torch.zeros(micro_batches, 2, WIDTH)

    def step() -> None:
        if rank == 0:
            schedule.step(whole, return_outputs=False)
        elif rank == ranks - 1:
            schedule.step(target=whole, return_outputs=False)
        else:
            schedule.step(return_outputs=False)

    step()
    took = []
    for _ in range(steps):
        dist.barrier()
        start, before = time.monotonic(), _Busy.seconds
        step()
        took.append(Took(start, time.monotonic(), _Busy.seconds - before))
    answer.send(took)
    dist.destroy_process_group()
