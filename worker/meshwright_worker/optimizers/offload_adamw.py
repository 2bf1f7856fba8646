"""AdamW (arXiv 1711.05101) on the CPU; the moments are never on the accelerator (ZeRO-Offload, arXiv 2101.06840).

Bucket by bucket, gradients and parameters are copied to the CPU, updated, and parameters copied back. On CUDA, the next
bucket and the previous one are copied from and to pinned memory while the CPU updates the current one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from meshwright.api.training import OptimizerSpec
from meshwright_worker.memory.host_memory import CopyStreams
from meshwright_worker.optimizers.offloaded_state import MomentState
from meshwright_worker.optimizers.optimizer import EPSILON, applies_weight_decay, clear_gradients
from meshwright_worker.parallel.shards import ParameterShard


class OffloadAdamW:
    """The optimizer of one rank whose moments are in host memory or in a file."""

    def __init__(
        self, shards: Sequence[ParameterShard], spec: OptimizerSpec, state: MomentState, device: torch.device
    ) -> None:
        self._shards = shards
        self._spec = spec
        self._state = state
        self._transfer = _Transfer(device)
        self._steps = torch.zeros((), dtype=torch.float32)
        self._numbers = {id(shard): number for number, shard in enumerate(shards)}

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        """See `Optimizer.step`."""
        buckets = self._state.buckets
        in_flight = [self._start_transfer(0, gradients)]
        for number in range(len(buckets)):
            if number + 1 < len(buckets):
                in_flight.append(self._start_transfer(number + 1, gradients))
            parameters, host_gradients = self._transfer.wait_for(in_flight.pop(0))
            self._update(number, parameters, host_gradients, rate)
            self._transfer.to_device(parameters, [self._shards[index].local for index in buckets[number]])
            self._state.write_back(number)
        self._transfer.finish()
        self._steps += 1
        self.clear_gradients()

    def clear_gradients(self) -> None:
        """See `Optimizer.clear_gradients`."""
        clear_gradients(self._shards)

    def moments(self, shard: ParameterShard) -> dict[str, torch.Tensor]:
        """See `Optimizer.moments`."""
        return self._state.moments(self._numbers[id(shard)])

    def set_step_count(self, steps: int) -> None:
        """See `Optimizer.set_step_count`."""
        self._steps.fill_(steps)

    def _start_transfer(self, number: int, gradients: Sequence[torch.Tensor]) -> _HostBucket:
        self._state.prefetch(number)
        bucket = self._state.buckets[number]
        return self._transfer.to_host([self._shards[i].local for i in bucket], [gradients[i] for i in bucket])

    def _update(self, number: int, parameters: list[torch.Tensor], gradients: list[torch.Tensor], rate: float) -> None:
        first, second = self._state.get(number)
        matrices = [applies_weight_decay(self._shards[index]) for index in self._state.buckets[number]]
        for decayed in (True, False):
            chosen = [position for position, matrix in enumerate(matrices) if matrix is decayed]
            if chosen:
                adamw(
                    [parameters[i] for i in chosen],
                    [gradients[i] for i in chosen],
                    [first[i] for i in chosen],
                    [second[i] for i in chosen],
                    max_exp_avg_sqs=[],
                    # The kernel increments each tensor's step count itself.
                    state_steps=[self._steps.clone() for _ in chosen],
                    fused=True,
                    amsgrad=False,
                    beta1=self._spec.beta1,
                    beta2=self._spec.beta2,
                    lr=rate,
                    weight_decay=self._spec.weight_decay if decayed else 0.0,
                    eps=EPSILON,
                    maximize=False,
                )


_HostBucket = tuple[list[torch.Tensor], list[torch.Tensor], torch.cuda.Event | None]


class _Transfer:
    """Copies a bucket's parameters and gradients; does nothing if they are already in host memory."""

    def __init__(self, device: torch.device) -> None:
        self._streams = CopyStreams(device)

    def to_host(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> _HostBucket:
        if not parameters[0].is_cuda:
            return parameters, gradients, None
        with self._streams.copying_out() as stream:
            host_bucket = [[_pinned(tensor) for tensor in tensors] for tensors in (parameters, gradients)]
            return host_bucket[0], host_bucket[1], stream.record_event()

    def wait_for(self, host_bucket: _HostBucket) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        parameters, gradients, event = host_bucket
        if event is not None:
            event.synchronize()
        return parameters, gradients

    def to_device(self, updated: list[torch.Tensor], parameters: list[torch.Tensor]) -> None:
        if self._streams.inward is None or not parameters[0].is_cuda:
            return
        with torch.cuda.stream(self._streams.inward):
            for parameter, new in zip(parameters, updated, strict=True):
                parameter.copy_(new, non_blocking=True)

    def finish(self) -> None:
        if self._streams.inward is not None:
            torch.cuda.current_stream().wait_stream(self._streams.inward)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    # torch caches pinned blocks and reuses them once the copies that use them are done.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
