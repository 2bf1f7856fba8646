"""Gradients in buckets, each handed over as soon as backward passes are done with it (PyTorch DDP, arXiv 2006.15704).

Backward reaches parameters from the last to the first, so buckets are made in that order. A hook on each parameter
counts; a bucket whose parameters have all been reached is due, but never before the one ahead of it: every replica then
starts the same collectives in the same order. What no hook saw (a schedule that computes the gradients of weights
apart, a parameter that a batch does not use) is handed over by `finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from meshwright_worker.parallel.shards import Shard


def buckets_of(shards: Sequence[Shard], limit: int) -> list[list[Shard]]:
    """The shards in the order of backward, in buckets of at most `limit` elements; a larger is alone.

    Those of a bucket have the same dtype and the same replicas.
    """
    return list(_cut(list(reversed(shards)), limit))


def _cut(shards: list[Shard], limit: int) -> Iterator[list[Shard]]:
    bucket: list[Shard] = []
    for shard in shards:
        elements = sum(one.local.numel() for one in bucket) + shard.local.numel()
        if bucket and (elements > limit or _kind(bucket[0]) != _kind(shard)):
            yield bucket
            bucket = []
        bucket.append(shard)
    if bucket:
        yield bucket


def _kind(shard: Shard) -> tuple[torch.dtype, bool]:
    return shard.local.dtype, shard.expert


class BackwardOrder:
    """Says when a bucket's gradients can be taken.

    Args:
        buckets: from `buckets_of`.
        passes: backward passes that add to a gradient before its bucket is due.
        rounds: how often a step hands over each bucket; backward has `passes * rounds` passes.
        hand_over: takes the index of a bucket that is due; called `rounds` times a step for each, in their order.
    """

    def __init__(
        self, buckets: Sequence[Sequence[Shard]], passes: int, rounds: int, hand_over: Callable[[int], None]
    ) -> None:
        self._passes = passes
        self._rounds = rounds
        self._hand_over = hand_over
        self._seen = [[0] * len(bucket) for bucket in buckets]
        self._handed = 0
        for index, bucket in enumerate(buckets):
            for place, shard in enumerate(bucket):
                register: Callable[..., object] = shard.parameter.register_post_accumulate_grad_hook
                register(self._hook(index, place, shard.name))

    def finish(self) -> None:
        """Hand over what is left of the step, and begin the next."""
        while self._handed < self._rounds * len(self._seen):
            self._next()
        self._handed = 0
        for seen in self._seen:
            seen[:] = [0] * len(seen)

    def _hook(self, index: int, place: int, name: str) -> Callable[[torch.Tensor], None]:
        seen = self._seen[index]

        def reached(_: torch.Tensor) -> None:
            seen[place] += 1
            if seen[place] > self._passes * self._rounds:
                raise RuntimeError(f"a backward pass added to {name} after its gradient was summed over replicas")
            while self._due():
                self._next()

        return reached

    def _due(self) -> bool:
        count, index = divmod(self._handed, len(self._seen))
        return count < self._rounds and min(self._seen[index]) >= (count + 1) * self._passes

    def _next(self) -> None:
        index = self._handed % len(self._seen)
        self._handed += 1
        self._hand_over(index)
