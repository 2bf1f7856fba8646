"""Gradient buckets, each handed over as soon as its backward passes are done (PyTorch DDP, arXiv 2006.15704).

Backward reaches parameters from the last to the first, so buckets are built in that order. A hook on each parameter
counts its gradients. A bucket is ready when all of its parameters were reached, but not before the previous bucket:
every replica then starts the same collectives in the same order. Gradients that no hook saw (a schedule with separate
weight gradients, a parameter that a batch does not use) are handed over by `finish`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from meshwright_worker.parallel.shards import ParameterShard

Item = TypeVar("Item")


def buckets_of(shards: Sequence[ParameterShard], limit: int) -> list[list[ParameterShard]]:
    """Return the shards in the order of backward, in buckets of at most `limit` elements; a larger shard has its own
    bucket.

    The shards of a bucket have the same dtype and the same replicas.
    """
    return split_into_buckets(list(reversed(shards)), lambda shard: shard.local.numel(), limit, _bucket_key)


def split_into_buckets(
    items: Iterable[Item], size: Callable[[Item], int], limit: int, key: Callable[[Item], object] = lambda item: None
) -> list[list[Item]]:
    """Split items, in order, into buckets of one key and at most `limit` in size; a larger item has its own bucket."""
    buckets: list[list[Item]] = []
    filled = 0
    for item in items:
        if not buckets or filled + size(item) > limit or key(buckets[-1][0]) != key(item):
            buckets.append([])
            filled = 0
        buckets[-1].append(item)
        filled += size(item)
    return buckets


def _bucket_key(shard: ParameterShard) -> tuple[torch.dtype, bool]:
    return shard.local.dtype, shard.expert


class BucketScheduler:
    """Determines when a bucket's gradients are ready.

    Args:
        buckets: from `buckets_of`.
        passes: backward passes that add to a gradient before its bucket is ready.
        rounds: how often a step hands over each bucket; there are `passes * rounds` backward passes.
        on_ready: called with the index of a ready bucket, `rounds` times per step for each, in their order.
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
        """Hand over the step's remaining buckets, and start the next step."""
        while self._ready_count < self._rounds * len(self._reached):
            self._hand_over_next()
        self._ready_count = 0
        for reached_counts in self._reached:
            reached_counts[:] = [0] * len(reached_counts)

    def _hook(self, index: int, position: int, name: str) -> Callable[[torch.Tensor], None]:
        # torch does not show the garbage collector what these hooks refer to. A hook that refers to what has the
        # parameter would keep both for ever, with the groups.
        reached_counts, scheduler = self._reached[index], weakref.ref(self)
        limit = self._passes * self._rounds

        def on_gradient(_: torch.Tensor) -> None:
            reached_counts[position] += 1
            if reached_counts[position] > limit:
                raise RuntimeError(f"a backward pass added to {name} after its gradient was summed over replicas")
            if (alive := scheduler()) is not None:
                alive.hand_over_due()

        return on_gradient

    def hand_over_due(self) -> None:
        """Hand over the buckets that are ready."""
        while self._due():
            self._hand_over_next()

    def _due(self) -> bool:
        count, index = divmod(self._ready_count, len(self._reached))
        return count < self._rounds and min(self._reached[index]) >= (count + 1) * self._passes

    def _hand_over_next(self) -> None:
        index = self._ready_count % len(self._reached)
        self._ready_count += 1
        self._on_ready(index)
