"""Parameters with copies on several pipeline ranks: sums their gradients, and counts each parameter once.

Tied embeddings are in the first and in the last stage; in a bidirectional pipeline, every stage is on two ranks. The
copies start equal, sum their gradients and make the same update, so they stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from meshwright.schedules.pipeline_layout import PipelineLayout
from meshwright_worker.distributed.collectives import flatten_tensors, unflatten
from meshwright_worker.parallel.pipeline.p2p import P2PChannels
from meshwright_worker.parallel.shards import ParameterShard

TIED = "embedding.weight"
"""The parameter that the first and the last stage share if the model ties embeddings."""


class SharedWeights:
    """The shards of one rank that have copies on other ranks.

    Args:
        pipeline: which ranks have which stages.
        rank: this rank's index in the pipeline.
        tied: whether the model ties embeddings.
        channels: to the other ranks; None in a pipeline of one.
    """

    def __init__(self, pipeline: PipelineLayout, rank: int, channels: P2PChannels | None, *, tied: bool) -> None:
        self._rank = rank
        self._channels = channels
        self._ranks_of_stage = [pipeline.ranks_of_stage(stage) for stage in range(len(pipeline.layers))]
        self._tied = sorted({*self._ranks_of_stage[0], *self._ranks_of_stage[-1]}) if tied else None
        self._groups: list[tuple[int | None, list[list[ParameterShard]]]] = []

    def deduplicate(self, shards: Sequence[tuple[int, ParameterShard]]) -> list[ParameterShard]:
        """Return the shards of (stage, shard) pairs, marked with whether they are the copy that counts; remember the
        copies.
        """
        deduplicated: list[ParameterShard] = []
        by_name: dict[str, list[ParameterShard]] = {}
        partners: dict[str, int | None] = {}
        for stage, shard in shards:
            ranks_of_stage = self._tied if shard.name == TIED and self._tied else self._ranks_of_stage[stage]
            first = ranks_of_stage[0] == self._rank and shard.name not in by_name
            deduplicated.append(replace(shard, counted=shard.counted and first))
            by_name.setdefault(shard.name, []).append(deduplicated[-1])
            partners[shard.name] = next((rank for rank in ranks_of_stage if rank != self._rank), None)
        for partner in sorted({*partners.values()}, key=lambda rank: -1 if rank is None else rank):
            group = [by_name[name] for name in sorted(by_name) if partners[name] == partner]
            group = [copies for copies in group if partner is not None or len(copies) > 1]
            if group:
                self._groups.append((partner, group))
        return deduplicated

    def sum_gradients(self) -> None:
        """Replace the gradient of every copy by the sum over all copies."""
        for partner, group in self._groups:
            sums = []
            for copies in group:
                gradients = [shard.gradient() for shard in copies]
                sums.append(gradients[0] if len(gradients) == 1 else torch.stack(gradients).sum(dim=0))
            if partner is not None and self._channels is not None:
                flat = flatten_tensors(sums)
                sums = unflatten(flat + self._channels.exchange(flat, partner), sums)
            for copies, total in zip(group, sums, strict=True):
                for shard in copies:
                    shard.gradient().copy_(total)
