"""Parameters that lie in more than one place of a pipeline: gradients added up, each counted once.

Tied embeddings lie in the first and in the last stage, and every stage of a bidirectional pipeline on two ranks. The
holders start alike, add up their gradients and take the same step, so they stay alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from meshwright.schedules.pipeline_layout import PipelineLayout
from meshwright_worker.parallel.pipeline.p2p import P2PChannels
from meshwright_worker.parallel.shards import ParameterShard

TIED = "embedding.weight"
"""The parameter that first and last stage share, where the model ties embeddings."""


class SharedWeights:
    """The shards of one rank that lie elsewhere too.

    Args:
        division: which ranks hold which stages.
        rank: this rank among the pipeline's.
        tied: whether the model ties embeddings.
        channels: to the other ranks; None in a pipeline of one.
    """

    def __init__(self, division: PipelineLayout, rank: int, channels: P2PChannels | None, *, tied: bool) -> None:
        self._rank = rank
        self._channels = channels
        self._holders = [division.ranks_of_stage(stage) for stage in range(len(division.layers))]
        self._tied = sorted({*self._holders[0], *self._holders[-1]}) if tied else None
        self._groups: list[tuple[int | None, list[list[ParameterShard]]]] = []

    def deduplicate(self, shards: Sequence[tuple[int, ParameterShard]]) -> list[ParameterShard]:
        """Of (stage, shard), the shards, each with whether it is the copy that counts; remembers who has equals."""
        settled: list[ParameterShard] = []
        by_name: dict[str, list[ParameterShard]] = {}
        partners: dict[str, int | None] = {}
        for stage, shard in shards:
            ranks_of_stage = self._tied if shard.name == TIED and self._tied else self._holders[stage]
            first = ranks_of_stage[0] == self._rank and shard.name not in by_name
            settled.append(replace(shard, counted=shard.counted and first))
            by_name.setdefault(shard.name, []).append(settled[-1])
            partners[shard.name] = next((rank for rank in ranks_of_stage if rank != self._rank), None)
        for partner in sorted({*partners.values()}, key=lambda rank: -1 if rank is None else rank):
            group = [by_name[name] for name in sorted(by_name) if partners[name] == partner]
            group = [copies for copies in group if partner is not None or len(copies) > 1]
            if group:
                self._groups.append((partner, group))
        return settled

    def sum_gradients(self) -> None:
        """Make the gradient of every copy the sum over all of them."""
        for partner, group in self._groups:
            sums = []
            for copies in group:
                gradients = [shard.gradient() for shard in copies]
                sums.append(gradients[0] if len(gradients) == 1 else torch.stack(gradients).sum(dim=0))
            if partner is not None and self._channels is not None:
                flat = torch.cat([total.reshape(-1) for total in sums])
                flat = flat + self._channels.exchange(flat, partner)
                parts = torch.split(flat, [total.numel() for total in sums])
                sums = [part.view_as(total) for part, total in zip(parts, sums, strict=True)]
            for copies, total in zip(group, sums, strict=True):
                for shard in copies:
                    shard.gradient().copy_(total)


def shared_weight_pairs(division: PipelineLayout, *, tied: bool) -> set[tuple[int, int]]:
    """Every (source, target) of ranks that add up gradients."""
    ranks_of_stage = [division.ranks_of_stage(stage) for stage in range(len(division.layers))]
    if tied:
        ranks_of_stage.append(sorted({*ranks_of_stage[0], *ranks_of_stage[-1]}))
    return {(one, other) for ranks in ranks_of_stage for one in ranks for other in ranks if one != other}
