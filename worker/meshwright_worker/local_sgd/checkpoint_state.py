"""The tensors in a checkpoint of a run with islands.

Checkpoints are taken after islands have synchronized, so parameters are equal on all islands and have their usual
names. Each island has its own optimizer state. That of island 0 has the usual names, so that a run without islands can
resume from it. The state of other islands, and of the outer optimizer, have separate names.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from meshwright_worker.checkpoint.state_dict import MODEL, OPTIMIZER, as_distributed
from meshwright_worker.local_sgd.outer_optimizer import OuterOptimizer
from meshwright_worker.parallel.shards import ParameterShard


def local_sgd_tensors(
    shards: Sequence[ParameterShard], outer: OuterOptimizer, island: int, known: Container[str] | None = None
) -> dict[str, torch.Tensor]:
    """Return every tensor of this rank to save or load, by name.

    Args:
        shards: what this rank updates.
        outer: of the run.
        island: this rank's.
        known: names in the checkpoint to load. An island that is not in it starts with the state of island 0, and
            missing outer state is not changed.
    """
    tensors = {f"{MODEL}.{shard.name}": as_distributed(shard, shard.local) for shard in shards}
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
