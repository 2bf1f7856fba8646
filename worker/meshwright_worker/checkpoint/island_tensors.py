"""The tensors of a checkpoint of islands.

Checkpoints are taken after islands have synchronized, so parameters are equal on all islands and have their usual
names. Each island has its own optimizer state. That of island 0 has the usual names, so that a run without islands can
resume from it. The state of other islands, and of the outer optimizer, have separate names.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch

from meshwright_worker.checkpoint.state_dict import MODEL, OPTIMIZER, as_distributed
from meshwright_worker.local_sgd.outer_optimizer import OuterOptimizer
from meshwright_worker.parallel.shards import ParameterShard


def island_tensors(
    shards: Sequence[ParameterShard],
    outer: OuterOptimizer,
    island: int,
    buffers: Mapping[str, torch.Tensor] | None = None,
    known: Container[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Return every tensor of this rank to save or load, by name.

    Args:
        shards: what this rank updates.
        outer: of the run.
        island: this rank's.
        buffers: learned buffers, which the end of a round makes equal on all islands.
        known: names in the checkpoint to load. An island that is not in it starts with the state of island 0, and
            missing outer state is not changed. Neither are missing buffers: version 0.1 saved none of islands.
    """
    tensors = {f"{MODEL}.{shard.name}": as_distributed(shard, shard.local) for shard in shards}
    for name, buffer in (buffers or {}).items():
        if known is None or f"{MODEL}.{name}" in known:
            tensors[f"{MODEL}.{name}"] = buffer
    checkpointed_optimizer = outer.checkpointed_optimizer()
    if checkpointed_optimizer is not None:
        optimizer_shards, optimizer = checkpointed_optimizer
        for shard in optimizer_shards:
            for moment, local in optimizer.moments(shard).items():
                default_name = f"{OPTIMIZER}.{shard.name}.{moment}"
                name = default_name if island == 0 else f"island-{island}.{default_name}"
                tensors[name if known is None or name in known else default_name] = as_distributed(shard, local)
    shards_by_name = {shard.name: shard for shard in shards}
    for (parameter, kind), local in outer.tensors().items():
        name = f"outer.{parameter}.{kind}"
        if known is None or name in known:
            tensors[name] = as_distributed(shards_by_name[parameter], local)
    return tensors
