"""Random numbers of forward passes, such as dropout: which ranks share a stream, and which must not.

Each micro-batch has its own seed, derived from the run's seed, the step and the micro-batch's index in the entire step.
Replicas therefore draw different numbers, and a resumed run draws the same numbers as one that was not interrupted.
Replicas with one micro-batch each draw what one process would draw for the same micro-batches.

For activations that are replicated in a tensor group, all its ranks draw from that one stream. Between `column` and
`row` layers, where each rank has other heads or features, each draws from its own stream (as in Megatron-LM's tensor
parallelism, arXiv 1909.08053). The shared stream continues after the `row` layer as if nothing had been drawn, so
numbers drawn outside are the same for every tensor degree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from meshwright_worker.counter_rng import stream_key
from meshwright_worker.custom_module.plan_resolution import ResolvedPlan


class RandomStreams:
    """The random stream that torch uses on this rank.

    Args:
        device: of the module.
        seed: of the run.
        rank: in the tensor group.
    """

    def __init__(self, device: torch.device, seed: int, rank: int) -> None:
        self._device = device
        self._seed = seed
        self._rank = rank
        self._shared: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        """The shared stream's state where this rank left it, by the seed of the own stream that replaced it. Looked up
        by the seed that torch uses now: activation checkpointing may end the recomputation of a region in its middle,
        and begins others with the stream that each had."""

    @contextmanager
    def of(self, step: int, batch: int) -> Iterator[None]:
        """Use the stream of a step's micro-batch; afterwards the caller's stream continues as if nothing had been
        drawn.
        """
        before = self._state()
        self._shared = {}
        torch.manual_seed(stream_key(self._seed, "own", step, batch))
        try:
            yield
        finally:
            self._restore(before)

    def watch(self, parts: ResolvedPlan) -> None:
        """Switch streams at the borders of split parts."""
        for column in parts.column.values():
            column.register_forward_hook(self._on_column_output)
        for inner in [*parts.row.values(), *parts.regions.values()]:
            inner.register_forward_hook(self._on_region_exit)

    def _on_column_output(self, layer: nn.Module, *_: object) -> None:
        if layer.training and torch.initial_seed() not in self._shared:
            # Drawn, not counted: activation checkpointing restores the stream, and so draws the same number again.
            own = int(torch.randint(1 << 62, ())) + self._rank
            self._shared[own] = self._state()
            torch.manual_seed(own)

    def _on_region_exit(self, *_: object) -> None:
        shared = self._shared.get(torch.initial_seed())
        if shared is not None:
            self._restore(shared)

    def _state(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        on_device = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return torch.get_rng_state(), on_device

    def _restore(self, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        on_host, on_device = state
        torch.set_rng_state(on_host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, self._device)
