"""Gradients in buckets, each handed over as soon as backward passes are done with it (PyTorch DDP, arXiv 2006.15704).

Backward reaches parameters from the last to the first, so buckets are made in that order. A hook on each parameter
counts; a bucket whose parameters have all been reached is due, but never before the one ahead of it: every replica then
starts the same collectives in the same order. What no hook saw (a schedule that computes the gradients of weights
apart, a parameter that a batch does not use) is handed over by `finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from meshwright_worker.parallel.shards import ParameterShard


def buckets_of(shards: Sequence[ParameterShard], limit: int) -> list[list[ParameterShard]]:
    """The shards in the order of backward, in buckets of at most `limit` elements; a larger is alone.

    Those of a bucket have the same dtype and the same replicas.
    """
    return list(_split_into_buckets(list(reversed(shards)), limit))


def _split_into_buckets(shards: list[ParameterShard], limit: int) -> Iterator[list[ParameterShard]]:
    bucket: list[ParameterShard] = []
    for shard in shards:
        elements = sum(other.local.numel() for other in bucket) + shard.local.numel()
        if bucket and (elements > limit or _bucket_key(bucket[0]) != _bucket_key(shard)):
            yield bucket
            bucket = []
        bucket.append(shard)
    if bucket:
        yield bucket


def _bucket_key(shard: ParameterShard) -> tuple[torch.dtype, bool]:
    return shard.local.dtype, shard.expert


class BucketScheduler:
    """Says when a bucket's gradients can be taken.

    Args:
        buckets: from `buckets_of`.
        passes: backward passes that add to a gradient before its bucket is due.
        rounds: how often a step hands over each bucket; backward has `passes * rounds` passes.
        on_ready: takes the index of a bucket that is due; called `rounds` times a step for each, in their order.
    """

    def __init__(
        self, buckets: Sequence[Sequence[ParameterShard]], passes: int, rounds: int, on_ready: Callable[[int], None]
    ) -> None:
        self._passes = passes
        self._rounds = rounds
        self._on_ready = on_ready
        self._reached = [[0] * len(bucket) for bucket in buckets]
        self._ready_count = 0
        for index, bucket in enumerate(buckets):
            for position, shard in enumerate(bucket):
                register: Callable[..., object] = shard.parameter.register_post_accumulate_grad_hook
                register(self._hook(index, position, shard.name))

    def finish(self) -> None:
        """Hand over what is left of the step, and begin the next."""
        while self._ready_count < self._rounds * len(self._reached):
            self._hand_over_next()
        self._ready_count = 0
        for reached_counts in self._reached:
            reached_counts[:] = [0] * len(reached_counts)

    def _hook(self, index: int, position: int, name: str) -> Callable[[torch.Tensor], None]:
        reached_counts = self._reached[index]

        def on_gradient(_: torch.Tensor) -> None:
            reached_counts[position] += 1
            if reached_counts[position] > self._passes * self._rounds:
                raise RuntimeError(f"a backward pass added to {name} after its gradient was summed over replicas")
            while self._due():
                self._hand_over_next()

        return on_gradient

    def _due(self) -> bool:
        count, index = divmod(self._ready_count, len(self._reached))
        return count < self._rounds and min(self._reached[index]) >= (count + 1) * self._passes

    def _hand_over_next(self) -> None:
        index = self._ready_count % len(self._reached)
        self._ready_count += 1
        self._on_ready(index)
